"""The same seeds give the tokens that were recorded, whatever drafts, verifies and computes."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from golden import pairs
from golden.pairs import COUPLED, DRAFTERS, Drafter, Family, generate
from golden.record import read
from native_models import needs_native
from outrider import LLM, Speculation
from outrider.registry import proposer_names

GOLDEN = read("tokens")
PLAIN = GOLDEN["plain"]
GUESS = pairs.prediction(PLAIN["T=1"])
CASES = [
    pytest.param(d, id=d.label, marks=[needs_native] if d.proposer == "quantized" else [])
    for d in DRAFTERS
]
ENGINES: dict[tuple[str, str], LLM] = {}


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Family]:
    yield pairs.write_family(tmp_path_factory.mktemp("golden"))
    ENGINES.clear()


@pytest.fixture(params=["torch", pytest.param("native", marks=needs_native)])
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(autouse=True)
def no_drafter_fails(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """A failing drafter costs speed only, so that nothing else here would notice."""
    yield
    assert not [r for r in caplog.get_records("call") if r.levelno >= logging.WARNING]


def engine(family: Family, name: str, backend: str) -> LLM:
    if (name, backend) not in ENGINES:
        ENGINES[name, backend] = pairs.load(family, name, backend)
    return ENGINES[name, backend]


def test_every_proposer_of_ours_is_recorded() -> None:
    assert {d.proposer for d in DRAFTERS} <= set(proposer_names())
    assert len({d.proposer for d in DRAFTERS}) == 14
    assert set(GOLDEN) == {"plain", *(d.label for d in DRAFTERS)}


def test_plain_decoding(family: Family, backend: str) -> None:
    llm = engine(family, "trees", backend)
    for name, params in COUPLED.items():
        assert generate(llm, pairs.prompts(), params) == PLAIN[name], name
        alone = [tokens for p in pairs.prompts() for tokens in generate(llm, [p], params)]
        assert alone == PLAIN[name], f"{name}, one prompt at a time"


@pytest.mark.parametrize("drafter", CASES)
def test_coupled_drafts_change_nothing(family: Family, drafter: Drafter, backend: str) -> None:
    llm = engine(family, drafter.engine, backend)
    how = drafter.speculation()
    for name, params in COUPLED.items():
        assert generate(llm, pairs.prompts(), params, how, GUESS) == PLAIN[name], name
    (alone,) = generate(llm, pairs.prompts()[:1], COUPLED["T=1"], how, GUESS)
    assert alone == PLAIN["T=1"][0]


@pytest.mark.parametrize("drafter", CASES)
def test_ratio_rules(family: Family, drafter: Drafter, backend: str) -> None:
    """Which rules are exact with the drafter is recorded, too."""
    assert (
        pairs.ratio(engine(family, drafter.engine, backend), drafter, GUESS)
        == (GOLDEN[drafter.label])
    )


@pytest.mark.parametrize("proposer", ["draft-model", "hybrid", "ngram"])
def test_a_k_chosen_by_the_controller_changes_nothing(
    family: Family, proposer: str, backend: str
) -> None:
    llm = engine(family, "trees", backend)
    how = Speculation(proposer=proposer, num_draft_tokens="auto")
    for name, params in COUPLED.items():
        assert generate(llm, pairs.prompts(), params, how) == PLAIN[name], name


def test_bundled_models() -> None:
    """On the fastest backend only: the torch decoder takes ten seconds."""
    llm, params, golden = pairs.load_bundled("auto"), COUPLED["T=0.7"], read("bundled")
    assert generate(llm, pairs.BUNDLED_PROMPTS, params) == golden["plain"]
    for drafter, rule in pairs.BUNDLED:
        for verifier, name in ((rule, f"{drafter.label} {rule}"), ("coupled", "plain")):
            how = drafter.speculation(verifier)
            assert generate(llm, pairs.BUNDLED_PROMPTS, params, how) == golden[name], (
                f"{drafter.label}, {verifier}"
            )
