"""The explanations quote numbers; these are the ones the code computes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from outrider.prove.biased import BIASED
from outrider.theory import claims

DOCS = Path(__file__).parents[3] / "docs" / "explanation"


def test_every_number_of_the_claims_is_quoted() -> None:
    text = (DOCS / "what-texts-get-wrong.md").read_text(encoding="utf-8")
    for claim in claims():
        for what, value in claim.numbers.items():
            quoted = re.escape(f"{value:.4g}")
            assert re.search(rf"(?<![\d.]){quoted}(?!\d)", text), (claim.claim, what, value)


@pytest.mark.parametrize("name", BIASED)
def test_every_measured_mistake_is_quoted(name: str) -> None:
    text = (DOCS / "exactness.md").read_text(encoding="utf-8")
    injection = BIASED[name]
    distance = float(injection.experiment().total_variation())
    assert f"| `{name}` | {injection.what} | {distance:.3f} |" in text
