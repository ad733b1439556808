"""Proposers by name."""

from __future__ import annotations

from importlib.metadata import EntryPoint

import pytest

from outrider import registry
from outrider.contracts import Proposer
from outrider.errors import UnknownName
from outrider.proposers.ngram import NgramProposer
from outrider.proposers.prediction import PredictionProposer
from outrider.registry import proposer_class, proposer_names


@pytest.mark.parametrize("name", sorted(registry._PROPOSERS))
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
    monkeypatch.setattr(registry, "_plugins", lambda: {"mine": entry})
    assert "mine" in proposer_names()
    assert proposer_class("mine") is NgramProposer
