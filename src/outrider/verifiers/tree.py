"""The trial-list rule: one exact ratio rule for every tree of drafts.

Each node has ordered *trials*: child c, and the distribution Q it was drawn from given that the
earlier trials failed. A node has a weight w (its remaining probability) and a distribution P (of
the token after it, given that the trials so far failed):

    push(root, w = 1, P = p_root)
    loop on the top node:
      a trial c is left:  push(c, min(1, w P[c] / Q[c]), p_c)
      else if u < w:      accept the path to it, next token ~ P; stop
      else pop; at its parent  D = max(0, w P - Q), S = sum D, P = D / S, w = S / (S + 1 - w)

Chains (the block rule), siblings with or without replacement and deterministic children are special
cases. The tree's shape must not depend on the tokens it tests: the context and q may decide which
nodes exist, the token drawn at a node may not.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch

from outrider.contracts import Draw, Proposal
from outrider.verifiers.batched import EPS, decide_trials
from outrider.verifiers.block import keep_probability
from outrider.verifiers.ratio import Decision, RatioVerifier, draft_distribution, ratio, residual


class TreeVerifier(RatioVerifier):
    name = "tree"
    trees = True
    needs_draws_alone = False

    decide_all = staticmethod(decide_trials)

    def decide(self, p_MV: torch.Tensor, proposal: Proposal, uniforms: Seq[float]) -> Decision:
        parents = proposal.parents
        if parents is None:
            parents = list(range(-1, len(proposal) - 1))
        return decide_tree(
            p_MV,
            draft_distribution(proposal, p_MV.device),
            proposal.tokens,
            parents,
            uniforms,
            distinct=proposal.draw is Draw.WITHOUT_REPLACEMENT,
        )


@dataclass(slots=True)
class _Frame:
    """A node on the stack. Its distribution P is `dist_V / mass`."""

    row: int  # of p_MV: 0 is the root, 1 + j is node j
    weight: float
    dist_V: torch.Tensor
    mass: float = 1.0
    num_tried: int = 0


def decide_tree(
    p_MV: torch.Tensor,
    q_NV: torch.Tensor | None,
    tokens: list[int],
    parents: list[int],
    uniforms: Seq[float],
    *,
    distinct: bool = False,
) -> Decision:
    """`q_NV is None`: one-hot at the drafted tokens. `distinct`: siblings without replacement."""
    children: list[list[int]] = [[] for _ in range(len(tokens) + 1)]  # by row
    for node, parent in enumerate(parents):
        children[parent + 1].append(node)

    stack = [_Frame(0, 1.0, p_MV[0])]
    while True:
        top = stack[-1]
        trials = children[top.row]
        if top.num_tried < len(trials):
            node = trials[top.num_tried]
            p_x = float(top.dist_V[tokens[node]]) / top.mass
            q_V = trial_distribution(q_NV, tokens, trials, top.num_tried, distinct)
            q_x = 1.0 if q_V is None else float(q_V[tokens[node]])
            weight = min(1.0, top.weight * ratio(p_x, q_x))
            stack.append(_Frame(node + 1, weight, p_MV[node + 1]))
            continue
        # The root's weight never leaves 1: something is always emitted.
        if top.row == 0 or uniforms[top.row - 1] < top.weight:
            return Decision([frame.row - 1 for frame in stack[1:]], top.dist_V)
        stack.pop()
        _fail(stack[-1], q_NV, tokens, children[stack[-1].row], distinct)


def _fail(
    frame: _Frame, q_NV: torch.Tensor | None, tokens: list[int], trials: list[int], distinct: bool
) -> None:
    """The current trial of `frame` failed: continue with the residual."""
    q_V = trial_distribution(q_NV, tokens, trials, frame.num_tried, distinct)
    token = tokens[trials[frame.num_tried]]
    dist_V = residual(frame.dist_V, q_V, token, frame.weight / frame.mass)
    mass = float(dist_V.sum())
    frame.weight = keep_probability(mass, frame.weight)
    frame.num_tried += 1
    if mass > EPS:
        frame.dist_V, frame.mass = dist_V, mass


def trial_distribution(
    q_NV: torch.Tensor | None, tokens: list[int], trials: list[int], index: int, distinct: bool
) -> torch.Tensor | None:
    """The distribution of trial `index` given that the earlier ones failed; None is one-hot.

    Without replacement this removes the earlier siblings, and leaves rows that lack them unchanged.
    """
    if q_NV is None:
        return None
    q_V = q_NV[trials[index]]
    if not distinct or index == 0:
        return q_V
    q_V = q_V.clone()
    q_V[[tokens[node] for node in trials[:index]]] = 0.0
    return q_V / q_V.sum()
