"""What is kept of the traffic, when weights are swapped and rolled back, what a kill leaves."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from outrider.engine.build import EngineConfig, build
from outrider.engine.embed import states_of
from outrider.engine.engine import Engine
from outrider.engine.request import Speculation
from outrider.errors import ConfigError
from outrider.learn import learner as learner_module
from outrider.learn import lesson
from outrider.learn.collect import LENGTH, Collector, Row
from outrider.learn.keep import Kept, numbers
from outrider.learn.learner import Learner, split
from outrider.learn.lesson import Replay, Weights, gain, is_gain
from outrider.model.heads import load_head
from outrider.proposers.eagle3 import Eagle3Proposer
from outrider.sampling import SamplingParams
from outrider.testing import write_tiny_head
from outrider.train.config import OptimConfig
from tiny_training import TEXT, VOCABULARY, write_trained_target

# With K = auto, the clock would decide how many drafts there are.
SPECULATION = Speculation(proposer="eagle3", num_draft_tokens=4)


@pytest.fixture(autouse=True)
def learns_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """The head is random: it has more to learn than a trained one, in the same few steps."""
    rates = OptimConfig(learning_rate=5e-3, matrix_learning_rate=0.02, warmup_steps=3)
    monkeypatch.setattr(lesson, "OPTIM", rates)
    monkeypatch.setattr(learner_module, "EPOCHS", 6)


def test_rows_are_the_ends_of_prompts_and_bounded() -> None:
    collector = Collector(2 * LENGTH)
    collector.add("a", range(1000), range(1000, 2000), temperature=0)
    (row,) = collector.scopes["a"].rows
    assert len(row.tokens) == LENGTH
    assert row.tokens[row.first - 1 : row.first + 1] == (999, 1000)
    assert collector.scopes["a"].num_new == row.num_answer
    collector.add("a", [1], [2, 3], temperature=0)  # too short to say anything
    collector.add("b", [1], range(20), temperature=1)
    assert collector.ready(10_000) is None
    assert collector.ready(200) == "a"
    for _ in range(4):
        collector.add("c", [1], range(300), temperature=1)
    assert collector.num_tokens <= collector.most_tokens
    assert set(collector.scopes) == {"c"}  # the oldest go first, of any scope


def test_the_newest_rows_are_held_out_and_older_ones_repeated() -> None:
    rows = [Row((1,) * 20, 4, 0.0, number) for number in range(60)]
    held, trained = split(rows, 20)
    assert [row.number for row in held] == list(range(50, 60))
    assert {row.number for row in trained} >= set(range(20, 50))
    assert sum(row.number < 20 for row in trained) == 20
    held, trained = split(rows[:3], 0)
    assert (len(held), len(trained)) == (1, 2)


def test_a_gain_must_exceed_its_error() -> None:
    def replay(*lengths: float) -> Replay:
        return Replay(lengths, [10] * len(lengths), [0.5])

    old = replay(2.0, 2.0, 2.0, 2.0)
    found, error = gain(replay(2.2, 2.2, 2.2, 2.2), old)
    assert (found, error) == pytest.approx((0.1, 0.0))
    assert is_gain(replay(2.2, 2.2, 2.2, 2.2), old)
    assert not is_gain(replay(2.004, 2.004, 2.004, 2.004), old)  # too little
    assert not is_gain(replay(4.0, 1.0, 2.0, 1.2), old)  # a mean of .05 by chance
    assert not is_gain(old, replay(2.2, 2.2, 2.2, 2.2))


class InProcess:
    """An engine as the learner's server."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.swaps: list[str] = []

    def states(self, tokens: list[int], taps: tuple[int, ...]) -> Mapping[int, torch.Tensor]:
        return states_of(self.engine, tokens, taps)

    def swap(self, scope: str, weights: Weights | None) -> None:
        assert weights is not None
        self.swaps.append(scope)
        self.engine.replace_weights("eagle3", weights)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("learning")
    target = write_trained_target(root / "target")
    head = write_tiny_head(
        root / "head", "eagle3", vocab_size=VOCABULARY, hidden_size=64, taps=(1, 2, 3),
        draft_vocab_size=VOCABULARY // 2,
    )  # fmt: skip
    return target, head


@pytest.fixture
def engine(folders: tuple[Path, Path]) -> Engine:
    return new_engine(folders)


def new_engine(folders: tuple[Path, Path]) -> Engine:
    target, head = folders
    return build(
        EngineConfig(model=str(target), draft_model=str(head), num_draft_tokens=4, kv_tokens=4096)
    )


def learner_for(engine: Engine, folder: Path | None = None) -> tuple[Learner, InProcess]:
    proposer, server = engine.proposers["eagle3"], InProcess(engine)
    assert isinstance(proposer, Eagle3Proposer)
    loaded = proposer.loaded
    learner = Learner(loaded.head, loaded.borrowed, 4, server, every=300, folder=folder)
    return learner, server


def serve(engine: Engine, learner: Learner, num_requests: int, seed: int) -> float:
    """Traffic; returns the accepted share of its drafts."""
    rng = random.Random(seed)
    drafted = accepted = 0
    for _ in range(num_requests):
        start = rng.randrange(len(TEXT) - 60)
        prompt = engine.tokenizer.encode(TEXT[start : start + 40])
        params = SamplingParams(max_tokens=40, ignore_eos=True)
        id = engine.add(prompt, params, speculation=SPECULATION)
        for _ in engine.run([id]):
            pass
        result = engine.collect(id)
        learner.see("", prompt, [result.tokens], result.stats, temperature=0)
        drafted += result.stats.num_drafted
        accepted += result.stats.num_accepted
    return accepted / drafted


def test_it_learns_swaps_and_rolls_back(folders: tuple[Path, Path], tmp_path: Path) -> None:
    engine = new_engine(folders)
    learner, server = learner_for(engine, tmp_path / "kept")
    assert learner.run_next() is None  # nothing to learn from
    before = serve(engine, learner, 24, seed=1)
    outcome = learner.run_next()
    assert outcome is not None
    assert outcome.action == "swap"
    assert outcome.after > outcome.before
    assert server.swaps == [""]
    assert serve(engine, learner, 24, seed=2) > before
    assert learner.positions["accepted"] > 0
    assert learner.positions["rejected"] > 0

    # Worse weights come to be used: the next traffic shows it.
    drafting = learner.drafting[""]
    good = drafting.current
    drafting.previous = good
    drafting.current = {
        name: torch.zeros_like(value) if value.is_floating_point() else value
        for name, value in good.items()
    }
    server.swap("", drafting.current)
    serve(engine, learner, 24, seed=3)
    outcome = learner.run_next()
    assert outcome is not None
    assert outcome.action.startswith("rollback")
    assert learner.num_rollbacks == 1

    # Another process begins with what was in use.
    again, server = learner_for(new_engine(folders), tmp_path / "kept")
    again.restore()
    assert server.swaps == [""]
    for name, value in again.drafting[""].current.items():
        torch.testing.assert_close(value, drafting.current[name], atol=1e-2, rtol=1e-2)


def test_nothing_of_a_text_is_written(engine: Engine, tmp_path: Path) -> None:
    learner, _ = learner_for(engine, tmp_path / "kept")
    serve(engine, learner, 24, seed=1)
    learner.run_next()
    written = {path.name for path in (tmp_path / "kept").rglob("*") if path.is_file()}
    assert written <= {"started-from.json", "config.json", "model.safetensors"}


def test_a_folder_of_another_head_is_refused(folders: tuple[Path, Path], tmp_path: Path) -> None:
    head = load_head(folders[1])
    Kept(tmp_path, head)  # type: ignore[arg-type]
    with torch.no_grad():
        next(iter(head.parameters())).add_(1)
    with pytest.raises(ConfigError, match="learnt from another head"):
        Kept(tmp_path, head)  # type: ignore[arg-type]


def test_a_folder_that_cannot_be_used_is_an_error_of_the_user(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    head = load_head(folders[1])
    (tmp_path / "file").write_text("")
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "started-from.json").write_text("{")
    for name in ("file", "kept"):
        with pytest.raises(ConfigError, match="cannot keep"):
            Kept(tmp_path / name, head)  # type: ignore[arg-type]


def test_weights_of_one_key_do_not_draft_for_all(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    head = load_head(folders[1])
    kept = Kept(tmp_path / "kept", head)  # type: ignore[arg-type]
    for scope in ("", "alice"):
        kept.save(scope, head.state_dict())
    learner, server = learner_for(new_engine(folders), tmp_path / "kept")
    learner.restore("")
    assert server.swaps == [""]
    assert list(learner.drafting) == [""]
    every, server = learner_for(new_engine(folders), tmp_path / "kept")
    every.restore()
    assert sorted(server.swaps) == ["", "alice"]


def test_a_scope_that_returns_goes_on_from_what_it_saved(
    engine: Engine, folders: tuple[Path, Path], tmp_path: Path
) -> None:
    head = load_head(folders[1])
    saved = {name: torch.full_like(value, 0.5) if value.is_floating_point() else value
             for name, value in head.state_dict().items()}  # fmt: skip
    Kept(tmp_path / "kept", head).save("", saved)  # type: ignore[arg-type]
    learner, server = learner_for(engine, tmp_path / "kept")
    serve(engine, learner, 12, seed=1)
    seen: list[Weights] = []
    learner._lesson.replay = lambda rows, weights: seen.append(weights) or 1 / 0  # type: ignore
    with pytest.raises(ZeroDivisionError):
        learner.run_next()
    assert server.swaps == [""]
    for name, value in seen[0].items():
        torch.testing.assert_close(value, saved[name])


def test_heads_of_few_scopes_stay_on_disk(
    folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.learn.keep.MOST_FOLDERS", 2)
    head = load_head(folders[1])
    kept = Kept(tmp_path, head)  # type: ignore[arg-type]
    (tmp_path / "of-nothing").mkdir()
    (tmp_path / "notes").mkdir()  # of the user
    for seconds, scope in enumerate(("a", "b", "c")):
        kept.save(scope, head.state_dict())
        os.utime(tmp_path / f"of-{scope}", (seconds, seconds))
    kept.save("d", head.state_dict())
    assert kept.scopes() == ["d", "c"]
    assert (tmp_path / "notes").is_dir()


SAVES = """
import sys
from pathlib import Path
from outrider.learn.keep import Kept
from outrider.model.heads import load_head
head = load_head(sys.argv[1])
kept = Kept(Path(sys.argv[2]), head)
while True:
    kept.save("", head.state_dict())
"""


def test_a_process_that_is_killed_leaves_a_complete_head(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    for delay_s in (0.0, 0.013, 0.029):
        process = subprocess.Popen([sys.executable, "-c", SAVES, folders[1], tmp_path / "kept"])
        scope = tmp_path / "kept" / "of-"
        deadline = time.monotonic() + 60
        known = max(numbers(scope), default=0)
        while max(numbers(scope), default=0) < known + 3:
            assert time.monotonic() < deadline
            time.sleep(0.002)
        time.sleep(delay_s)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        there = numbers(scope)
        assert 1 <= len(there) <= 3  # an older one may not have been removed yet
        head = load_head(folders[1])
        weights = Kept(tmp_path / "kept", head).load("")  # type: ignore[arg-type]
        assert weights is not None
        assert weights.keys() == head.state_dict().keys()
        assert json.loads((tmp_path / "kept" / "started-from.json").read_text())
