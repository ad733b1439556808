"""`outrider theory` prints what the formulas say, and refuses what they cannot take."""

from __future__ import annotations

import json

import pytest
import typer
from typer.testing import CliRunner

from outrider.cli.theory import theory
from outrider.errors import ConfigError

APP = typer.Typer()
APP.command()(theory)


def run(*args: str) -> str:
    result = CliRunner().invoke(APP, list(args), catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


def test_table() -> None:
    text = run("--alpha", "0.7", "-k", "4", "--cost", "0.1")
    assert "2.773" in text
    assert "1.98x" in text
    assert "Best: K = 4" in text


def test_json_is_one_object_on_the_last_line() -> None:
    record = json.loads(
        run("--alpha", "0.4", "-k", "2", "--cost", "0.05", "--json").splitlines()[-1]
    )
    assert record["expected_tokens"] == pytest.approx(1.56)
    assert record["speedup"] == pytest.approx(1.56 / 1.1)
    assert record["best_num_draft_tokens"] == 2
    assert [row["num_draft_tokens"] for row in record["curve"]][:3] == [0, 1, 2]


def test_verification_may_cost_something() -> None:
    record = json.loads(run("-a", "0.8", "-k", "4", "-c", "0", "--verify-cost", "0.25", "--json"))
    assert record["cycle_cost"] == 2.0
    never = json.loads(run("-k", "3", "-c", "2", "--json"))
    assert never["break_even_alpha"] is None
    assert never["best_num_draft_tokens"] == 0


def test_claims() -> None:
    text = run("--claims")
    assert "1.667" in text
    assert "2.773" in text
    record = json.loads(run("--claims", "--json"))
    assert len(record["claims"]) == 10
    assert record["claims"][1]["numbers"]["tokens"] == pytest.approx(2.7731)


@pytest.mark.parametrize(
    "args",
    [
        ["--alpha", "1.5"],
        ["--alpha", "nan"],
        ["-k", "-1"],
        ["--cost", "-0.1"],
        ["--cost", "inf"],
        ["--verify-cost", "nan"],
    ],
)
def test_nonsense_is_refused_in_one_line(args: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        run(*args)
    assert "\n" not in str(caught.value)
