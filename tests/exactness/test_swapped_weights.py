"""Weights of a drafting head are swapped in the middle of sequences: the tokens stay the same."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from exactness.test_same_tokens_heads import BACKENDS, PARAMS, engine_for, prompts
from outrider.engine.engine import Engine
from outrider.engine.request import Speculation
from outrider.errors import ConfigError
from outrider.proposers.eagle3 import Eagle3Proposer
from outrider.proposers.per_salt import PerSalt
from outrider.testing import write_tiny_head, write_tiny_llama

EAGLE3 = Speculation(proposer="eagle3", num_draft_tokens=4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("swapped")
    write_tiny_llama(folder / "target", max_positions=128)
    for kind in ("medusa", "eagle3", "dflash"):
        write_tiny_head(folder / kind, kind)
    return folder


def head_of(engine: Engine) -> Eagle3Proposer:
    proposer = engine.proposers["eagle3"]
    assert isinstance(proposer, Eagle3Proposer)
    return proposer


def other_weights(proposer: Eagle3Proposer, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: value + torch.randn(value.shape, generator=generator)
        if value.is_floating_point()
        else value
        for name, value in proposer.loaded.head.state_dict().items()
    }


def run_all(
    engine: Engine, speculation: Speculation, name: str, swap_every: int = 0
) -> list[list[list[int]]]:
    """All prompts in one batch; other weights after every `swap_every` steps."""
    ids = [
        engine.add(prompt, PARAMS[name], speculation=speculation, salt=str(number % 2))
        for number, prompt in enumerate(prompts())
    ]
    for number, _ in enumerate(engine.run(ids), 1):
        if swap_every and number % swap_every == 0:
            engine.replace_weights("eagle3", other_weights(head_of(engine), number))
    return [[done.tokens for done in engine.collect(id).completions] for id in ids]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", PARAMS)
def test_a_swap_is_invisible(folder: Path, backend: str, name: str) -> None:
    engine = engine_for(folder, backend=backend)
    plain = run_all(engine, Speculation(proposer=None), name)
    before = other_weights(head_of(engine), 0)
    assert run_all(engine, EAGLE3, name, swap_every=2) == plain
    after = head_of(engine).loaded.head.state_dict()
    assert not torch.equal(after["lm_head.weight"], before["lm_head.weight"])
    assert run_all(engine, EAGLE3, name) == plain
    assert engine.kv.usage == 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_both_paths_draft_by_the_new_weights(folder: Path, backend: str) -> None:
    """An engine whose weights were swapped drafts what one that began with them does."""

    salts = itertools.count()  # without a cached prefix, whose features the head would not see

    def drafts(engine: Engine) -> list[list[int]]:
        salt = str(next(salts))
        id = engine.add(prompts()[3], PARAMS["greedy"], speculation=EAGLE3, salt=salt)
        found = [e.draft_tokens for report in engine.run([id]) for e in report.events]
        engine.collect(id)
        return found

    swapped = engine_for(folder, backend=backend)
    first = drafts(swapped)
    weights = other_weights(head_of(swapped), 3)
    swapped.replace_weights("eagle3", weights)
    new = folder / f"new-{backend}"
    head_of(swapped).loaded.head.save(new, dtype=torch.float32)
    fresh = engine_for(folder, backend=backend, proposer_options={"eagle3": {"head": str(new)}})
    assert drafts(swapped) == drafts(fresh) != first


@pytest.mark.parametrize("backend", BACKENDS)
def test_tenants_have_weights_of_their_own(folder: Path, backend: str) -> None:
    engine = engine_for(folder, backend=backend)
    plain = run_all(engine, Speculation(proposer=None), "sampled")
    base = head_of(engine)
    by_salt = PerSalt(base)
    engine.proposers["eagle3"] = by_salt
    ids = [
        engine.add(prompt, PARAMS["sampled"], speculation=EAGLE3, salt=str(number % 2))
        for number, prompt in enumerate(prompts())
    ]
    seeds = itertools.count(1)
    for number, _ in enumerate(engine.run(ids), 1):
        if number % 3 == 0:
            by_salt.take("0", other_weights(base, next(seeds)))
        if number == 7:
            by_salt.take("0", None)
    assert [[done.tokens for done in engine.collect(id).completions] for id in ids] == plain
    by_salt.take("0", other_weights(base, 99))

    def drafts(salt: str) -> list[list[int]]:
        id = engine.add(prompts()[3], PARAMS["greedy"], speculation=EAGLE3, salt=salt)
        found = [e.draft_tokens for report in engine.run([id]) for e in report.events]
        engine.collect(id)
        return found

    own, other = drafts("0"), drafts("1")
    assert own != other
    by_salt.take("0", None)
    assert drafts("0") == other


def test_only_trained_heads_take_weights(folder: Path) -> None:
    engine = engine_for(folder, backend="torch")
    with pytest.raises(ConfigError, match="ngram"):
        engine.replace_weights("ngram", {})
