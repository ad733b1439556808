"""The training loop of every recipe.

Deterministic from a seed: the rows of a batch and all noise of a loss are functions of (seed,
step). So a run of a given length gives the same result if it is killed and resumed. Checkpoints are
written to a temporary file and renamed, so the last complete one always exists.

With `minutes` instead of `num_steps` the loop times the first steps and then fixes the length. The
checkpoint and the provenance file contain it; the same number as `num_steps` repeats the run.
"""

from __future__ import annotations

import logging
import math
import os
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from outrider.errors import ConfigError
from outrider.train.config import OptimConfig
from outrider.train.data import BatchSource
from outrider.train.optim import Optimisers, schedule_factor
from outrider.train.plateau import Plateau
from outrider.train.progress import Progress

logger = logging.getLogger(__name__)

# Steps before the clock starts (compilation, caches), and timed steps that determine the length;
# fewer where they take long: no more than a share of the time.
_SETTLE_STEPS, _TIMED_STEPS, _LEAST_TIMED, _TIMED_SHARE = 5, 20, 2, 0.05


class Recipe(Protocol):
    """What the loop trains. `module` contains every trainable parameter."""

    module: nn.Module

    def loss(self, tokens_BL: Tensor, step: int, done: float) -> tuple[Tensor, dict[str, Tensor]]:
        """Scalar loss and figures to show; `done` is the finished share of the run, in [0, 1]."""

    def measure(self, rows_BL: Tensor) -> dict[str, Any]:
        """Agreement with the target on whole rows; at least `alpha` and `agreement`."""

    def save(self, folder: Path) -> None:
        """Write the trained model as a folder that can be loaded for inference."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    num_steps: int | None = None
    minutes: float | None = None
    rows_per_step: int = 64
    accumulation: int = 1
    seed: int = 0
    optim: OptimConfig = field(default_factory=OptimConfig)
    checkpoint_every_s: float = 60.0
    log_every: int = 20
    bf16: bool = True
    # Must be equal for a checkpoint to be continued, besides seed and rates: data, recipe, shapes.
    fingerprint: str = ""

    def __post_init__(self) -> None:
        if (self.num_steps is None) == (self.minutes is None):
            raise ConfigError("give either num_steps or minutes")
        if self.rows_per_step % self.accumulation:
            raise ConfigError("rows_per_step must be a multiple of accumulation")


@dataclass
class Report:
    """The record of a run: one curve row per `log_every` steps."""

    num_steps: int
    seconds: float
    tokens: int
    curve: list[dict[str, float]]
    checks: list[list[float]] = field(default_factory=list)  # step, held-out acceptance length


def train(
    recipe: Recipe,
    source: BatchSource,
    config: TrainConfig,
    *,
    checkpoint: Path | None = None,
    title: str = "training",
    plateau: Plateau | None = None,
) -> Report:
    """Run `recipe` to the end, resuming from `checkpoint` if that file exists."""
    run = _Run(recipe, source, config, checkpoint, plateau)
    run.resume()
    with Progress(title, quiet=run.rank != 0) as progress:
        while run.num_steps is None or run.step < run.num_steps:
            run.advance(progress)
    run.write_checkpoint()
    return Report(
        num_steps=run.step,
        seconds=run.seconds,
        tokens=run.tokens,
        curve=run.curve,
        checks=[] if plateau is None else [list(check) for check in plateau.checks],
    )


class _Run:
    """The state of one run; a checkpoint contains `state()`."""

    def __init__(
        self,
        recipe: Recipe,
        source: BatchSource,
        config: TrainConfig,
        checkpoint: Path | None,
        plateau: Plateau | None = None,
    ):
        self.plateau = plateau
        self.recipe, self.source, self.config, self.path = recipe, source, config, checkpoint
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.world = dist.get_world_size() if dist.is_initialized() else 1
        if config.rows_per_step % (config.accumulation * self.world):
            raise ConfigError("rows_per_step must be a multiple of accumulation x processes")
        self.optimisers = Optimisers(recipe.module.named_parameters(), config.optim)
        self.device = self.optimisers.parameters[0].device
        self.step = 0
        self.tokens = 0
        self.num_steps = config.num_steps
        self.curve: list[dict[str, float]] = []
        self.seconds = 0.0
        self._began = self._saved = time.monotonic()
        self._timed_from = 0.0
        self._timed_step: int | None = None

    def advance(self, progress: Progress) -> None:
        """One optimiser step."""
        config, step = self.config, self.step
        done = 0.0 if self.num_steps is None else step / self.num_steps
        rows_BL = self.source.rows(step, config.rows_per_step)
        mine_BL = rows_BL.tensor_split(self.world)[self.rank].to(self.device)
        sums: dict[str, Tensor] = {}
        for part_BL in mine_BL.tensor_split(config.accumulation):
            with torch.autocast(self.device.type, torch.bfloat16, enabled=config.bf16):
                loss, figures = self.recipe.loss(part_BL, step, done)
            torch.autograd.backward(loss / config.accumulation)
            for name, value in {"loss": loss, **figures}.items():
                part = value.detach().float() / config.accumulation
                sums[name] = sums[name] + part if name in sums else part
        if self.world > 1:
            self._average(sums)
        sums["gradient_norm"] = self.optimisers.step(
            schedule_factor(config.optim, step, self.num_steps)
        )
        self.tokens += rows_BL.numel()
        self.step += 1
        self._after(sums, progress)

    def _average(self, sums: dict[str, Tensor]) -> None:
        for parameter in self.optimisers.parameters:
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad /= self.world
        for value in sums.values():
            dist.all_reduce(value)
            value /= self.world

    def _after(self, sums: dict[str, Tensor], progress: Progress) -> None:
        if self.num_steps is None:
            self._fix_length()
        elif self.plateau is not None:
            share = self.config.optim.decay_share
            self.num_steps = self.plateau.shortened(self.step, self.num_steps, share)
        last = self.num_steps is not None and self.step >= self.num_steps
        if self.step % self.config.log_every == 0 or last:
            row = {name: float(value) for name, value in sums.items()}
            if not math.isfinite(row["loss"]):
                raise ConfigError(f"the loss is {row['loss']} at step {self.step}: lower the rate")
            self.seconds = time.monotonic() - self._began
            self.curve.append(
                {"step": self.step, "tokens": self.tokens, "seconds": round(self.seconds, 2), **row}
            )
            progress.update(self.step, self.num_steps, self.curve[-1])
        else:
            progress.beat(self.step, self.num_steps, self._left_s())
        if time.monotonic() - self._saved > self.config.checkpoint_every_s:
            self.write_checkpoint()

    def _left_s(self) -> float:
        """An estimate; while the first steps are timed, what the budget leaves."""
        spent_s = time.monotonic() - self._began
        if self.num_steps is not None:
            return spent_s / self.step * (self.num_steps - self.step)
        assert self.config.minutes is not None
        return max(0.0, 60 * self.config.minutes - spent_s)

    def _fix_length(self) -> None:
        """Converts `minutes` to a number of steps, from the speed of the first ones."""
        assert self.config.minutes is not None
        if self.device.type == "cuda" and self.step >= _SETTLE_STEPS:
            torch.cuda.synchronize(self.device)
        now = time.monotonic()
        is_slow = now - self._began > _TIMED_SHARE * 60 * self.config.minutes
        if self._timed_step is None:
            if self.step == _SETTLE_STEPS or (is_slow and self.world == 1):
                self._timed_from, self._timed_step = now, self.step
            return
        num_timed = self.step - self._timed_step
        is_enough = is_slow and self.world == 1 and num_timed >= _LEAST_TIMED
        if num_timed < _TIMED_STEPS and not is_enough:
            return
        step_s = (now - self._timed_from) / num_timed
        left_s = self.config.minutes * 60 - (now - self._began)
        num_steps = self.step + max(0, int(left_s / step_s))
        if self.world > 1:
            agreed = torch.tensor(num_steps, device=self.device)
            dist.broadcast(agreed, 0)
            num_steps = int(agreed)
        self.num_steps = max(self.step, num_steps)
        logger.info("%.1f ms a step: %d steps", 1e3 * step_s, self.num_steps)

    def state(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "tokens": self.tokens,
            "num_steps": self.num_steps,
            "seconds": self.seconds,
            "curve": self.curve,
            "checks": [] if self.plateau is None else self.plateau.checks,
            "identity": self._identity(),
            "module": self.recipe.module.state_dict(),
            "optimisers": self.optimisers.state_dict(),
        }

    def _identity(self) -> str:
        config = self.config
        return repr((config.seed, config.rows_per_step, asdict(config.optim), config.fingerprint))

    def write_checkpoint(self) -> None:
        """Atomic: a reader gets the old file or the new one, never a part."""
        self._saved = time.monotonic()
        if self.path is None or self.rank != 0:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_suffix(".partial")
        with partial.open("wb") as stream:
            torch.save(self.state(), stream)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(partial, self.path)

    def resume(self) -> None:
        """Continues from the checkpoint, if any; it must have the same seed and rates."""
        if self.path is None or not self.path.exists():
            return
        state = torch.load(self.path, map_location=self.device, weights_only=True)
        if state["identity"] != self._identity():
            raise ConfigError(
                f"{self.path} is of a run with other options; remove it to start afresh"
            )
        self.recipe.module.load_state_dict(state["module"])
        self.optimisers.load_state_dict(state["optimisers"])
        self.step, self.tokens = state["step"], state["tokens"]
        self.curve, self.seconds = state["curve"], state["seconds"]
        self.num_steps = self.config.num_steps or state["num_steps"]
        if self.plateau is not None:
            self.plateau.checks = [tuple(check) for check in state.get("checks", [])]
            self.num_steps = state["num_steps"]
        self._began -= self.seconds
        logger.info("resumed at step %d", self.step)
