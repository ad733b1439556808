"""The loop: schedules, checkpoints, and that a resumed run is the same run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from outrider.errors import ConfigError
from outrider.train.config import OptimConfig, TargetConfig
from outrider.train.data import Windows
from outrider.train.optim import orthogonalise, schedule_factor
from outrider.train.recipes.target import TargetRecipe
from outrider.train.trainer import TrainConfig, train
from tiny_training import quick, tiny_target, tokens_of


class Stops(Exception):
    """Stands for kill -9: nothing after it runs."""


class Dies(TargetRecipe):
    """Fails at a given step, like a machine that is switched off."""

    at = -1

    def loss(self, tokens_BL: Tensor, step: int, done: float) -> tuple[Tensor, dict[str, Tensor]]:
        if step == self.at:
            raise Stops
        return super().loss(tokens_BL, step, done)


def losses(curve: list[dict[str, float]]) -> list[float]:
    return [row["loss"] for row in curve]


def test_a_resumed_run_has_the_same_curve(tmp_path: Path) -> None:
    source = Windows(tokens_of(), 32)
    config = quick(12, checkpoint_every_s=0.0)
    whole = train(TargetRecipe(tiny_target(), TargetConfig()), source, config)
    path = tmp_path / "checkpoint.pt"
    victim = Dies(tiny_target(), TargetConfig())
    victim.at = 7
    with pytest.raises(Stops):
        train(victim, source, config, checkpoint=path)
    fresh = TargetRecipe(tiny_target(seed=5), TargetConfig())
    resumed = train(fresh, source, config, checkpoint=path)
    assert resumed.num_steps == 12
    assert losses(resumed.curve) == losses(whole.curve)


def test_a_torn_checkpoint_never_replaces_a_whole_one(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pt"
    source = Windows(tokens_of(), 32)
    train(TargetRecipe(tiny_target(), TargetConfig()), source, quick(2), checkpoint=path)
    path.with_suffix(".partial").write_bytes(b"torn")
    recipe = TargetRecipe(tiny_target(), TargetConfig())
    assert train(recipe, source, quick(2), checkpoint=path).num_steps == 2


def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pt"
    source = Windows(tokens_of(), 32)
    train(TargetRecipe(tiny_target(), TargetConfig()), source, quick(2), checkpoint=path)
    with pytest.raises(ConfigError, match="other options"):
        train(
            TargetRecipe(tiny_target(), TargetConfig()),
            source,
            quick(2, fingerprint="different data"),
            checkpoint=path,
        )


def test_accumulation_changes_memory_and_not_the_run() -> None:
    source = Windows(tokens_of(), 32)
    config = TargetConfig(layer_dropout=0.0)
    whole = train(TargetRecipe(tiny_target(), config), source, quick(4))
    parts = train(TargetRecipe(tiny_target(), config), source, quick(4, accumulation=2))
    assert losses(parts.curve) == pytest.approx(losses(whole.curve), abs=2e-3)


def test_minutes_are_turned_into_steps_once() -> None:
    source = Windows(tokens_of(), 16)
    config = TrainConfig(minutes=0.03, rows_per_step=1, log_every=5, bf16=False)
    report = train(TargetRecipe(tiny_target(), TargetConfig()), source, config)
    assert report.num_steps >= 3  # at least two are timed
    assert report.seconds < 60


def test_a_run_needs_exactly_one_length() -> None:
    with pytest.raises(ConfigError, match="either num_steps or minutes"):
        TrainConfig()


@pytest.mark.parametrize("name", ["wsd", "cosine", "constant"])
def test_schedules_warm_up_and_end_where_they_should(name: str) -> None:
    config = OptimConfig(schedule=name, warmup_steps=9)
    factors = [schedule_factor(config, step, 100) for step in range(100)]
    assert factors[0] == pytest.approx(0.1, abs=0.01)
    assert max(factors) <= 1.0
    assert factors[-1] == pytest.approx(1.0 if name == "constant" else 0.0, abs=0.02)


def test_orthogonalised_updates_have_singular_values_near_one() -> None:
    torch.manual_seed(0)
    for shape in ((2, 16, 48), (2, 48, 16)):
        values = torch.linalg.svdvals(orthogonalise(torch.randn(shape)))
        assert values.min() > 0.5
        assert values.max() < 1.3
