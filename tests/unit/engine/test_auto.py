"""num_draft_tokens="auto" through the engine: measured once, exact, and only where asked for."""

from __future__ import annotations

from pathlib import Path
from time import perf_counter

import pytest

from outrider.bench.synthetic import add_synthetic
from outrider.contracts import Proposal, SequenceView, StepBatch, StepOutput
from outrider.engine import calibrate, trial
from outrider.engine.build import EngineConfig, build
from outrider.engine.engine import Engine, Result
from outrider.engine.request import Speculation
from outrider.engine.trial import num_refused
from outrider.errors import ConfigError, RequestError
from outrider.policy import MAX_AUTO_DRAFT_TOKENS
from outrider.policy.controller import AdaptivePolicy
from outrider.policy.costs import Costs
from outrider.sampling import SamplingParams
from outrider.testing import write_tiny_llama
from scripted import Drafter

PROMPTS = [[5, 9, 5, 9, 5, 9, 2], [7, 7, 7, 1], [3, 1, 4, 1, 5, 9, 2, 6]]
PLAIN = Speculation(num_draft_tokens=0)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("pair")
    target = write_tiny_llama(folder / "target", max_positions=160)
    return target, write_tiny_llama(folder / "draft", num_layers=1, max_positions=160)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    monkeypatch.setattr(calibrate, "VERIFY_S", 0.02)
    monkeypatch.setattr(calibrate, "DRAFT_S", 0.02)
    for name in ("DISTURBED", "WAITED"):
        monkeypatch.setattr(calibrate, name, float("inf"))  # however busy this machine is
    return tmp_path / "costs"


def make(pair: tuple[Path, Path], **options: object) -> Engine:
    config = {"draft_model": str(pair[1]), "backend": "torch", "num_draft_tokens": "auto"}
    return build(EngineConfig(model=str(pair[0]), **(config | options)))  # type: ignore[arg-type]


def controller(engine: Engine) -> AdaptivePolicy:
    assert isinstance(engine.policy, AdaptivePolicy)
    return engine.policy


def decode(
    engine: Engine, speculation: Speculation | None = None, **params: object
) -> list[Result]:
    sampling = SamplingParams(**({"max_tokens": 60, "ignore_eos": True} | params))  # type: ignore[arg-type]
    ids = [engine.add(prompt, sampling, speculation=speculation) for prompt in PROMPTS]
    for _ in engine.run(ids):
        pass
    return [engine.collect(request_id) for request_id in ids]


@pytest.mark.parametrize("proposer", ["draft-model", "ngram", "suffix", "draft-tree"])
@pytest.mark.parametrize("params", [{}, {"temperature": 0.8, "seed": 1}])
def test_the_output_is_plain_decodings(
    pair: tuple[Path, Path], proposer: str, params: dict[str, object]
) -> None:
    engine = make(pair, proposer=proposer)
    assert engine.default.num_draft_tokens == "auto"
    auto, plain = decode(engine, None, **params), decode(engine, PLAIN, **params)
    assert [r.tokens for r in auto] == [r.tokens for r in plain]


def test_auto_drafts_between_nothing_and_its_limit(pair: tuple[Path, Path]) -> None:
    engine = make(pair)
    sizes: list[int] = []
    engine.observers.append(
        lambda report: sizes.extend(len(event.draft_tokens) for event in report.events)
    )
    decode(engine)
    assert max(sizes) <= MAX_AUTO_DRAFT_TOKENS  # how many pay is for the machine to say
    assert not controller(engine)._tracks  # finished sequences are forgotten


def test_costs_are_measured_at_the_start_and_kept(pair: tuple[Path, Path], cache: Path) -> None:
    first = controller(make(pair)).costs
    assert not first.verify.is_guess
    assert min(first.drafts["draft-model"].seconds(0, k) for k in (1, 4)) > 0
    assert len(list(cache.iterdir())) == 1
    again = controller(make(pair)).costs
    assert again.verify.to_dict() == first.verify.to_dict()
    assert again.drafts["draft-model"].to_dict() == first.drafts["draft-model"].to_dict()


def test_costs_measured_while_threads_wait_for_a_processor_are_not_kept(
    pair: tuple[Path, Path], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibrate, "WAITED", 0.05)
    monkeypatch.setattr(calibrate, "seconds_waited", lambda: perf_counter() / 10)
    assert not controller(make(pair)).costs.verify.is_guess
    assert not cache.exists()


def test_a_drafter_with_a_model_is_tried_before_the_first_request(
    pair: tuple[Path, Path],
) -> None:
    engine = make(pair, num_draft_tokens=3)
    never = add_synthetic(engine, 0.0, "draft-model")
    always = add_synthetic(engine, 1.0, "draft-model")
    engine.proposers["failing"] = Drafter(ValueError("a fault"))
    refused = {name: num_refused(engine, name) for name in (never, always, "ngram", "failing")}
    assert refused.pop(never) > 2
    assert refused == {always: 0, "ngram": 0, "failing": 0}
    assert engine.kv.usage == 0
    costs = Costs.guess()
    calibrate.Calibration(engine)(costs, never)
    assert costs.refused[never] > 2


def test_measuring_leaves_nothing_behind(pair: tuple[Path, Path]) -> None:
    engine = make(pair, kv_tokens=64)  # no room for the longer contexts
    assert engine.kv.usage == 0
    assert [len(r.tokens) for r in decode(engine, max_tokens=20)] == [20, 20, 20]


def test_an_engine_with_a_fixed_k_measures_only_when_a_request_asks(
    pair: tuple[Path, Path], cache: Path
) -> None:
    engine = make(pair, num_draft_tokens=3)
    fixed = decode(engine)
    assert not cache.exists()
    assert all(r.stats.num_drafted for r in fixed)
    auto = Speculation(proposer="draft-model", num_draft_tokens="auto")
    assert [r.tokens for r in decode(engine, auto)] == [r.tokens for r in fixed]
    assert cache.exists()


def test_fixed_and_automatic_requests_share_a_batch(pair: tuple[Path, Path]) -> None:
    engine = make(pair)
    plain = decode(engine, PLAIN)
    wishes: list[Speculation] = [
        Speculation(proposer="draft-model", num_draft_tokens=5),
        Speculation(proposer="draft-model", num_draft_tokens="auto"),
        PLAIN,
    ]
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    ids = [engine.add(p, params, speculation=w) for p, w in zip(PROMPTS, wishes, strict=True)]
    sizes: dict[str, set[int]] = {}
    for report in engine.run(ids):
        for event in report.events:
            if event.step > 1 and event.finish_reason is None:
                sizes.setdefault(event.request_id, set()).add(len(event.draft_tokens))
    assert [engine.collect(i).tokens for i in ids] == [r.tokens for r in plain]
    assert max(sizes[ids[0]]) == 5
    assert 0 not in sizes[ids[0]]
    assert sizes[ids[2]] == {0}


def test_a_drafter_that_is_always_wrong_is_switched_off(pair: tuple[Path, Path]) -> None:
    """Counted in drafts, not in seconds: the machine that runs the tests may be busy."""
    engine = make(pair, max_step_tokens=2048)

    def junk(view: SequenceView, budget: int) -> Proposal:
        return Proposal([0] * budget)

    engine.proposers["scripted"] = Drafter(junk)
    wish = Speculation(proposer="scripted", num_draft_tokens="auto")
    results = decode(engine, wish, max_tokens=140, banned_ids=(0,))
    drafted = sum(r.stats.num_proposals for r in results)
    assert sum(r.stats.num_accepted for r in results) == 0
    assert drafted < 0.5 * sum(r.stats.num_steps for r in results)


@pytest.mark.parametrize("wrong", ["often", 1.5, "4", None])
def test_anything_else_is_refused(pair: tuple[Path, Path], wrong: object) -> None:
    with pytest.raises(ConfigError, match="num_draft_tokens must be 'auto'"):
        make(pair, num_draft_tokens=wrong)
    engine = make(pair, num_draft_tokens=0)
    with pytest.raises(RequestError, match="num_draft_tokens must be 'auto'"):
        engine.add(PROMPTS[0], speculation=Speculation(num_draft_tokens=wrong))  # type: ignore[arg-type]


def test_the_tokens_of_a_measured_pass_differ(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those of a text do: one repeated token would touch few experts of a mixture."""
    engine = make(pair, num_draft_tokens=0)
    forward, passes = engine.target.forward, list[list[int]]()

    def noting(batch: StepBatch) -> StepOutput:
        passes.append(batch.tokens_T.tolist())
        return forward(batch)

    monkeypatch.setattr(engine.target, "forward", noting)
    monkeypatch.setattr(trial, "num_refused", lambda engine, name: 0)  # a text repeats itself
    calibrate.Calibration(engine)(Costs.guess(), "draft-model")
    wide = [tokens for tokens in passes if 4 < len(tokens) <= engine.target.spec.num_tokens]
    assert wide
    assert all(len(set(tokens)) == len(tokens) for tokens in wide)
