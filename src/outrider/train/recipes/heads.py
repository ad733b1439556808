"""Shared by the recipes of all drafting heads.

A head drafts several tokens ahead; for each depth a recipe yields the logits of the head and of the
target at the same positions. Loss and measurement are then the same for every kind: the mixture of
`losses.distil`, weighted by depth.

Shapes: B rows, L positions, N compared positions, H hidden, V vocabulary, W draft vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from outrider.model.heads import Head
from outrider.train.config import HeadConfig
from outrider.train.losses import distil
from outrider.train.models import compile_layers, hidden_states, layer_states, output_logits
from outrider.train.trainer import Recipe

WIDE_VOCABULARY = 16384


@dataclass
class Depth:
    """One depth: the logits of both sides at the same N positions, starts in the same order.

    `ids_W` maps the drafter's columns to those of `p_NV` if its vocabulary is reduced.
    """

    q_NW: Tensor
    p_NV: Tensor
    ids_W: Tensor | None = None
    confidence_N: Tensor | None = None
    best_N: Tensor | None = None  # the target's most likely column, -1: none of the drafter's

    @property
    def same_N(self) -> Tensor:
        """Where both sides have the same most likely token."""
        best_N = self.q_NW.argmax(-1)
        if self.best_N is not None:
            return best_N == self.best_N
        best_N = best_N if self.ids_W is None else self.ids_W[best_N]
        return best_N == self.p_NV.argmax(-1)


def narrowed(logits: Tensor, ids_W: Tensor) -> tuple[Tensor, Tensor]:
    """The distribution `with_rest` over a reduced vocabulary, and the most likely column."""
    logs = logits.float().log_softmax(-1)
    return with_rest(logs[..., ids_W]), columns_of(logs.argmax(-1), ids_W)


def with_rest(logs_W: Tensor) -> Tensor:
    """Log-probabilities with a last column for all ids that have none of their own."""
    rest = (1 - logs_W.exp().sum(-1, keepdim=True)).clamp_min(1e-20).log()
    return torch.cat([logs_W, rest], dim=-1)


def columns_of(ids: Tensor, ids_W: Tensor) -> Tensor:
    """The columns of target ids in a reduced vocabulary, ascending; -1: it has none."""
    column = torch.searchsorted(ids_W, ids).clamp_max(len(ids_W) - 1)
    return torch.where(ids_W[column] == ids, column, -1)


class FrozenTarget:
    """The target as a source of features, computed once per batch for all heads."""

    def __init__(self, model: Any, *, compiled: bool = False) -> None:
        self.model = model.eval().requires_grad_(False)
        self.head = model.get_output_embeddings()
        self.embed = model.get_input_embeddings()
        self._seen: Tensor | None = None
        self._states: tuple[Tensor, ...] = ()
        self._next_logits: Tensor | None = None
        self._narrowed: tuple[Tensor, Tensor] | None = None
        self._last: tuple[Tensor, Tensor] | None = None
        if compiled:
            compile_layers(model)

    @torch.no_grad()
    def states(self, tokens_BL: Tensor) -> tuple[Tensor, ...]:
        """Hidden states by tap; the last one is after the final norm, as the head expects it."""
        if self._seen is not tokens_BL:
            self._seen, self._next_logits, self._narrowed = tokens_BL, None, None
            self._states = layer_states(self.model, tokens_BL)
        return self._states

    @torch.no_grad()
    def last(self, tokens_BL: Tensor) -> Tensor:
        """The last state alone, after the final norm, [B, L, H]: enough for a draft model."""
        if self._last is None or self._last[0] is not tokens_BL:
            self._last = tokens_BL, hidden_states(self.model, tokens_BL)
        return self._last[1]

    @torch.no_grad()
    def next_logits(self, tokens_BL: Tensor) -> Tensor:
        """Logits for the token after each position, [B, L, V]."""
        states = self.states(tokens_BL)
        if self._next_logits is None:
            self._next_logits = self.logits(states[-1])
        return self._next_logits

    @torch.no_grad()
    def narrowed(self, tokens_BL: Tensor, ids_W: Tensor) -> tuple[Tensor, Tensor]:
        """The `narrowed` distribution after each position, once for all depths of a batch."""
        states = self.states(tokens_BL)
        if self._narrowed is None:
            # Row by row: the logits of a row of 512 tokens over a wide vocabulary are 100 MB.
            rows = [narrowed(self.logits(row), ids_W) for row in states[-1]]
            logs, columns = zip(*rows, strict=True)
            self._narrowed = torch.stack(logs), torch.stack(columns)
        return self._narrowed

    def logits(self, hidden: Tensor) -> Tensor:
        """The target's own output head, for its states or for a drafter's."""
        return output_logits(self.model, hidden.to(self.head.weight.dtype))

    def taps(self, tokens_BL: Tensor, taps: tuple[int, ...]) -> Tensor:
        """[B, L, T, H]"""
        states = self.states(tokens_BL)
        return torch.stack([states[tap] for tap in taps], dim=2)


class HeadRecipe(ABC):
    """Base of the head recipes; subclasses define what is compared at each depth."""

    def __init__(self, head: Head, target: FrozenTarget, config: HeadConfig) -> None:
        self.module: nn.Module = head
        self.drafter = head
        self.target, self.config = target, config
        self._distil = torch.compile(distil) if config.compiled else distil

    @abstractmethod
    def depths(self, tokens_BL: Tensor, step: int, skip: int = 0) -> Iterator[Depth]:
        """The comparisons on these rows, nearest depth first; no draft starts before `skip`."""

    def loss(self, tokens_BL: Tensor, step: int, done: float) -> tuple[Tensor, dict[str, Tensor]]:
        share = torch.tensor(self.config.tvd_share * done, device=tokens_BL.device)
        loss = torch.zeros((), device=tokens_BL.device)
        alphas, total = [], 0.0
        for index, depth in enumerate(self.depths(tokens_BL, step)):
            weight = self.config.decay**index
            total += weight
            row_N, alpha_N = self._distil(depth.q_NW, depth.p_NV, share, depth.ids_W)
            loss = loss + weight * row_N.mean()
            if depth.confidence_N is not None:
                loss = loss + weight * confidence_loss(depth.confidence_N, alpha_N)
            alphas.append(alpha_N.mean())
        survival = torch.stack(alphas).cumprod(0)
        return loss / total, {"alpha": alphas[0], "length": 1 + survival.sum()}

    @torch.no_grad()
    def measure(
        self,
        rows_BL: Tensor,
        *,
        rows_per_pass: int = 8,
        skip: int = 0,
        temperature: float = 1.0,
    ) -> dict[str, Any]:
        """alpha and greedy agreement by depth, and the greedy acceptance length, on whole rows.

        Later depths read the rows' own tokens. So the greedy length is exact if the rows are the
        target's greedy text, and the alphas are conditional on accepted drafts so far.
        """
        if self.target.head.weight.shape[0] > WIDE_VOCABULARY:
            rows_per_pass = 1  # logits of a row of 512 tokens are 100 MB
        alphas: list[list[Tensor]] = []
        same: list[list[Tensor]] = []
        for number, part_BL in enumerate(torch.split(rows_BL, rows_per_pass)):
            for index, depth in enumerate(self.depths(part_BL, number, skip)):
                if index == len(alphas):
                    alphas.append([])
                    same.append([])
                _, alpha_N = distil(
                    depth.q_NW / temperature, depth.p_NV / temperature, torch.zeros(()), depth.ids_W
                )
                alphas[index].append(alpha_N)
                same[index].append(depth.same_N.float())
        same_KN = torch.stack([torch.cat(parts) for parts in same])
        alpha_KN = torch.stack([torch.cat(parts) for parts in alphas])
        alpha_K = alpha_KN.mean(1).tolist()
        return {
            "alpha": alpha_K[0],
            "agreement": same_KN[0].mean().item(),
            "alpha_by_depth": alpha_K,
            "agreement_by_depth": same_KN.mean(1).tolist(),
            "greedy_acceptance_length": 1 + same_KN.cumprod(0).sum(0).mean().item(),
            "sampled_acceptance_length": 1 + alpha_KN.cumprod(0).sum(0).mean().item(),
            "num_draft_tokens": len(alpha_K),
            "num_positions": same_KN.shape[1],
        }

    def save(self, folder: Path) -> None:
        self.drafter.save(folder)


def confidence_loss(confidence_N: Tensor, alpha_N: Tensor) -> Tensor:
    """Cross-entropy of the predicted acceptance against the true one."""
    guess_N = confidence_N.float().clamp(1e-6, 1 - 1e-6)
    goal_N = alpha_N.detach()
    return -(goal_N * guess_N.log() + (1 - goal_N) * (1 - guess_N).log()).mean()


class Together:
    """Several recipes in one run on the same batches, with disjoint parameters."""

    def __init__(self, recipes: Mapping[str, Recipe]) -> None:
        self.recipes = recipes
        self.module: nn.Module = nn.ModuleDict({name: r.module for name, r in recipes.items()})

    def loss(self, tokens_BL: Tensor, step: int, done: float) -> tuple[Tensor, dict[str, Tensor]]:
        total = torch.zeros((), device=tokens_BL.device)
        figures: dict[str, Tensor] = {}
        for name, recipe in self.recipes.items():
            loss, own = recipe.loss(tokens_BL, step, done)
            total = total + loss
            figures |= {f"{name}_{key}": value for key, value in {"loss": loss, **own}.items()}
        return total, figures

    def measure(self, rows_BL: Tensor) -> dict[str, Any]:
        return {name: recipe.measure(rows_BL) for name, recipe in self.recipes.items()}

    def save(self, folder: Path) -> None:
        for name, recipe in self.recipes.items():
            recipe.save(folder / name)
