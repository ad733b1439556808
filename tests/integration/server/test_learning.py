"""`serve --learn`: it learns between requests, and no reply changes."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from outrider.engine.build import EngineConfig, build
from outrider.errors import ConfigError
from outrider.learn import learner as learner_module
from outrider.learn import lesson
from outrider.learn.keep import Kept
from outrider.model.heads import load_head
from outrider.server.learning import Learning, learnable
from outrider.server.service import State
from outrider.server_config import ServerConfig
from outrider.testing import write_tiny_head
from outrider.train.config import OptimConfig
from tiny_training import TEXT, VOCABULARY, write_trained_target

from .live import Live, wait_for

ALICE, BOB = "alice-key", "bob-key"
KEYS = {"learn_every": 300, "learn_cpu": 1.0, "learn": True, "api_keys": (ALICE, BOB)}


@pytest.fixture(autouse=True)
def learns_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """The head is random: it has more to learn than a trained one, in the same few steps."""
    rates = OptimConfig(learning_rate=5e-3, matrix_learning_rate=0.02, warmup_steps=3)
    monkeypatch.setattr(lesson, "OPTIM", rates)
    monkeypatch.setattr(learner_module, "EPOCHS", 6)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    root = tmp_path_factory.mktemp("learning-server")
    target = write_trained_target(root / "target")
    head = write_tiny_head(
        root / "head", "eagle3", vocab_size=VOCABULARY, hidden_size=64, taps=(1, 2, 3),
        draft_vocab_size=VOCABULARY // 2,
    )  # fmt: skip
    return EngineConfig(
        model=str(target), draft_model=str(head), num_draft_tokens=4, kv_tokens=4096, threads=1
    )


def bodies(temperature: float) -> Iterator[dict[str, Any]]:
    for number in range(24):
        prompt = TEXT[number * 37 : number * 37 + 40]
        yield {"prompt": prompt, "max_tokens": 40, "temperature": temperature, "seed": number,
               "ignore_eos": True}  # fmt: skip


def count(live: Live, name: str) -> int:
    return int(getattr(live.service.metrics.learner, name))


@pytest.mark.parametrize("per_key", [False, True])
def test_it_learns_between_requests(
    config: EngineConfig, per_key: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="outrider")
    kept = tmp_path / "kept"
    options: dict[str, Any] = KEYS | {"learn_per_key": per_key, "learn_folder": str(kept)}
    with Live(config, **options) as live:
        first = [live.text(**body) for t in (0.0, 1.0) for body in bodies(t)]
        wait_for(lambda: count(live, "num_swaps") > 0)
        assert [live.text(**body) for t in (0.0, 1.0) for body in bodies(t)] == first
        page = live.client.get("/metrics").text
        assert 'outrider_learn_swaps_total{model_name="tiny"} 0' not in page
        assert 'outcome="rejected"' in page
        learner = live.service.metrics.learner
        assert learner is not None
        assert len(learner.drafting) == 1
        assert ("" in learner.drafting) is not per_key
        live.check()
    assert [record for record in caplog.records if record.getMessage() == "learning: swap"]
    assert len(list(kept.glob("of-*/1/model.safetensors"))) == 1
    with Live(config, **options) as live:  # it begins with what it learnt
        learner = live.service.metrics.learner
        assert learner is not None
        wait_for(lambda: len(learner.drafting) == 1)
        assert [live.text(**body) for t in (0.0, 1.0) for body in bodies(t)] == first


def test_requests_with_a_salt_of_their_own_teach_others_nothing(config: EngineConfig) -> None:
    with Live(config, **KEYS | {"learn_every": 1 << 20}) as live:
        for body in bodies(0.0):
            live.text(**body | {"cache_salt": "mine"})
        learner = live.service.metrics.learner
        assert learner is not None
        kept = learner.num_kept_tokens
        live.text(**next(bodies(0.0)))
        assert learner.num_kept_tokens > kept
        assert kept < 100  # the probe's


def test_a_result_at_its_time_limit_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may come between the end of the wait and the look whether it is there."""

    class Late(Future[int]):
        def result(self, timeout: float | None = None) -> int:
            if timeout is not None:
                self.set_result(7)
                raise TimeoutError
            return super().result()

    learning = Learning.__new__(Learning)
    learning._served = learning._loop = SimpleNamespace(  # type: ignore[assignment]
        engine=SimpleNamespace(call=lambda work: None)
    )
    monkeypatch.setattr("asyncio.run_coroutine_threadsafe", lambda *_: Late())
    assert learning._call(lambda engine: 7) == 7


def test_heads_of_keys_are_not_restored_for_all(config: EngineConfig, tmp_path: Path) -> None:
    assert config.draft_model is not None
    head = load_head(config.draft_model)
    kept = Kept(tmp_path, head)  # type: ignore[arg-type]
    kept.save("of-one-key", head.state_dict())
    kept.save("", head.state_dict())
    with Live(config, **KEYS | {"learn_folder": str(tmp_path)}) as live:
        learner = live.service.metrics.learner
        assert learner is not None
        wait_for(lambda: bool(learner.drafting))
        assert list(learner.drafting) == [""]


def test_a_folder_that_cannot_be_used_ends_the_start(config: EngineConfig, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with Live(config, **KEYS | {"learn_folder": str(tmp_path / "file")}) as live:
        assert live.service.state is State.FAILED
        assert isinstance(live.service.failure, ConfigError)


def test_a_folder_of_another_head_ends_the_start(config: EngineConfig, tmp_path: Path) -> None:
    (tmp_path / "started-from.json").write_text('{"sha256": "of another head"}')
    with Live(config, **KEYS | {"learn_folder": str(tmp_path)}) as live:
        assert live.service.state is State.FAILED
        assert isinstance(live.service.failure, ConfigError)
        assert not live.service.was_ready


def test_what_cannot_learn_is_refused(folders: tuple[Path, Path]) -> None:
    with pytest.raises(ConfigError, match="need --learn"):
        ServerConfig(learn_per_key=True)
    engine = build(EngineConfig(model=str(folders[0]), kv_tokens=4096))
    with pytest.raises(ConfigError, match="EAGLE-3 head"):
        learnable(engine, per_key=False)
