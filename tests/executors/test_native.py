"""Several steps in one native call: what they hold, and what may come between."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from counted import Counted, Runs, take_your_time
from native_models import needs_native
from outrider.bench.synthetic import add_synthetic
from outrider.engine.build import EngineConfig, build
from outrider.engine.engine import Engine, Result
from outrider.engine.request import Speculation
from outrider.proposers.draft_model import DraftModelProposer
from outrider.sampling import SamplingParams
from outrider.testing import write_tiny_head, write_tiny_llama
from scripted import Cautious

pytestmark = needs_native

PROMPTS = [[5, 9, 5, 9, 5, 9, 2], [1, 2, 3], [7] * 20, [3, 1, 4, 1, 5, 9, 2, 6]]
PLAIN = Speculation(num_draft_tokens=0)
DRAFTED = Speculation(proposer="draft-model", num_draft_tokens=4)
NGRAM = Speculation(proposer="ngram", num_draft_tokens=6)
SUFFIX = Speculation(proposer="suffix", num_draft_tokens=6)
EXIT = Speculation(proposer="early-exit", num_draft_tokens=3)
HYBRID = Speculation(proposer="hybrid", num_draft_tokens=6)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("pair")
    target = write_tiny_llama(folder / "target", max_positions=160)
    return target, write_tiny_llama(folder / "draft", num_layers=1, max_positions=96)


Make = Callable[..., Engine]


@pytest.fixture
def runs() -> Runs:
    """Of the native executors of all engines."""
    return Runs()


@pytest.fixture
def make(pair: tuple[Path, Path], runs: Runs, monkeypatch: pytest.MonkeyPatch) -> Make:
    take_your_time(monkeypatch)

    def make_one(most: int, **settings: object) -> Engine:
        config = {"kv_tokens": 1024, "block_size": 8, "prefix_caching": False, **settings}
        engine = build(
            EngineConfig(
                model=str(pair[0]),
                draft_model=str(pair[1]),
                backend="native",
                num_draft_tokens=4,
                max_ahead_steps=most,
                **config,  # type: ignore[arg-type]
            )
        )
        engine.executors.fast[:] = [Counted(one, runs) for one in engine.executors.fast]
        return engine

    return make_one


def finish(engine: Engine, requests: list[str]) -> list[Result]:
    for _ in engine.run(requests):
        engine.kv.check()
    return [engine.collect(request) for request in requests]


def decode(
    engine: Engine, params: SamplingParams, wishes: list[Speculation], prompts: list[list[int]]
) -> list[Result]:
    return finish(
        engine,
        [
            engine.add(prompt, params, speculation=wish)
            for prompt, wish in zip(prompts, wishes, strict=True)
        ],
    )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_cautious_drafts_are_what_single_steps_draft(
    make: Make, runs: Runs, temperature: float
) -> None:
    params = SamplingParams(max_tokens=40, ignore_eos=True, temperature=temperature, seed=3)
    auto = Speculation(proposer="draft-model", num_draft_tokens="auto")

    def decoded(most: int, wish: Speculation) -> tuple[list[list[int]], list[list[int]]]:
        engine = make(most)
        engine.policy = Cautious()
        drafted: list[list[int]] = []
        requests = [engine.add(prompt, params, speculation=wish) for prompt in PROMPTS]
        for report in engine.run(requests):
            drafted += [event.draft_tokens for event in report.events]
        return [engine.collect(request).tokens for request in requests], drafted

    tokens, drafted = decoded(1, auto)
    assert runs.num_calls == 0
    assert decoded(8, auto) == (tokens, drafted)
    assert runs.num_steps > runs.num_calls > 0
    assert decoded(1, PLAIN)[0] == tokens
    assert {0, 1, 2} < {len(some) for some in drafted}


@pytest.mark.parametrize("most", [1, 8])
def test_who_has_a_k_of_its_own_drafts_it_beside_cautious_ones(make: Make, most: int) -> None:
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    auto = Speculation(proposer="draft-model", num_draft_tokens="auto")
    engine = make(most)
    engine.policy = Cautious()
    cautious, own = (engine.add(PROMPTS[0], params, speculation=wish) for wish in (auto, DRAFTED))
    sizes: dict[str, list[int]] = {cautious: [], own: []}
    for report in engine.run([cautious, own]):
        for event in report.events:
            if event.step > 1 and event.finish_reason is None:
                sizes[event.request_id].append(len(event.draft_tokens))
    ended = sizes[own].pop()  # the last ones may be cut short by the end
    assert ended <= 4
    assert set(sizes[own][:-3]) == {4}
    assert min(sizes[cautious]) < 4
    assert engine.collect(cautious).tokens == engine.collect(own).tokens


def test_up_to_the_end_of_both_contexts(make: Make, runs: Runs) -> None:
    """The drafter's positions end before the target's; nothing is drafted or held beyond."""
    params = SamplingParams(max_tokens=500, ignore_eos=True)
    (one,) = decode(make(1), params, [DRAFTED], PROMPTS[:1])
    engine = make(8)
    (many,) = decode(engine, params, [DRAFTED], PROMPTS[:1])
    assert len(many.prompt_tokens) + len(many.tokens) == 160
    assert many.tokens == one.tokens
    assert runs.num_steps > runs.num_calls > 0


def test_blocks_are_given_back_with_the_last_step(make: Make, runs: Runs) -> None:
    engine = make(8)
    request = engine.add(
        PROMPTS[0], SamplingParams(max_tokens=60, ignore_eos=True), speculation=PLAIN
    )
    kv, num_tokens, num_ends = engine.kv, len(PROMPTS[0]), 0
    for report in engine.run([request]):
        num_tokens += len(report.events[0].tokens)
        if not engine.has_ready_steps:
            num_ends += 1
            assert kv.num_blocks - kv.num_free_blocks <= -(-num_tokens // kv.block_size)
    assert 1 < num_ends < 30
    engine.collect(request)


def test_a_full_pool_costs_speed_only(make: Make) -> None:
    params = SamplingParams(max_tokens=30, ignore_eos=True, temperature=1.0, seed=2)
    wishes = [DRAFTED] * 4
    roomy = decode(make(1), params, wishes, PROMPTS)
    engine = make(8, kv_tokens=112)
    tight = decode(engine, params, wishes, PROMPTS)
    assert [r.tokens for r in tight] == [r.tokens for r in roomy]
    assert engine.scheduler.num_preemptions > 0


@pytest.mark.parametrize(
    "wish", [PLAIN, DRAFTED, SUFFIX, HYBRID], ids=["plain", "drafted", "looked up", "hybrid"]
)
def test_a_request_that_ends_or_begins_in_between(
    make: Make, runs: Runs, wish: Speculation
) -> None:
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    alone = [decode(make(1), params, [wish], [prompt])[0] for prompt in PROMPTS[:3]]
    engine = make(8)
    first = engine.add(PROMPTS[0], params, speculation=wish)
    victim = engine.add(PROMPTS[1], params, speculation=wish)
    while not engine.has_ready_steps:
        engine.step()
    engine.cancel(victim)
    while not engine.has_ready_steps:
        engine.step()
    last = engine.add(PROMPTS[2], params, speculation=wish)
    results = finish(engine, [first, last])
    assert [r.tokens for r in results] == [alone[0].tokens, alone[2].tokens]
    cut = engine.collect(victim).tokens
    assert cut == alone[1].tokens[: len(cut)]
    assert engine.kv.num_free_blocks == engine.kv.num_blocks


def test_who_cannot_be_admitted_holds_up_nobody(make: Make, runs: Runs) -> None:
    """A full batch goes on by several steps a call, and somebody's end lets the next one in."""
    lengths = (30, 17, 9, 12)

    def add_all(engine: Engine) -> list[str]:
        return [
            engine.add(prompt, SamplingParams(max_tokens=n, ignore_eos=True), speculation=PLAIN)
            for prompt, n in zip(PROMPTS, lengths, strict=True)
        ]

    one_by_one, engine = make(1), make(8, max_sequences=2)
    expected = finish(one_by_one, add_all(one_by_one))
    runs.calls.clear()
    requests = add_all(engine)
    num_while_waiting = 0
    scheduler = engine.scheduler
    for _ in engine.run(requests):
        num_while_waiting += bool(scheduler.waiting) and engine.has_ready_steps
        assert scheduler.is_full or not scheduler.waiting or not engine.has_ready_steps
    assert [engine.collect(r).tokens for r in requests] == [r.tokens for r in expected]
    assert num_while_waiting > 4
    assert runs.num_steps > 2 * runs.num_calls


@pytest.mark.parametrize("method", ["plan", "observe"])
def test_a_drafter_that_fails_in_between_costs_speed_only(
    make: Make, runs: Runs, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("not now")

    params = SamplingParams(max_tokens=40, ignore_eos=True)
    (plain,) = decode(make(1), params, [PLAIN], PROMPTS[:1])
    monkeypatch.setattr(DraftModelProposer, method, broken)
    engine = make(8)
    (result,) = decode(engine, params, [DRAFTED], PROMPTS[:1])
    assert result.tokens == plain.tokens
    assert runs.num_steps > runs.num_calls > 0
    assert engine.kv.num_free_blocks == engine.kv.num_blocks


def test_a_drafter_without_room_for_all_steps_keeps_what_it_has(make: Make, runs: Runs) -> None:
    """It goes on step by step and does not forget the text."""
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    engine = make(8)
    memory = engine.proposers["draft-model"].memory  # type: ignore[attr-defined]
    taken = memory.kv.num_free_blocks - 8
    assert memory.kv.reserve(-7, taken * memory.kv.block_size)
    (result,) = decode(engine, params, [DRAFTED], PROMPTS[:1])
    assert result.stats.num_proposals >= result.stats.num_steps - 2  # but for prompt and last token
    (plain,) = decode(make(1), params, [PLAIN], PROMPTS[:1])
    assert result.tokens == plain.tokens


def test_copies_go_on_while_the_target_agrees(make: Make, runs: Runs) -> None:
    params = SamplingParams(max_tokens=60, ignore_eos=True, temperature=1.0, seed=1)
    (plain,) = decode(make(1), params, [PLAIN], PROMPTS[:1])
    wrong = (plain.tokens[25] + 1) % 256
    guess = [*plain.tokens[:25], wrong, *plain.tokens[26:]]
    for proposer in ("prediction", "ngram", "suffix"):
        wish = Speculation(proposer=proposer, num_draft_tokens=4)
        accepted = []
        for most in (1, 8):
            engine = make(most)
            request = engine.add(PROMPTS[0], params, speculation=wish, prediction=guess)
            (result,) = finish(engine, [request])
            assert result.tokens == plain.tokens
            assert engine.kv.num_free_blocks == engine.kv.num_blocks
            accepted.append(result.stats.num_accepted)
        if proposer == "prediction":
            assert runs.num_steps > runs.num_calls > 0
            assert min(accepted) > 30


@pytest.mark.parametrize("wish", [NGRAM, SUFFIX], ids=["ngram", "suffix"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_what_is_looked_up_is_what_single_steps_look_up(
    make: Make, runs: Runs, wish: Speculation, temperature: float
) -> None:
    """Trees included, whose accepted paths are lined up before the next step."""
    ends = tuple(range(250, 256))
    params = SamplingParams(max_tokens=120, temperature=temperature, seed=2, stop_ids=ends)
    prompt = [1, 2, 3, 4, 1, 2, 5, 6, 1, 2, 3, 7, 1, 2]
    events = []
    for most in (1, 8):
        engine = make(most)
        request = engine.add(prompt, params, speculation=wish)
        steps = [event for report in engine.run([request]) for event in report.events]
        engine.collect(request)
        events.append(
            [(e.tokens, e.draft_tokens, e.draft_parents, e.source, e.path) for e in steps]
        )
    assert events[0] == events[1]
    assert runs.num_steps > runs.num_calls > 0
    if wish is SUFFIX:
        assert any(parents is not None for _, _, parents, _, _ in events[1])


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_hybrid_looks_up_and_drafts_in_one_call(make: Make, runs: Runs, temperature: float) -> None:
    """Beside a plain sequence, too; and it says who drafted."""
    params = SamplingParams(max_tokens=120, temperature=temperature, seed=2, ignore_eos=True)
    plain = decode(make(1), params, [PLAIN, PLAIN], PROMPTS[:2])
    engine = make(8)
    requests = [engine.add(PROMPTS[i], params, speculation=(HYBRID, PLAIN)[i]) for i in range(2)]
    sources = set()
    for report in engine.run(requests):
        engine.kv.check()
        sources |= {event.source for event in report.events}
    assert [engine.collect(request).tokens for request in requests] == [r.tokens for r in plain]
    assert runs.num_steps > runs.num_calls > 0
    assert "draft-model" in sources
    assert sources <= {"", "suffix", "draft-model"}
    assert engine.kv.num_free_blocks == engine.kv.num_blocks


def test_a_prescribed_acceptance_is_kept(make: Make, runs: Runs) -> None:
    params = SamplingParams(max_tokens=140, ignore_eos=True)
    (plain,) = decode(make(1), params, [PLAIN], PROMPTS[:1])
    rates = {}
    for most in (1, 8):
        engine = make(most)
        lengths = []
        for beneath in (None, "draft-model", "ngram"):
            name = add_synthetic(engine, 0.7, beneath)
            wish = Speculation(proposer=name, num_draft_tokens=3)
            for _ in range(6):
                request = engine.add(PROMPTS[0], params, speculation=wish, prediction=plain.tokens)
                (result,) = finish(engine, [request])
                assert result.tokens == plain.tokens
                lengths.append(result.stats.num_accepted / result.stats.num_steps)
        rates[most] = sum(lengths) / len(lengths)
    expected = 0.7 + 0.7**2 + 0.7**3
    assert runs.num_steps > runs.num_calls > 0
    for rate in rates.values():
        assert abs(rate - expected) < 0.2


@pytest.mark.parametrize("wish", [PLAIN, DRAFTED], ids=["plain", "drafted"])
def test_interrupted_it_goes_on_step_by_step(make: Make, runs: Runs, wish: Speculation) -> None:
    engine = make(16)
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    engine.interrupt()
    decode(engine, params, [wish], PROMPTS[:1])
    assert runs.num_calls == runs.num_steps > 2
    engine.resume()
    decode(engine, params, [wish], PROMPTS[:1])
    assert runs.num_calls < runs.num_steps


@pytest.mark.parametrize("length", range(151, 156))
def test_a_tree_that_reaches_beyond_the_positions_so_far(
    length: int, pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A growing tree writes more rows than it hands over, at later positions."""
    sizes = json.loads((pair[0] / "config.json").read_text())
    head = write_tiny_head(
        tmp_path / "head", "eagle3", vocab_size=sizes["vocab_size"],
        hidden_size=sizes["hidden_size"], taps=(0, 1, 2),
    )  # fmt: skip
    config = EngineConfig(
        model=str(pair[0]),
        draft_model=str(head),
        backend="native",
        proposer="eagle3",
        num_draft_tokens=3,
        kv_tokens=1024,
        block_size=8,
    )
    engine = build(config)
    run = engine.executors.run
    monkeypatch.setattr(engine.executors, "run", lambda plan, _, limit_s: run(plan, 1, limit_s))
    params = SamplingParams(max_tokens=160 - length, ignore_eos=True)
    (result,) = finish(engine, [engine.add([7 * i % 50 + 3 for i in range(length)], params)])
    assert len(result.tokens) == 160 - length
    assert not engine.executors.faults
