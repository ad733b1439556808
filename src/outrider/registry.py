"""Proposers by name: the only list of ours, and those that users and other packages add.

A package adds one with an entry point of the group `outrider.proposers`, a program with
`outrider.register`. Nothing is imported before it is asked for: the shell's completion reads this
list, and must not wait for torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

from outrider.errors import ConfigError, OutriderError, UnknownName

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from outrider.contracts import Proposer, ProposerContext

Drafter = Literal["", "model", "head"]  # what `draft_model` is to a proposer: not used, ...
WITHOUT_MODEL = "ngram"  # the default proposer without a draft model
WITH_MODEL = "draft-model"  # and with one
BESIDE_MODEL = "suffix"  # the look-up that runs beside a drafter
ACROSS_VOCABULARIES = "cross-vocab"  # with one of another tokenizer
WITH_MTP = "mtp"  # without a draft model, on a target that holds a layer for it
PREDICTION = "prediction"  # the one that reads a request's prediction
GROUP = "outrider.proposers"
NEEDED = ("propose", "observe")


@dataclass(frozen=True, slots=True)
class Vllm:
    """How vLLM drafts what a proposer drafts."""

    method: str  # of its --speculative-config; "": it cannot
    note: str = ""  # how it differs; why it cannot
    k: int = 8  # drafts per step if the user does not say
    samples: bool = False  # drafts are drawn, so that its rule accepts more of them
    more: Mapping[str, Any] | None = None  # further keys of the configuration
    reads_prediction: bool = False
    cpu_note: str = ""  # what its CPU build does worse


@dataclass(frozen=True, slots=True)
class Entry:
    place: str  # module of outrider.proposers, and class
    drafter: Drafter
    vllm: Vllm
    is_served: bool = False  # a server offers it by default: it needs no model
    works_alone: bool = False  # drafts for any target, also without a drafter


NGRAM = {"prompt_lookup_min": 2, "prompt_lookup_max": 4}
ACROSS = {"use_heterogeneous_vocab": True}
PARALLEL = {"parallel_drafting": True}
DSPARK = "without DSpark's additions (`outrider export vllm` leaves them out)"
FEWER = "fewer accepted drafts for heads of several layers"
BETTER = "prediction and suffix, whichever has been right more often"
TWICE = "vLLM would load the weights twice; give a quantized draft model"
OURS = "custom_class"  # vLLM's name for a class of ours

# fmt: off
_PROPOSERS = {
    "draft-model": Entry("draft_model:DraftModelProposer", "model",
                         Vllm("draft_model", k=4, samples=True)),
    "cross-vocab": Entry("cross_vocab:CrossVocabProposer", "model",
                         Vllm("draft_model", "with `use_heterogeneous_vocab`, greedy drafts", 4,
                              more=ACROSS)),
    "medusa": Entry("medusa:MedusaProposer", "head",
                    Vllm("medusa", "the most probable chain instead of a tree")),
    "eagle3": Entry("eagle3:Eagle3Proposer", "head", Vllm("eagle3", "a chain", 4, samples=True)),
    "eagle": Entry("eagle:EagleProposer", "head", Vllm("eagle", "a chain", 4, samples=True)),
    "p-eagle": Entry("p_eagle:PEagleProposer", "head",
                     Vllm("eagle3", "a chain", 4, samples=True, more=PARALLEL)),
    "mlp": Entry("mlp:MlpProposer", "head", Vllm("", "vLLM's engine has no MLP speculators")),
    "dflash": Entry("dflash:DFlashProposer", "head",
                    Vllm("dflash", DSPARK, samples=True, cpu_note=FEWER)),
    "mtp": Entry("mtp:MtpProposer", "head",
                 Vllm("mtp", "the target's own layer", 2, samples=True)),
    "ngram": Entry("ngram:NgramProposer", "",
                   Vllm("ngram", "with windows of 2 to 4 tokens", more=NGRAM), is_served=True),
    "suffix": Entry("suffix:SuffixProposer", "",
                    Vllm(OURS, "ours, chains, nothing shared between requests"), is_served=True),
    "prediction": Entry("prediction:PredictionProposer", "",
                        Vllm(OURS, "ours", reads_prediction=True), is_served=True),
    "hybrid": Entry("hybrid:HybridProposer", "model",
                    Vllm(OURS, BETTER, reads_prediction=True), works_alone=True),
    "cascade": Entry("cascade:CascadeProposer", "model", Vllm("", "vLLM has one drafter")),
    "draft-tree": Entry("draft_tree:DraftTreeProposer", "model",
                        Vllm("", "vLLM verifies chains")),
    "early-exit": Entry("early_exit:EarlyExitProposer", "",
                        Vllm("", "vLLM cannot stop after some of the layers")),
    "lookahead": Entry("lookahead:LookaheadProposer", "", Vllm("", "vLLM has no Jacobi window"),
                       works_alone=True),
    "quantized": Entry("quantized:QuantizedProposer", "", Vllm("", TWICE)),
}
# fmt: on
registered: dict[str, ProposerClass] = {}


class ProposerClass(Protocol):
    def build(self, context: ProposerContext) -> Proposer: ...


def register(name: str, proposer: type) -> None:
    """Makes a class of yours a proposer: `LLM(proposer=name)`, `Speculation(proposer=name)`.

    The class needs `propose` and `observe`; `outrider.contracts.ProposerDefaults` says what it
    gets for everything else. Raises ConfigError if one of the two is missing or if the name is
    one of ours. A second class under the same name replaces the first in engines built later.
    """
    if name in _PROPOSERS:
        raise ConfigError(f"proposer {name!r} is one of Outrider's: register another name")
    registered[name] = _complete(name, proposer)


@cache
def plugins() -> dict[str, EntryPoint]:
    from importlib.metadata import entry_points

    return {entry.name: entry for entry in entry_points(group=GROUP)}


def own_entries() -> Mapping[str, Entry]:
    """The proposers that come with Outrider."""
    return _PROPOSERS


def served_names() -> tuple[str, ...]:
    """The proposers that a server offers besides its default one."""
    return tuple(name for name, entry in _PROPOSERS.items() if entry.is_served)


def usable_names(drafter: str | None) -> list[str]:
    """The proposers that can draft for any target with this drafter: `WITH_MODEL`, a kind of heads
    (the proposer's name), or None. Others need more of the target, or a further model."""
    found = [*registered, *plugins()]
    for name, entry in _PROPOSERS.items():
        fits = {"": entry.is_served, "model": drafter == WITH_MODEL, "head": drafter == name}
        if entry.works_alone or fits[entry.drafter]:
            found.append(name)
    return sorted(found)


def proposer_names() -> list[str]:
    return sorted({*_PROPOSERS, *registered, *plugins()})


def check_names(names: Iterable[str]) -> None:
    """Raises UnknownName with a suggestion for the first name that is no proposer's."""
    for name in names:
        if name not in _PROPOSERS and name not in registered and name not in plugins():
            raise UnknownName("proposer", name, proposer_names())


def uses_draft_model(name: str) -> bool:
    """Whether a proposer may draft with `draft_model`; a class of the user's may."""
    return name not in _PROPOSERS or _PROPOSERS[name].drafter != ""


def proposer_class(name: str) -> ProposerClass:
    """Raises UnknownName with a suggestion, ConfigError for a class that cannot be one."""
    check_names([name])
    if name in _PROPOSERS:
        module, _, attribute = _PROPOSERS[name].place.partition(":")
        return _complete(name, getattr(import_module(f"{GROUP}.{module}"), attribute))
    if name in registered:
        return registered[name]
    entry = plugins()[name]
    try:
        kind = entry.load()
    except Exception as error:
        raise ConfigError(_blame(name, "cannot be imported", error)) from error
    return _complete(name, kind)


def build_proposer(name: str, context: ProposerContext) -> Proposer:
    """The proposer `name` of an engine.

    Raises ConfigError if a class that is not ours fails, and UnknownName for an option that its
    `build` does not read.
    """
    kind = proposer_class(name)
    options = _Options(context.options)
    try:
        built = kind.build(replace(context, options=options))
    except OutriderError:
        raise
    except Exception as error:
        if name in _PROPOSERS:
            raise
        raise ConfigError(_blame(name, "cannot be built", error)) from error
    unread = [option for option in context.options if option not in options.read]
    if unread and options.read:
        raise UnknownName(f"option of proposer {name!r}", unread[0], options.read)
    if unread:
        raise ConfigError(f"proposer {name!r} has no options: leave out {unread[0]!r}")
    return built


class _Options(Mapping[str, object]):
    """Options that record which of them are read, so that no other is silently ignored."""

    def __init__(self, given: Mapping[str, object]) -> None:
        self._given = given
        self.read: set[str] = set()

    def __getitem__(self, name: str) -> object:
        self.read.add(name)
        return self._given[name]

    def __iter__(self) -> Iterator[str]:
        self.read.update(self._given)
        return iter(self._given)

    def __len__(self) -> int:
        return len(self._given)


def _complete(name: str, kind: type) -> ProposerClass:
    """`kind` with a default for each member of a proposer that it does not have."""
    if not isinstance(kind, type):
        raise ConfigError(f"proposer {name!r}{_origin(name)} must be a class, not {kind!r}")
    for member in NEEDED:
        if not callable(getattr(kind, member, None)):
            raise ConfigError(
                f"proposer {name!r}{_origin(name)} has no method {member!r}: "
                f"class {kind.__qualname__} needs {' and '.join(NEEDED)}"
            )
    from outrider.contracts import ProposerDefaults

    if all(hasattr(kind, member) for member in ("name", *vars(ProposerDefaults))):
        return cast("ProposerClass", kind)
    members = {} if hasattr(kind, "name") else {"name": name}
    completed: Any = type(kind.__name__, (kind, ProposerDefaults), members)
    return cast("ProposerClass", completed)


def _origin(name: str) -> str:
    """Where a proposer that is not ours comes from."""
    entry = plugins().get(name)
    if entry is None or name in registered:
        return ""
    package = "an installed package" if entry.dist is None else f"package {entry.dist.name!r}"
    return f" of {package} (entry point {entry.value})"


def _blame(name: str, what: str, error: Exception) -> str:
    return f"proposer {name!r}{_origin(name)} {what}: {type(error).__name__}: {error}"
