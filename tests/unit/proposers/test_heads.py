"""Heads draft what they would draft in training: right features, right positions, right token.

The reference runs a head over the whole text with plain tensors, the way the recipes do; the
engine has shown the proposer that text in chunks, steps, trees and after preemptions.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
import torch

from counted import take_your_time
from native_models import needs_native
from outrider.contracts import Draw, Observation, Proposal, Stream
from outrider.engine.build import EngineConfig, build
from outrider.engine.engine import Engine
from outrider.engine.request import Speculation
from outrider.errors import ConfigError, LossyPairing, ModelError
from outrider.export.vllm import export_vllm
from outrider.model import load_model
from outrider.model.borrowed import borrow
from outrider.model.driver import Driver
from outrider.model.heads import DFlashHead, Eagle3Head, MedusaHeads, load_head
from outrider.noise import draw_key, gumbel
from outrider.proposers.head_memory import HeadMemory
from outrider.proposers.medusa import likeliest
from outrider.sampling import SamplingParams
from outrider.testing import write_tiny_head, write_tiny_llama

KINDS = ("medusa", "eagle3", "dflash")
DEFAULTS = {"num_draft_tokens": 4, "kv_tokens": 512, "backend": "torch"}
BACKENDS = ["torch", pytest.param("native", marks=needs_native)]
CHAINS = {"medusa": {"children": 1}, "eagle3": {"children": 1}, "dflash": {}}
PROMPTS = [[5, 9, 5, 9, 2], [1], list(range(1, 30))]
Draw1 = Callable[[torch.Tensor, int], int]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("heads")
    write_tiny_llama(folder / "target", num_layers=3, max_positions=96)
    for kind in KINDS:
        write_tiny_head(folder / kind, kind, taps=(1, 3))
    return folder


@pytest.fixture(autouse=True)
def no_drafter_fails(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    yield
    assert not [r for r in caplog.get_records("call") if r.levelno >= logging.WARNING]


def engine_for(folder: Path, kind: str, options: Mapping[str, object], **config: object) -> Engine:
    return build(
        EngineConfig(
            model=str(folder / "target"),
            draft_model=str(folder / kind),
            proposer=kind,
            proposer_options={kind: {"weights": "float32"} | dict(options)},
            block_size=4,
            **(DEFAULTS | config),  # type: ignore[arg-type]
        )
    )


def finish(
    engine: Engine, prompt: list[int], params: SamplingParams, how: Speculation | None = None
) -> None:
    request = engine.add(prompt, params, speculation=how)
    for _ in engine.run([request]):
        pass
    engine.collect(request)


class Reference:
    """Drafts for a text by running target and head over all of it."""

    def __init__(self, folder: Path, kind: str, draw: Draw1) -> None:
        self.model = load_model(folder / "target", backend="torch")
        self.borrowed = borrow(folder / "target", torch.device("cpu"), torch.float32)
        self.head = load_head(folder / kind)
        self.draw = draw

    @torch.no_grad()
    def draft(self, text: list[int], num_tokens: int, first: int = 0) -> list[int]:
        """`first`: the features of the tokens before it are not known to the head."""
        taps = (*self.head.taps, 3)
        shown = Driver(self.model).forward({"a": text[:-1]}, taps=taps).taps
        head, end = self.head, len(text)
        if isinstance(head, MedusaHeads):
            guesses = head(self.borrowed.normed(shown[3]["a"][-1:]))
            rows = self.borrowed.logits(guesses)[:, 0]
            return [self.draw(row, end + i) for i, row in enumerate(rows[:num_tokens])]
        features = torch.stack([shown[tap]["a"][first:] for tap in head.taps], dim=1)[None]
        positions = torch.arange(first, end - 1)[None]
        if isinstance(head, DFlashHead):
            block = [text[-1]] + [head.config.mask_token_id] * (head.config.block_size - 1)
            hidden = head(
                self.borrowed.embed(block)[None],
                torch.arange(end - 1, end - 1 + len(block))[None],
                head.context(head.fuse(features), positions),
            )
            drafted = [text[-1]]
            for i in range(num_tokens):
                bias = head.markov_bias(torch.tensor(drafted[-1:]))[0]
                drafted.append(self.draw(self.borrowed.logits(hidden[0, 1 + i]) + bias, end + i))
            return drafted[1:]
        assert isinstance(head, Eagle3Head)
        hidden, drafted = head.fuse(features), []
        for i in range(num_tokens):  # everything again, each time one row longer
            following = [*text[first + 1 :], *drafted]
            places = torch.arange(first, first + len(following))
            causal = (places[:, None] >= places)[None, None]
            states, logits, _ = head(
                self.borrowed.embed(following)[None], hidden, places[None], None, causal
            )
            row = torch.full((64,), -torch.inf)
            row[head.target_ids] = logits[0, -1]
            drafted.append(self.draw(row, end + i))
            hidden = torch.cat([hidden, states[:, -1:]], dim=1)
        return drafted


def draw_with(temperature: float, seed: int) -> Draw1:
    def draw(row_V: torch.Tensor, position: int) -> int:
        if temperature:
            key = draw_key(seed, 0, position, Stream.TARGET)
            row_V = row_V / temperature + gumbel([key], len(row_V), row_V.device)[0]
        return int(row_V.argmax())

    return draw


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("step_tokens", [7, 512])
@pytest.mark.parametrize("backend", BACKENDS)
def test_drafts_are_those_of_the_head(
    folder: Path, kind: str, temperature: float, step_tokens: int, backend: str
) -> None:
    engine = engine_for(folder, kind, CHAINS[kind], max_step_tokens=step_tokens, backend=backend)
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=20, ignore_eos=True)
    ids = [engine.add(prompt, params) for prompt in PROMPTS]
    texts = dict(zip(ids, map(list, PROMPTS), strict=True))
    reference = Reference(folder, kind, draw_with(temperature, 3))
    num_compared = num_same = 0
    for report in engine.run(ids):
        for event in report.events:
            text = texts[event.request_id]
            if len(text) == len(PROMPTS[ids.index(event.request_id)]):
                assert not event.draft_tokens, "drafted before the target had shown anything"
            elif event.draft_tokens:
                expected = reference.draft(text, len(event.draft_tokens))
                num_compared += len(expected)
                for got, want in zip(event.draft_tokens, expected, strict=True):
                    if got != want:  # a near-tie, then everything behind it differs too
                        break
                    num_same += 1
            text += event.tokens
    assert num_compared > 30  # few fit into the small steps
    assert num_same >= 0.99 * num_compared


@pytest.mark.parametrize("kind", ["eagle3", "dflash"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_cached_prefix_is_not_seen(folder: Path, kind: str, backend: str) -> None:
    """Skipped tokens show no taps: the head starts behind them, at the right positions."""
    engine = engine_for(folder, kind, CHAINS[kind], backend=backend)
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    prompt = PROMPTS[2]
    finish(engine, prompt, params)
    request = engine.add(prompt, params)
    text = list(prompt)
    reference = Reference(folder, kind, draw_with(0.0, 0))
    num_drafted = 0
    for report in engine.run([request]):
        for event in report.events:
            if event.draft_tokens:
                assert event.draft_tokens == reference.draft(text, len(event.draft_tokens), 28)
                num_drafted += len(event.draft_tokens)
            text += event.tokens
    assert num_drafted > 8


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", ["medusa", "eagle3"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_first_child_is_the_chain(
    folder: Path, kind: str, temperature: float, backend: str
) -> None:
    """Masks and rows of a tree: down the first children it says what the chain would say."""
    engine = engine_for(folder, kind, {"children": 3}, num_draft_tokens=14, backend=backend)
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=20, ignore_eos=True)
    text = list(PROMPTS[2])
    request = engine.add(text, params)
    reference = Reference(folder, kind, draw_with(temperature, 3))
    num_nodes = 0
    for report in engine.run([request]):
        for event in report.events:
            parents = event.draft_parents
            if event.draft_tokens:
                assert parents is not None
                assert parents[0] == -1
                path: list[int] = []
                node: int | None = 0
                while node is not None:
                    path.append(event.draft_tokens[node])
                    node = next((i for i, p in enumerate(parents) if p == node), None)
                assert path == reference.draft(text, len(path))
                num_nodes += len(parents)
                siblings = list(zip(parents, event.draft_tokens, strict=True))
                assert len(set(siblings)) == len(siblings), "a token twice under one node"
            text += event.tokens
    assert num_nodes > 40


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_ids_that_mean_nothing_are_never_drafted(kind: str, backend: str, tmp_path: Path) -> None:
    """A padded vocabulary: the heads know 64 ids, the tokenizer 40."""
    write_tiny_llama(tmp_path / "target", num_tokens=40, max_positions=96)
    write_tiny_head(tmp_path / kind, kind)
    engine = engine_for(tmp_path, kind, {}, num_draft_tokens=6, backend=backend)
    params = SamplingParams(temperature=1.5, seed=1, max_tokens=24, ignore_eos=True)
    request = engine.add(PROMPTS[0], params)
    events = [event for report in engine.run([request]) for event in report.events]
    drafted = [token for event in events for token in event.draft_tokens]
    assert len(drafted) > 30
    assert max(drafted) < 40


def test_medusa_takes_the_likeliest_paths() -> None:
    tokens = [[1, 2, 3], [4, 5, 6]]
    scores = [[-0.1, -1.0, -3.0], [-0.3, -0.5, -9.0]]
    assert likeliest(tokens, scores, 4, ()) == ([1, 4, 5, 2], [-1, 0, 0, -1])
    assert likeliest(tokens, scores, 3, {1}) == ([1, 2, 4], [-1, -1, 1])
    assert likeliest([[1, 2]], [[0.0, -torch.inf]], 5, ()) == ([1], [-1])


def test_a_gap_in_what_was_shown_starts_anew() -> None:
    def shown(start: int, size: int) -> Observation:
        taps = {2: torch.full((size, 4), float(start))}
        return Observation(Proposal(), None, taps, start)

    memory = HeadMemory((2,))
    memory.see(shown(0, 3))
    memory.see(shown(3, 1))
    assert memory.reaches(4)
    assert not memory.reaches(3)
    taps, places = memory.take()
    assert taps.shape == (4, 1, 4)
    assert places == range(4)
    memory.see(shown(9, 2))
    assert memory.first == 9
    assert memory.take()[1] == range(9, 11)


@pytest.mark.parametrize("kind", KINDS)
def test_heads_that_do_not_fit_are_refused(folder: Path, kind: str, tmp_path: Path) -> None:
    write_tiny_head(tmp_path / "wide", kind, hidden_size=64)
    with pytest.raises(ModelError, match="width 64"):
        engine_for(folder, kind, {"head": str(tmp_path / "wide")})
    write_tiny_head(tmp_path / "ids", kind, vocab_size=128)
    with pytest.raises(ModelError, match="128 ids"):
        engine_for(folder, kind, {"head": str(tmp_path / "ids")})
    if kind != "medusa":
        write_tiny_head(tmp_path / "deep", kind, taps=(1, 9))
        with pytest.raises(ModelError, match="layer 9"):
            engine_for(folder, kind, {"head": str(tmp_path / "deep")})
    other = KINDS[KINDS.index(kind) - 1]
    with pytest.raises(ConfigError, match=f"holds {other} heads"):
        engine_for(folder, kind, {"head": str(folder / other)})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_weights_are_chosen_or_refused(folder: Path, kind: str, backend: str) -> None:
    """A torch module has its own alone; natively there are four kinds, none of them of 3 bits."""
    known = "float32" if backend == "torch" else "int8 or float32 or bfloat16 or int4"
    weights = "int8" if backend == "torch" else "int3"
    with pytest.raises(ConfigError, match=f"cannot be '{weights}'.* choose {known}$"):
        engine_for(folder, kind, {"weights": weights}, backend=backend)
    if kind == "dflash":
        with pytest.raises(ConfigError, match=r"choose float32$"):
            engine_for(folder, kind, {"weights": "int8", "floor": 0.1}, backend=backend)


@pytest.mark.parametrize("architecture", ["DominoDraftModel", "DFlash2DraftModel", None])
def test_unknown_heads_are_named(folder: Path, architecture: str | None, tmp_path: Path) -> None:
    """Not taken for a draft model whose tokenizer is missing, nor passed over for bundled heads."""
    found = {"architectures": [architecture]} if architecture else {}
    (tmp_path / "config.json").write_text(json.dumps(found))
    expected = f"{architecture or 'no architecture'}, .*heads of the kinds eagle3, eagle"
    for proposer in (None, "draft-model", "eagle3"):
        config = EngineConfig(
            model=str(folder / "target"), draft_model=str(tmp_path), proposer=proposer
        )
        with pytest.raises(ModelError, match=expected):
            build(config)
    with pytest.raises(ModelError, match=expected):
        export_vllm(tmp_path, folder / "target", tmp_path / "out")


def test_heads_are_no_draft_model(folder: Path) -> None:
    config = EngineConfig(
        model=str(folder / "target"), draft_model=str(folder / "medusa"), proposer="draft-model"
    )
    with pytest.raises(ConfigError, match=r"holds medusa heads.* proposer 'medusa'"):
        build(config)


def test_without_a_head_the_message_says_how_to_pass_one(folder: Path) -> None:
    config = EngineConfig(model=str(folder / "target"), proposer="eagle3", backend="torch")
    with pytest.raises(ConfigError, match="--draft-model FOLDER"):
        build(config)


def test_rules_that_judge_chains_get_chains(folder: Path) -> None:
    with pytest.raises(LossyPairing):
        engine_for(folder, "eagle3", {}, verifier="token")
    for kind in ("eagle3", "dflash"):
        engine = engine_for(folder, kind, CHAINS[kind], verifier="block")
        assert engine.proposers[kind].draws == {Draw.COUPLED, Draw.SAMPLED}


def test_taps_are_computed_for_those_who_ask(folder: Path) -> None:
    engine = engine_for(folder, "eagle3", {})
    assert engine.proposers["eagle3"].needs.taps == (1, 3)
    asked: list[tuple[int, ...]] = []
    forward = engine.target.forward

    def watched(batch):  # type: ignore[no-untyped-def]
        asked.append(batch.taps)
        return forward(batch)

    engine.target.forward = watched  # type: ignore[method-assign]
    params = SamplingParams(max_tokens=4)
    finish(engine, PROMPTS[0], params)
    assert set(asked) == {(1, 3)}
    asked.clear()
    finish(engine, PROMPTS[0], params, Speculation(proposer=None))
    assert set(asked) == {()}


@needs_native
@pytest.mark.parametrize("options", [{}, {"children": 1}, {"floor": 0.0}])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_medusa_drafts_by_plan_what_it_drafts_step_by_step(
    folder: Path,
    options: dict[str, object],
    temperature: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And a request that leaves in between takes no state along."""
    take_your_time(monkeypatch)
    params = SamplingParams(
        max_tokens=60, temperature=temperature, top_p=0.9, seed=4, stop_ids=(250, 251)
    )
    alone = []
    for most in (1, 8):
        engine = engine_for(folder, "medusa", options, backend="native", max_ahead_steps=most)
        request = engine.add(PROMPTS[0], params)
        events = [event for report in engine.run([request]) for event in report.events]
        engine.collect(request)
        alone.append(
            [(e.tokens, e.draft_tokens, e.draft_parents, e.source, e.path) for e in events]
        )
    assert alone[0] == alone[1]
    victim = engine.add(PROMPTS[2], params)
    requests = [engine.add(prompt, params) for prompt in PROMPTS[:2]]
    while not engine.has_ready_steps:
        engine.step()
    engine.cancel(victim)
    events = [event for report in engine.run(requests) for event in report.events]
    assert events[-1].source in ("", "medusa")
    assert sum(event.source == "medusa" for event in events) > len(events) // 2
    for prompt, request in zip(PROMPTS[:2], requests, strict=True):
        plain = engine.add(prompt, params, speculation=Speculation(proposer=None))
        for _ in engine.run([plain]):
            pass
        assert engine.collect(plain).tokens == engine.collect(request).tokens
