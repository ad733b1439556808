"""Proposers of one engine: options by name, built once, shared with those made of others."""

from __future__ import annotations

import pytest

from outrider.engine.build import EngineConfig, build
from outrider.errors import ConfigError, UnknownName
from outrider.proposers.ngram import NgramProposer
from outrider.testing import write_tiny_llama


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_llama(tmp_path_factory.mktemp("build") / "target", num_layers=1))


def config(target: str, options: dict[str, dict[str, object]]) -> EngineConfig:
    return EngineConfig(
        model=target, proposer="ngram", backend="torch", kv_tokens=64, proposer_options=options
    )


def test_options_reach_the_proposer_they_name(target: str) -> None:
    proposers = build(config(target, {"ngram": {"max_n": 7}})).proposers
    ngram = proposers["ngram"]
    assert isinstance(ngram, NgramProposer)
    assert ngram.config.max_n == 7
    assert proposers["ngram"] is ngram


def test_a_wrong_option_is_refused(target: str) -> None:
    with pytest.raises(UnknownName, match="Did you mean 'ngram'"):
        build(config(target, {"ngrams": {}}))
    with pytest.raises(UnknownName, match="Did you mean 'max_n'"):
        build(config(target, {"ngram": {"max_m": 7}}))
    with pytest.raises(ConfigError, match="min_n=9"):
        build(config(target, {"ngram": {"min_n": 9}}))
