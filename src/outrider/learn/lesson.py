"""One round: judge the weights in use by the newest traffic, train a copy, judge it, decide.

The newest rows are never trained on in their round. They answer three questions: are the weights of
the last swap still better than those before it; is the copy better than what drafts now; by how
much. A difference counts only if it is larger than its standard error.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor

from outrider.learn.rows import TaughtRow, TaughtTarget
from outrider.model.heads import Eagle3Head
from outrider.train.config import Eagle3RecipeConfig, OptimConfig
from outrider.train.optim import Optimisers, schedule_factor
from outrider.train.recipes.eagle3 import Eagle3Recipe

Weights = dict[str, Tensor]
NUM_UNROLL = 4  # as deep as the proposer's default drafts
ROWS_PER_STEP = 4
LEAST_GAIN = 0.005  # of the acceptance length: a swap for less is not worth its log line
OPTIM = OptimConfig(learning_rate=3e-4, matrix_learning_rate=3e-3, warmup_steps=4)


@dataclass(frozen=True, slots=True)
class Replay:
    """The acceptance length of each row: expected tokens of a step, the target's own included."""

    lengths: Sequence[float]
    weights: Sequence[int]  # positions of each row
    alpha_by_depth: Sequence[float]

    @property
    def length(self) -> float:
        return _mean(self.lengths, self.weights)


def gain(new: Replay, old: Replay) -> tuple[float, float]:
    """How much longer the new one's accepted drafts are, and the standard error of that; relative.

    Row by row, so that the differences between rows do not matter.
    """
    differences = [a - b for a, b in zip(new.lengths, old.lengths, strict=True)]
    mean, total = _mean(differences, new.weights), sum(new.weights)
    spread = sum(
        (weight * (difference - mean)) ** 2
        for difference, weight in zip(differences, new.weights, strict=True)
    )
    count = len(differences)
    error = (spread * count / max(1, count - 1)) ** 0.5 / total
    return mean / old.length, error / old.length


def is_gain(new: Replay, old: Replay) -> bool:
    found, error = gain(new, old)
    return found > max(LEAST_GAIN, error)


def _mean(values: Sequence[float], weights: Sequence[int]) -> float:
    return sum(v * w for v, w in zip(values, weights, strict=True)) / sum(weights)


class Lesson:
    """Trains and judges copies of one head; `pause` is called between pieces of work."""

    def __init__(
        self, head: Eagle3Head, target: TaughtTarget, pause: Callable[[], None] = lambda: None
    ) -> None:
        self.target, self._pause = target, pause
        self.head = copy.deepcopy(head).train().requires_grad_(True)
        config = Eagle3RecipeConfig(num_unroll=NUM_UNROLL, decay=0.9, tvd_share=0.9)
        self.recipe = Eagle3Recipe(target, config, torch.empty(0), self.head, answers_only=True)

    def weights(self) -> Weights:
        return {name: value.detach().clone() for name, value in self.head.state_dict().items()}

    @torch.no_grad()
    def replay(self, rows: Sequence[TaughtRow], weights: Weights) -> Replay:
        self.head.load_state_dict(weights)
        lengths, counts, alphas = [], [], []
        for row in rows:
            self._pause()
            kept, alpha_N = [], []
            for depth in self.recipe.depths(self._show(row), 0):
                q_NW = depth.q_NW.softmax(-1)
                alpha = torch.minimum(q_NW, depth.p_NV[:, :-1].exp()).sum(-1)
                kept.append(alpha if row.temperature else depth.same_N.float())
                alpha_N.append(kept[-1].mean().item())
            runs = torch.stack(kept).cumprod(0).sum(0)
            lengths.append(1 + runs.mean().item())
            counts.append(len(runs))
            alphas.append(alpha_N)
        by_depth = [_mean(values, counts) for values in zip(*alphas, strict=True)]
        return Replay(lengths, counts, by_depth)

    def train(
        self, rows: Sequence[TaughtRow], weights: Weights, epochs: int, seed: int
    ) -> tuple[Weights, int]:
        """Weights after training on every row `epochs` times, and the number of steps."""
        self.head.load_state_dict(weights)
        optimisers = Optimisers(self.head.named_parameters(), OPTIM)
        order = [row for epoch in range(epochs) for row in _shuffled(rows, seed + epoch)]
        steps = [order[i : i + ROWS_PER_STEP] for i in range(0, len(order), ROWS_PER_STEP)]
        for number, some in enumerate(steps):
            for row in some:
                self._pause()
                loss, _ = self.recipe.loss(self._show(row), number, number / len(steps))
                torch.autograd.backward(loss / len(some))
            optimisers.step(schedule_factor(OPTIM, number, len(steps)))
        return self.weights(), len(steps)

    def _show(self, row: TaughtRow) -> Tensor:
        """Both sides at the temperature of the row's traffic."""
        self.recipe.temperature = row.temperature or 1.0
        return self.target.show(row)


def _shuffled(rows: Sequence[TaughtRow], seed: int) -> list[TaughtRow]:
    found = list(rows)
    Random(seed).shuffle(found)
    return found
