"""The ratio rules for all sequences of a step at once, on the device of the distributions.

The rules for a single sequence read a number from the device before each decision. Here decisions
are tensor operations, and the host gets two numbers per sequence: the last accepted row and the
next token. Scalars are float64, like the Python numbers of the other rules.

The order of a trial list depends on the tree's shape only: a node's trials, then the node itself.
So all sequences walk in lockstep. A sequence with a known verdict changes nothing more.

Shape legend: S sequences, N draft nodes at most, M = N + 1 rows (row 0 is the root), V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch

from outrider.contracts import Draw, Proposal

# A residual below this mass is rounding noise; the token then comes from p. This happens with at
# most this probability, which bounds the error.
EPS = 1e-6


@dataclass(slots=True)
class Batch:
    """Distributions and drafts of all sequences. Padding: nodes that no sequence visits."""

    p_SMV: torch.Tensor
    q_SNV: torch.Tensor  # of each trial given that the earlier ones failed
    tokens_SN: torch.Tensor
    uniforms_SN: torch.Tensor  # float64
    sizes: list[int]
    parents: list[list[int]]

    @classmethod
    def of(cls, p: Seq[torch.Tensor], proposals: Seq[Proposal], uniforms: Seq[Seq[float]]) -> Batch:
        sizes = [len(proposal) for proposal in proposals]
        most, device = max(sizes), p[0].device
        p_SMV = p[0].new_zeros(len(p), most + 1, p[0].shape[1])
        q_SNV = p_SMV[:, 1:].clone()
        for s, (rows, proposal) in enumerate(zip(p, proposals, strict=True)):
            p_SMV[s, : len(rows)] = rows
            if proposal.draw is not Draw.DETERMINISTIC and proposal.q is not None:
                q_SNV[s, : sizes[s]] = proposal.q.to(device)
        tokens = [[*x.tokens, *[0] * (most - len(x))] for x in proposals]
        tokens_SN = torch.tensor(tokens, device=device).view(len(p), most)
        padded = [[*some, *[2.0] * (most - len(some))] for some in uniforms]
        uniforms_SN = torch.tensor(padded, dtype=torch.float64, device=device).view(len(p), most)
        parents = [
            list(range(-1, len(x) - 1)) if x.parents is None else x.parents for x in proposals
        ]
        batch = cls(p_SMV, q_SNV, tokens_SN, uniforms_SN, sizes, parents)
        batch._finish_distributions(proposals)
        return batch

    def _finish_distributions(self, proposals: Seq[Proposal]) -> None:
        """One-hot rows of deterministic drafts; rows without the earlier siblings."""
        sure, gone, fewer = [], [], []
        for s, proposal in enumerate(proposals):
            parents, tokens = self.parents[s], proposal.tokens
            for node, token in enumerate(tokens):
                if proposal.draw is Draw.DETERMINISTIC or proposal.q is None:
                    sure.append((s, node, token))
                elif proposal.draw is Draw.WITHOUT_REPLACEMENT:
                    before = [i for i in range(node) if parents[i] == parents[node]]
                    gone += [(s, node, tokens[i]) for i in before]
                    fewer += [(s, node)] if before else []
        for entries, value in ((sure, 1.0), (gone, 0.0)):
            if entries:
                self.q_SNV[_index(entries, self.q_SNV.device)] = value
        if fewer:
            at = _index(fewer, self.q_SNV.device)
            rows = self.q_SNV[at]
            self.q_SNV[at] = rows / rows.sum(dim=-1, keepdim=True)


def _index(entries: Seq[tuple[int, ...]], device: torch.device) -> tuple[torch.Tensor, ...]:
    return torch.tensor(entries, device=device).unbind(1)


def _ratio(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    return torch.where(q > 0, p / torch.where(q > 0, q, 1.0), 0.0)


def decide_tokens(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """The token rule on chains: per sequence the last accepted row and the next distribution."""
    p_SMV, q_SNV, tokens_SN = batch.p_SMV, batch.q_SNV, batch.tokens_SN
    p_x = p_SMV[:, :-1].gather(2, tokens_SN[:, :, None])[:, :, 0].double()
    q_x = q_SNV.gather(2, tokens_SN[:, :, None])[:, :, 0].double()
    kept_S = (batch.uniforms_SN < _ratio(p_x, q_x)).int().cumprod(1).sum(1)
    sequence = torch.arange(len(p_SMV), device=p_SMV.device)
    dist_SV = p_SMV[sequence, kept_S]
    refused_S = kept_S < torch.tensor(batch.sizes, device=p_SMV.device)
    q_SV = q_SNV[sequence, kept_S.clamp(max=q_SNV.shape[1] - 1)]
    rest_SV = (dist_SV - q_SV).clamp_(min=0.0)
    usable_S = refused_S & (rest_SV.sum(dim=-1) > EPS)
    return kept_S, torch.where(usable_S[:, None], rest_SV, dist_SV)


def decide_trials(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """The trial-list rule on trees, which is the block rule on chains."""
    num, device = len(batch.sizes), batch.p_SMV.device
    dist_SMV = batch.p_SMV.clone()
    weight = torch.ones(num, dist_SMV.shape[1], dtype=torch.float64, device=device)
    mass = torch.ones_like(weight)
    kept_S = torch.zeros(num, dtype=torch.int64, device=device)
    open_S = torch.ones(num, dtype=torch.bool, device=device)
    sequence = torch.arange(num, device=device)
    walks = [walk(parents) for parents in batch.parents]
    for i in range(max(map(len, walks))):
        step = [walk[i] if i < len(walk) else None for walk in walks]
        # A sequence without further steps repeats its first node without effect.
        node_S = torch.tensor([at[0] if at else 0 for at in step], device=device)
        leaves_S = torch.tensor([bool(at and at[1]) for at in step], device=device)
        row_S = torch.tensor(
            [p[at[0]] + 1 if at else 0 for p, at in zip(batch.parents, step, strict=True)],
            device=device,
        )
        walks_S = open_S & torch.tensor([at is not None for at in step], device=device)
        token_S1 = batch.tokens_SN[sequence, node_S][:, None]
        dist_SV, q_SV = dist_SMV[sequence, row_S], batch.q_SNV[sequence, node_S]
        w_S, m_S = weight[sequence, row_S], mass[sequence, row_S]

        p_x, q_x = dist_SV.gather(1, token_S1)[:, 0].double(), q_SV.gather(1, token_S1)[:, 0]
        entered_S = (w_S * _ratio(p_x / m_S, q_x.double())).clamp(max=1.0)
        old_S = weight[sequence, node_S + 1]
        weight[sequence, node_S + 1] = torch.where(walks_S & ~leaves_S, entered_S, old_S)

        accepts_S = walks_S & leaves_S & (batch.uniforms_SN[sequence, node_S] < old_S)
        kept_S = torch.where(accepts_S, node_S + 1, kept_S)
        open_S = open_S & ~accepts_S
        fails_S = walks_S & leaves_S & ~accepts_S
        if not any(at and at[1] for at in step):
            continue
        rest_SV = (dist_SV * (w_S / m_S).float()[:, None]).sub_(q_SV).clamp_(min=0.0)
        rest_S = rest_SV.sum(dim=-1).double()
        owed_S = rest_S + (1.0 - w_S)
        after_S = torch.where(owed_S > 0, rest_S / torch.where(owed_S > 0, owed_S, 1.0), 1.0)
        weight[sequence, row_S] = torch.where(fails_S, after_S, weight[sequence, row_S])
        usable_S = fails_S & (rest_S > EPS)
        mass[sequence, row_S] = torch.where(usable_S, rest_S, m_S)
        dist_SMV[sequence, row_S] = torch.where(usable_S[:, None], rest_SV, dist_SV)
    return kept_S, dist_SMV[sequence, kept_S]


def walk(parents: list[int]) -> list[tuple[int, bool]]:
    """(node, whether it is left): every node is entered, then its trials, then it is left."""
    children: list[list[int]] = [[] for _ in range(len(parents) + 1)]
    for node, parent in enumerate(parents):
        children[parent + 1].append(node)
    steps: list[tuple[int, bool]] = []
    stack = [(node, False) for node in reversed(children[0])]
    while stack:
        node, leaves = stack.pop()
        steps.append((node, leaves))
        if not leaves:
            stack.append((node, True))
            stack += [(child, False) for child in reversed(children[node + 1])]
    return steps
