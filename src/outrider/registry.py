"""Proposers by name. Ours are imported on first use; others register the entry point group
`outrider.proposers`, so that a proposer can live in any package."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Protocol

from outrider.contracts import Proposer, ProposerContext
from outrider.errors import UnknownName

_PROPOSERS = {
    "cascade": "outrider.proposers.cascade:CascadeProposer",
    "cross-vocab": "outrider.proposers.cross_vocab:CrossVocabProposer",
    "dflash": "outrider.proposers.dflash:DFlashProposer",
    "draft-model": "outrider.proposers.draft_model:DraftModelProposer",
    "draft-tree": "outrider.proposers.draft_tree:DraftTreeProposer",
    "eagle3": "outrider.proposers.eagle3:Eagle3Proposer",
    "early-exit": "outrider.proposers.early_exit:EarlyExitProposer",
    "hybrid": "outrider.proposers.hybrid:HybridProposer",
    "lookahead": "outrider.proposers.lookahead:LookaheadProposer",
    "medusa": "outrider.proposers.medusa:MedusaProposer",
    "ngram": "outrider.proposers.ngram:NgramProposer",
    "prediction": "outrider.proposers.prediction:PredictionProposer",
    "quantized": "outrider.proposers.quantized:QuantizedProposer",
    "suffix": "outrider.proposers.suffix:SuffixProposer",
}


class ProposerClass(Protocol):
    def build(self, context: ProposerContext) -> Proposer: ...


@cache
def _plugins() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group="outrider.proposers")}


def proposer_names() -> list[str]:
    return sorted({*_PROPOSERS, *_plugins()})


def proposer_class(name: str) -> ProposerClass:
    """Raises UnknownName with a suggestion."""
    if name in _PROPOSERS:
        module, _, attribute = _PROPOSERS[name].partition(":")
        found: ProposerClass = getattr(import_module(module), attribute)
        return found
    if name in _plugins():
        plugin: ProposerClass = _plugins()[name].load()
        return plugin
    raise UnknownName("proposer", name, proposer_names())
