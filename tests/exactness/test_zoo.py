"""What docs/reference/models.md says of every model type is what a tiny model of it does.

A sample; with OUTRIDER_ZOO=1 (`make zoo`) all types. `python -m zoo` records after a change.
"""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

import zoo
from outrider import native

RECORD: dict[str, dict[str, Any]] = json.loads(zoo.RECORD.read_text())
# One that transformers runs, twice in a layer; other tests have the own decoder. Two are refused.
SAMPLE = ("diffllama", "rwkv", "cpmant")
OWN_PATHS = ("native", "torch")


@pytest.mark.skipif(not native.available(), reason="the record has what the native step runs")
@pytest.mark.parametrize("model_type", zoo.TYPES if os.environ.get("OUTRIDER_ZOO") else SAMPLE)
def test_a_type_does_what_the_record_says(model_type: str) -> None:
    assert zoo.measure(model_type) == RECORD[model_type]


def test_no_type_is_wrong() -> None:
    missing = " ".join(sorted(set(zoo.TYPES) - set(RECORD)))
    assert not missing, f"PYTHONPATH=src:tests python -m zoo {missing}; make reference"
    for model_type, found in RECORD.items():
        assert "wrong" not in found, model_type
        assert "refused" in found or (found["exact"] and found["proposers"]), model_type


def test_most_types_run_on_the_own_decoder() -> None:
    own = [name for name, found in RECORD.items() if found.get("path") in OWN_PATHS]
    assert len(own) >= 45


def test_every_refusal_has_its_reason() -> None:
    reasons = (
        "recurrent state",
        "ignore the attention setting",
        "by an indexer",
        "needs its own attention mask",
        "asks for a mask that is not causal",
        "of its 3 layers",
    )
    for model_type, found in RECORD.items():
        if "refused" in found:
            assert any(reason in found["refused"] for reason in reasons), model_type
