"""What the doctor says of a folder with heads: what it is, whether it fits, whose it is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from outrider.doctor.checks import Finding, examine
from outrider.engine.build import EngineConfig, build
from outrider.engine.engine import Engine
from outrider.testing import write_tiny_llama
from published import CASES, TARGET, mtp


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    folder = write_tiny_llama(tmp_path_factory.mktemp("target") / "Verifier", **TARGET)
    return build(EngineConfig(model=str(folder), num_draft_tokens=0, kv_tokens=256))


def findings(engine: Engine, folder: Path) -> list[Finding]:
    found = examine(engine, str(folder), device="cpu", dtype="auto")
    return [finding for finding in found if finding.what == "drafter"]


def assert_says(text: str, pattern: str) -> None:
    assert re.search(pattern, text), text
    assert "\n" not in text


SAID = {
    "speculators_two_layers": "eagle3 heads that fit, .* read layers 1, 4, 7, draft 24 of 64 ids, "
    "draft 5 tokens a step, trained for owner/verifier",
    "safeailab": "eagle3 heads that fit",
    "eagle1_with_bias": "eagle heads that fit, .* read layer 8",
    "medusa_authors": "medusa heads that fit, .* draft 4 tokens a step, trained for owner/base",
    "mlp_ibm": "mlp heads that fit, .* read layer 8",
    "dflash_zlab": "dflash heads that fit",
}


@pytest.mark.parametrize("name", SAID)
def test_one_line_says_what_it_is(name: str, engine: Engine, tmp_path: Path) -> None:
    CASES[name][1](tmp_path)
    (found,) = findings(engine, tmp_path)
    assert found.state == ("note" if "owner/base" in SAID[name] else "ok")
    assert_says(found.text, SAID[name])


def test_a_layer_for_multi_token_prediction(engine: Engine, tmp_path: Path) -> None:
    _, apart, _ = mtp.write("speculators", tmp_path)
    assert apart is not None
    (found,) = findings(engine, apart)
    assert_says(found.text, "an MTP layer, reads layer 8, trained for owner/verifier")


def test_heads_of_another_target_are_a_problem(tmp_path: Path) -> None:
    CASES["safeailab"][1](tmp_path / "head")
    other = write_tiny_llama(tmp_path / "other", hidden_size=48, num_layers=8)
    engine = build(EngineConfig(model=str(other), num_draft_tokens=0))
    (found,) = findings(engine, tmp_path / "head")
    assert found.state == "problem"
    assert_says(found.text, "made for a target of width 32 with 64 ids; other has 48 and 64")
