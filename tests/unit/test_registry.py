"""Proposers by name."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import SimpleNamespace

import pytest

import outrider
from outrider import registry
from outrider.contracts import Observation, Proposal, Proposer, ProposerContext, SequenceView
from outrider.errors import ConfigError, UnknownName
from outrider.llm import LLM
from outrider.proposers.ngram import NgramProposer
from outrider.proposers.prediction import PredictionProposer
from outrider.registry import proposer_class, proposer_names
from outrider.sampling import SamplingParams
from outrider.testing import write_tiny_llama


@pytest.mark.parametrize("name", sorted(registry.own_entries()))
def test_ours_are_found_under_their_own_names(name: str) -> None:
    assert name in proposer_names()
    found = proposer_class(name)
    assert getattr(found, "name", None) == name


def test_ours_keep_the_contract() -> None:
    proposers: list[Proposer] = [NgramProposer(), PredictionProposer()]  # mypy checks the rest
    assert [proposer.name for proposer in proposers] == ["ngram", "prediction"]


def test_a_misspelt_name_gets_a_suggestion() -> None:
    with pytest.raises(UnknownName, match="Did you mean 'ngram'"):
        proposer_class("n-gram")


def test_entry_points_are_proposers_too(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = EntryPoint("mine", "outrider.proposers.ngram:NgramProposer", "outrider.proposers")
    monkeypatch.setattr(registry, "plugins", lambda: {"mine": entry})
    assert "mine" in proposer_names()
    assert proposer_class("mine") is NgramProposer


# --- proposers of one's own -----------------------------------------------------------------------


class Repeat:
    """Drafts the last token again: the two members that are needed."""

    def __init__(self, times: int = 1) -> None:
        self.times = times
        self.num_seen = 0

    def propose(self, views: Sequence[SequenceView], budgets: Sequence[int]) -> list[Proposal]:
        return [
            Proposal([view.tokens[-1]] * min(self.times, budget))
            for view, budget in zip(views, budgets, strict=True)
        ]

    def observe(self, views: Sequence[SequenceView], seen: Sequence[Observation]) -> None:
        self.num_seen += len(seen)


class Mute:
    def propose(self, views: Sequence[SequenceView], budgets: Sequence[int]) -> list[Proposal]:
        return []


class Reader(Repeat):
    """Reads its one option by itself, as a package may."""

    @classmethod
    def build(cls, context: ProposerContext) -> Reader:
        return cls(int(str(context.options.get("times", 2))))


class Broken(Repeat):
    @classmethod
    def build(cls, context: ProposerContext) -> Broken:
        raise TypeError("something is wrong in here")


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "registered", {})


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_llama(tmp_path_factory.mktemp("registry") / "target", num_layers=1))


def plugin(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, place: str) -> None:
    """A package `greetings` with the entry point `hello`."""
    metadata = tmp_path / "greetings-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: greetings\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text(f"[outrider.proposers]\nhello = {place}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    entries = {entry.name: entry for entry in entry_points(group="outrider.proposers")}
    monkeypatch.setattr(registry, "plugins", lambda: entries)


def llm(target: str, name: str, **options: object) -> LLM:
    return LLM(
        target,
        proposer=name,
        num_draft_tokens=3,
        proposer_options={name: options} if options else {},
        backend="torch",
        kv_tokens=256,
    )


@pytest.mark.usefixtures("clean")
def test_propose_and_observe_are_enough(target: str) -> None:
    outrider.register("repeat", Repeat)
    assert "repeat" in proposer_names()
    ours = llm(target, "repeat", times=3)
    sampling = {"temperature": 0.8, "seed": 4, "max_tokens": 24, "ignore_eos": True}
    drafted = ours.generate([5, 6, 7], SamplingParams(**sampling))  # type: ignore[arg-type]
    plain = ours.generate(
        [5, 6, 7],
        SamplingParams(**sampling),  # type: ignore[arg-type]
        speculation=outrider.Speculation(proposer=None),
    )
    assert drafted.tokens == plain.tokens
    assert drafted.stats.num_drafted > 24
    proposer = ours.engine.proposers["repeat"]
    assert isinstance(proposer, Repeat)
    assert (proposer.name, proposer.times) == ("repeat", 3)
    assert proposer.num_seen > 0


@pytest.mark.usefixtures("clean")
def test_a_missing_member_is_refused_when_it_is_registered() -> None:
    with pytest.raises(ConfigError, match="'mute' has no method 'observe'"):
        outrider.register("mute", Mute)
    assert "mute" not in proposer_names()
    with pytest.raises(ConfigError, match="one of Outrider's"):
        outrider.register("ngram", Repeat)
    with pytest.raises(ConfigError, match="must be a class"):
        outrider.register("mute", Repeat())  # type: ignore[arg-type]


def test_a_missing_member_of_a_package_is_refused_when_the_engine_is_built(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin(monkeypatch, tmp_path, f"{__name__}:Mute")
    with pytest.raises(ConfigError, match=r"package 'greetings'.*no method 'observe'"):
        llm(target, "hello")


@pytest.mark.parametrize("kind", [Repeat, Reader])
@pytest.mark.usefixtures("clean")
def test_a_misspelt_option_is_refused_with_a_suggestion(kind: type, target: str) -> None:
    registry.register("mine", kind)
    with pytest.raises(UnknownName, match="Did you mean 'times'"):
        llm(target, "mine", tmes=3)
    assert llm(target, "mine", times=3).engine.proposers["mine"].times == 3  # type: ignore[attr-defined]


def test_a_misspelt_option_of_a_new_proposer_of_ours_is_refused(
    target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the two methods only, so that `build` is the default one."""
    monkeypatch.setitem(sys.modules, "outrider.proposers.mine", SimpleNamespace(Mine=Repeat))
    entry = registry.Entry("mine:Mine", "", registry.Vllm("", "not there"))
    monkeypatch.setitem(registry.own_entries(), "mine", entry)
    with pytest.raises(UnknownName, match="Did you mean 'times'"):
        llm(target, "mine", tmes=3)


@pytest.mark.usefixtures("clean")
def test_an_option_of_a_proposer_without_options_is_refused(target: str) -> None:
    registry.register("mine", type("Plain", (Repeat,), {"__init__": lambda self: None}))
    with pytest.raises(ConfigError, match="'mine' has no options: leave out 'times'"):
        llm(target, "mine", times=3)


def test_a_package_that_cannot_be_imported_is_named(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "greetings_code.py").write_text("import no_such_module_anywhere\n")
    plugin(monkeypatch, tmp_path, "greetings_code:Hello")
    assert "hello" in proposer_names()
    says = r"'hello' of package 'greetings' \(entry point greetings_code:Hello\) cannot be imported"
    with pytest.raises(ConfigError, match=says) as caught:
        llm(target, "hello")
    assert "no_such_module_anywhere" in str(caught.value)


@pytest.mark.usefixtures("clean")
def test_a_build_that_fails_is_named(target: str) -> None:
    registry.register("broken", Broken)
    with pytest.raises(ConfigError, match="'broken' cannot be built: TypeError: something is wro"):
        llm(target, "broken")
