"""Hybrid: who is asked, what is learnt from whom, and that every part hears what it must."""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Sequence as Seq
from itertools import count, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from native_models import needs_native
from outrider.contracts import (
    Draw,
    Needs,
    Observation,
    Proposal,
    SequenceView,
    Verdict,
)
from outrider.draft_plans import DraftPlan, Propose
from outrider.engine.build import EngineConfig, build
from outrider.engine.engine import Engine
from outrider.engine.request import Speculation
from outrider.errors import ConfigError
from outrider.policy.sources import Offer, Place, SourcePolicy, Track
from outrider.proposers.hybrid import HybridConfig, HybridProposer
from outrider.sampling import SamplingParams
from outrider.testing import write_tiny_llama
from published import CASES, TARGET, mtp


class Part:
    """Drafts what it is told to, and takes as long as it is told to on a clock of our own."""

    needs = Needs()
    trees = False

    def __init__(
        self,
        name: str,
        answer: Callable[[SequenceView], list[int]],
        draws: frozenset[Draw] = frozenset({Draw.DETERMINISTIC}),
        cost_s: float = 0.0,
    ) -> None:
        self.name = name
        self.draws = draws
        self.answer = answer
        self.cost_s = cost_s
        self.num_asked = 0
        self.observed: list[int] = []
        self.released: list[int] = []

    def propose(self, views: Seq[SequenceView], budgets: Seq[int]) -> list[Proposal]:
        self.num_asked += len(views)
        CLOCK.now += self.cost_s
        return [
            Proposal(self.answer(view)[:budget], source=self.name)
            for view, budget in zip(views, budgets, strict=True)
        ]

    def observe(self, views: Seq[SequenceView], seen: Seq[Observation]) -> None:
        self.observed += [view.id for view in views]

    def release(self, sequence_id: int) -> None:
        self.released.append(sequence_id)


CLOCK = SimpleNamespace(now=0.0)


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.proposers.hybrid.perf_counter", lambda: CLOCK.now)


class View:
    def __init__(self, sequence_id: int, tokens: list[int]) -> None:
        self.id = sequence_id
        self.tokens = tokens
        self.params = SamplingParams(max_tokens=10**6)
        self.num_prompt_tokens = len(tokens) - 1

    @property
    def num_computed(self) -> int:
        return len(self.tokens) - 1


def view_of(tokens: list[int], sequence_id: int = 0) -> SequenceView:
    return cast(SequenceView, View(sequence_id, tokens))


def truth(view: SequenceView) -> list[int]:
    """The text counts: 0 1 2 3 ..."""
    return list(range(len(view.tokens), len(view.tokens) + 9))


def wrong(view: SequenceView) -> list[int]:
    return [-1] * 9


def nothing(view: SequenceView) -> list[int]:
    return []


def step(
    hybrid: HybridProposer, views: list[SequenceView], budget: int = 4, pass_s: float = 10.0
) -> list[str]:
    """One step of an engine whose target counts and takes so long; returns who drafted."""
    proposals = hybrid.propose(views, [budget] * len(views))
    CLOCK.now += pass_s
    seen = []
    for view, proposal in zip(views, proposals, strict=True):
        path: list[int] = []
        for token in proposal.tokens:
            if token != len(view.tokens):
                break
            view.tokens.append(token)
            path.append(len(path))
        view.tokens.append(len(view.tokens))
        seen.append(Observation(proposal, Verdict(path, view.tokens[-1])))
    hybrid.observe(views, seen)
    return [proposal.source for proposal in proposals]


def test_the_drafter_is_not_asked_where_a_lookup_does_as_well() -> None:
    drafter = Part("model", truth, cost_s=5.0)
    hybrid = HybridProposer([Part("lookup", truth)], [drafter])
    views = [view_of([0])]
    sources = [step(hybrid, views) for _ in range(10)]
    assert sources == [["lookup"]] * 10
    assert drafter.num_asked == 0


def test_the_drafter_steps_in_where_lookups_fail() -> None:
    drafter = Part("model", truth, cost_s=5.0)
    hybrid = HybridProposer([Part("empty", nothing), Part("wrong", wrong)], [drafter])
    views = [view_of([0])]
    sources = [step(hybrid, views)[0] for _ in range(12)]
    assert sources[-6:] == ["model"] * 6


def test_a_drafter_is_judged_apart_where_something_was_found() -> None:
    """It is right there and wrong elsewhere; half the time, it would not pay anywhere."""

    def some(view: SequenceView) -> list[int]:
        return [] if len(view.tokens) % 2 else [len(view.tokens), -1]

    def easy(view: SequenceView) -> list[int]:
        return wrong(view) if len(view.tokens) % 2 else truth(view)

    drafter = Part("model", easy, cost_s=4.0)
    hybrid = HybridProposer([Part("lookup", some)], [drafter])
    views = [view_of([0])]
    sources: dict[bool, list[str]] = {False: [], True: []}
    for _ in range(80):
        found = len(views[0].tokens) % 2 == 0
        sources[found] += step(hybrid, views)
    assert sources[True][-10:] == ["model"] * 10
    assert sources[False][-10:] == [""] * 10


def test_a_drafter_that_costs_too_much_is_left_alone() -> None:
    """One token of a look-up in 10 s is more than four of a drafter in 110 s."""
    lookup = Part("lookup", lambda view: truth(view)[:1])
    for cost_s, winner in ((100.0, "lookup"), (1.0, "model")):
        hybrid = HybridProposer([lookup], [Part("model", truth, cost_s=cost_s)])
        views = [view_of([0])]
        assert [step(hybrid, views)[0] for _ in range(30)][-8:] == [winner] * 8


def test_a_batch_shares_the_price_of_a_drafter() -> None:
    """What is too much for one sequence pays where many have nothing better."""
    found = Part("lookup", lambda view: truth(view)[:2] if view.id == 0 else [])
    hybrid = HybridProposer([found], [Part("model", truth, cost_s=15.0)])
    views = [view_of([0], i) for i in range(4)]
    for _ in range(30):
        sources = step(hybrid, views)
    assert sources[1:] == ["model"] * 3


def test_an_unused_lookup_is_judged_by_what_the_text_became() -> None:
    """It was wrong for a while and lost its turn; when it is right again it gets it back."""
    right = False
    lookup = Part("lookup", lambda view: truth(view) if right else wrong(view))
    hybrid = HybridProposer([lookup], [Part("model", truth, cost_s=5.0)])
    views = [view_of([0])]
    for _ in range(20):
        sources = step(hybrid, views)
    assert sources == ["model"]
    right = True
    sources = [step(hybrid, views)[0] for _ in range(40)]
    assert sources[0] == "model"
    assert sources[-5:] == ["lookup"] * 5


def test_a_new_sequence_starts_from_what_others_saw() -> None:
    hybrid = HybridProposer([Part("wrong", wrong)], [Part("model", truth, cost_s=1.0)])
    first = [view_of([0])]
    for _ in range(30):
        step(hybrid, first)
    assert step(hybrid, [view_of([0], 1)]) == ["model"]


def test_every_part_hears_of_what_concerns_it_and_of_every_release() -> None:
    tapping = Part("tapping", wrong)
    tapping.needs = Needs(taps=(1,))
    lookups = [Part("a", lambda view: truth(view) if view.id == 7 else []), Part("b", nothing)]
    drafters = [Part("c", truth), tapping]
    hybrid = HybridProposer(lookups, drafters)
    step(hybrid, [view_of([0], 7), view_of([0], 8)], budget=9)
    hybrid.observe([view_of([0], 9)], [Observation(Proposal(), None)])  # a prefill chunk
    hybrid.release(7)
    hybrid.release(99)
    for part in (*lookups, tapping):
        assert part.observed == [7, 8, 9]
    assert drafters[0].observed == [8]
    for part in (*lookups, *drafters):
        assert part.released == [7, 99]
    hybrid.release(8)
    assert not hybrid.policy.tracks


def test_a_drafter_without_an_answer_leaves_the_lookups() -> None:
    short = Part("lookup", lambda view: truth(view)[:1])
    hybrid = HybridProposer([short], [Part("full", nothing)])
    assert step(hybrid, [view_of([0])], budget=8) == ["lookup"]


def test_laws_trees_and_taps_are_those_of_the_parts() -> None:
    both = frozenset({Draw.COUPLED, Draw.SAMPLED})
    hybrid = HybridProposer([Part("a", truth)], [Part("b", truth, both)])
    assert hybrid.draws == both
    assert not hybrid.trees
    assert HybridProposer([Part("a", truth)], []).draws == {Draw.DETERMINISTIC}
    tree = Part("tree", truth, frozenset({Draw.COUPLED, Draw.WITHOUT_REPLACEMENT}))
    tree.trees = True
    tree.needs = Needs(taps=(3, 1))
    hybrid = HybridProposer([], [Part("b", truth, both), tree])
    assert hybrid.draws == {Draw.COUPLED}
    assert hybrid.trees
    assert hybrid.needs.taps == (1, 3)
    coupled, sampled = (Part(law.value, truth, frozenset({law})) for law in both)
    with pytest.raises(ConfigError, match="no way to draw is common"):
        HybridProposer([], [coupled, sampled])
    with pytest.raises(ConfigError, match="at least one"):
        HybridProposer([], [])
    for names in ("suffix", ["hybrid"]):
        with pytest.raises(ConfigError, match="lists of other proposers"):
            HybridConfig(lookups=names)


def test_of_a_long_lookup_only_what_pays_is_taken() -> None:
    """Every draft makes the pass two seconds longer, and those behind the second are wrong."""
    hybrid = HybridProposer([Part("lookup", lambda view: truth(view)[:2] + [-1] * 14)], [])
    view = view_of([0])
    for _ in range(60):
        (proposal,) = hybrid.propose([view], [16])
        num_accepted = min(2, len(proposal))
        CLOCK.now += 4.0 + 2.0 * len(proposal)
        view.tokens += range(len(view.tokens), len(view.tokens) + num_accepted + 1)
        verdict = Verdict(list(range(num_accepted)), view.tokens[-1])
        hybrid.observe([view], [Observation(proposal, verdict)])
    assert 1 <= len(proposal) <= 4


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """The target drafts for itself, so that a drafter that did not catch up would be refused."""
    folder = write_tiny_llama(tmp_path_factory.mktemp("hybrid") / "target", max_positions=256)
    config = EngineConfig(
        model=str(folder), draft_model=str(folder), proposer="hybrid", backend="torch"
    )
    return build(config)


def test_a_drafter_that_was_skipped_catches_up(
    engine: Engine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = count()

    def every_third(self: SourcePolicy, *args: Any) -> float:
        gained = pays(self, *args)
        return 0.0 if next(steps) % 3 else gained

    pays = SourcePolicy.pays

    monkeypatch.setattr(SourcePolicy, "pays", every_third)
    prompt = [5, 9, 2, 5, 9, 2, 5, 9, 2, 5]
    params = SamplingParams(max_tokens=80, ignore_eos=True)
    ids = [engine.add(prompt[:n], params) for n in (10, 6, 3)]
    events = [event for report in engine.run(ids) for event in report.events]
    switches = 0
    for request in ids:
        mine = [event for event in events if event.request_id == request]
        sources = [event.source for event in mine]
        switches += sum(a != b for a, b in pairwise(sources))
        for event in mine:
            if event.source == "draft-model" and event.finish_reason is None:
                assert len(event.path) == len(event.draft_tokens)
    assert switches > 3
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


def planning(folder: Path, **options: object) -> Engine:
    """A model that drafts for itself, and what its text repeats."""
    model = str(write_tiny_llama(folder, max_positions=256))
    return build(
        EngineConfig(
            model=model,
            draft_model=model,
            proposer="hybrid",
            proposer_options={"hybrid": options, "draft-model": {"dtype": "float32"}},
            num_draft_tokens=6,
            backend="native",
        )
    )


@needs_native
def test_by_plan_too_it_is_asked_for_as_much_as_pays_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = planning(tmp_path)
    asked = {(False, 2), (True, 5)}

    def offer(self: SourcePolicy, track: Track, place: Place, budget: int) -> Offer:
        return Offer(5 if place[1] else 2, 99.0, 99.0)

    seen = set()
    observe = HybridProposer.observe

    def noting(self: HybridProposer, views: Seq[SequenceView], observed: Seq[Observation]) -> None:
        for view, one in zip(views, observed, strict=True):
            drafted = one.proposal.drafted
            num_left = view.params.max_tokens - len(view.tokens)  # near the end there are fewer
            if drafted is not None and drafted.found is not None and num_left > 20:
                seen.add((bool(drafted.found.tokens), len(one.proposal.tokens)))
        observe(self, views, observed)

    monkeypatch.setattr(SourcePolicy, "of_drafter", offer)
    monkeypatch.setattr(HybridProposer, "observe", noting)
    params = SamplingParams(max_tokens=200, temperature=0.4, seed=3, ignore_eos=True)
    drafted = engine.add([5, 9, 2, 7], params)
    plain = engine.add([5, 9, 2, 7], params, speculation=Speculation(proposer=None))
    for request in (drafted, plain):
        for _ in engine.run([request]):
            pass
    assert seen == asked
    assert engine.collect(drafted).tokens == engine.collect(plain).tokens


@needs_native
def test_without_a_lookup_nothing_is_asked_for_where_one_would_have_found_something(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = planning(tmp_path, lookups=[])

    def offer(self: SourcePolicy, track: Track, place: Place, budget: int) -> Offer:
        return Offer(5, 9.0, 9.0) if place[1] else Offer(1, -9.0, -9.0)

    monkeypatch.setattr(SourcePolicy, "of_drafter", offer)
    request = engine.add([5, 9, 2, 7], SamplingParams(max_tokens=40, ignore_eos=True))
    reports = list(engine.run([request]))
    assert not any(event.draft_tokens for report in reports for event in report.events)


@needs_native
def test_what_an_unread_drafter_would_gain_is_counted_by_plan_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else nobody would ever read a long text again, once it did not pay."""
    engine = planning(tmp_path)
    monkeypatch.setattr(SourcePolicy, "reads", lambda *_: False)
    params = SamplingParams(max_tokens=200, temperature=0.9, seed=3, ignore_eos=True)
    request = engine.add(list(range(2, 42)), params)
    hybrid = cast(HybridProposer, engine.proposers["hybrid"])
    most = 0.0
    for _ in engine.run([request]):
        for track in hybrid.policy.tracks.values():
            most = max(most, track.missed.get("draft-model", 0.0))
    assert most > 20.0


@needs_native
@pytest.mark.parametrize("parts", [{"lookups": []}, {"drafters": []}])
def test_one_side_plans_alone_where_the_other_never_wins(
    parts: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = planning(tmp_path, **parts)
    plans: list[DraftPlan] = []
    make_plan = HybridProposer.plan

    def noting(self: HybridProposer, *args: Any) -> DraftPlan:
        plans.append(make_plan(self, *args))
        return plans[-1]

    monkeypatch.setattr(HybridProposer, "plan", noting)
    heat = 0.9 if "lookups" in parts else 0.0  # greedily, so small a model repeats itself
    params = SamplingParams(max_tokens=230, temperature=heat, seed=5, ignore_eos=True)
    drafted = engine.add([5, 9, 2, 7], params)
    reports = list(engine.run([drafted]))
    assert any(not isinstance(plan, Propose) for plan in plans)
    if "lookups" in parts:  # the target drafts for itself: a drafter that lost track is refused
        events = [event for report in reports for event in report.events][1:-1]
        assert all(len(event.path) == len(event.draft_tokens) for event in events)
    plain = engine.add([5, 9, 2, 7], params, speculation=Speculation(proposer=None))
    for _ in engine.run([plain]):
        pass
    assert engine.collect(drafted).tokens == engine.collect(plain).tokens


def test_a_long_text_is_read_where_that_pays_before_the_end() -> None:

    class Reader(Part):
        num_read = 0

        def propose(self, views: Seq[SequenceView], budgets: Seq[int]) -> list[Proposal]:
            CLOCK.now += 0.2 * (len(views[0].tokens) - self.num_read)
            self.num_read = len(views[0].tokens)
            return super().propose(views, budgets)

    reader = Reader("model", truth, cost_s=1.0)
    hybrid = HybridProposer([Part("lookup", lambda view: truth(view)[:1])], [reader])
    first = [view_of(list(range(200)))]
    for _ in range(20):
        step(hybrid, first)
    assert hybrid.policy.costs.reading_s("model") > 0.1  # known from the first time it read
    reader.num_read = 0
    short = [view_of(list(range(2000)), 1)]
    short[0].params = SamplingParams(max_tokens=60)
    assert [step(hybrid, short)[0] for _ in range(30)] == ["lookup"] * 30
    long = [view_of(list(range(2000)), 2)]
    sources = [step(hybrid, long)[0] for _ in range(60)]
    assert sources[0] == "lookup"
    assert sources[-3:] == ["model"] * 3


def test_a_first_batch_of_another_size_says_nothing_about_the_machine_s_speed() -> None:
    hybrid = HybridProposer([Part("lookup", nothing)], [])
    for _ in range(40):
        step(hybrid, [view_of([0])])
    speed = hybrid.policy.costs.verify.speed
    views = [view_of([0], number) for number in range(1, 5)]
    for _ in range(40):
        step(hybrid, views, pass_s=30.0)
    assert hybrid.policy.costs.verify.speed == pytest.approx(speed, rel=0.1)


def test_in_the_pass_over_the_prompt_lookups_alone_are_asked() -> None:
    drafter = Part("model", truth)
    hybrid = HybridProposer([Part("lookup", nothing)], [drafter])
    assert hybrid.needs.early
    assert not HybridProposer([], [drafter]).needs.early
    view = View(0, [0, 1, 2])
    view.num_prompt_tokens = 3
    assert step(hybrid, [cast(SequenceView, view)]) == [""]
    assert drafter.num_asked == 0
    assert step(hybrid, [cast(SequenceView, view)]) == ["model"]


HEADS = ("medusa_vllm", "specforge", "dflash_zlab", "eagle1_with_bias", "p_eagle_speculators")


@pytest.mark.parametrize("name", [*HEADS, "mlp_ibm", "mtp"])
def test_its_drafter_is_whatever_there_is(tmp_path: Path, name: str) -> None:
    """A head in a folder, or the target's own layer."""
    if name == "mtp":
        model, kind = mtp.write("mimo", tmp_path)[0], name
    else:
        kind, write = CASES[name]
        write(tmp_path / "head")
        model = write_tiny_llama(tmp_path / "target", **TARGET)
    head = None if name == "mtp" else str(tmp_path / "head")
    engine = build(
        EngineConfig(model=str(model), draft_model=head, proposer="hybrid", backend="torch")
    )
    params = SamplingParams(max_tokens=40, temperature=4.0, seed=2, ignore_eos=True)
    drafted = engine.add([5, 9, 2, 7], params)
    plain = engine.add([5, 9, 2, 7], params, speculation=Speculation(proposer=None))
    events = [event for report in engine.run([drafted, plain]) for event in report.events]
    assert kind in {event.source for event in events}
    assert engine.collect(drafted).tokens == engine.collect(plain).tokens
