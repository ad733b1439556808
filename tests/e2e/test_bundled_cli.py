"""The command a newcomer types first, in a process of its own, on the models that ship with us."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

PROMPT = 'def count_words(path):\n    """Return how often each word occurs in the file."""\n'


def outrider(*args: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "outrider", *args], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done


def record(*args: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(outrider(*args, "--json").stdout.splitlines()[-1])
    return found


def test_demo() -> None:
    result = record("demo", "--max-tokens", "48", "-k", "4")  # auto is for the machine to say
    assert result["identical"] is True
    assert result["speedup"] > 0
    assert result["acceptance_length"] > 1.5  # the draft was trained for this target
    assert {r["temperature"] for r in result["rounds"]} == {0.0, 0.7}
    assert all(r["num_tokens"] > 16 for r in result["rounds"])


@pytest.mark.parametrize("temperature", ["0", "0.8"])
def test_same_tokens_from_every_proposer(temperature: str) -> None:
    args = ["generate", "-p", PROMPT, "-m", "64", "-t", temperature, "--seed", "11"]
    plain = record(*args, "-k", "0")
    assert plain["tokens_per_pass"] == 1
    drafted = record(*args, "-k", "5")
    assert drafted["tokens"] == plain["tokens"]
    assert drafted["tokens_per_pass"] > 1.2
    assert record(*args, "--proposer", "ngram")["tokens"] == plain["tokens"]
    guided = record(*args, "--prediction", plain["text"], "-k", "5")
    assert guided["tokens"] == plain["tokens"]
    assert guided["acceptance_rate"] > 0.5


def test_trace() -> None:
    out = outrider("generate", "-p", PROMPT, "-m", "40", "-k", "4", "--trace").stdout
    for piece in ("✓", "✗", "→", "⏎", "draft-model", "of all drafts"):
        assert piece in out
