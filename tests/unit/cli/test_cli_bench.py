"""`outrider bench`, `doctor` and `plot` on a tiny pair: what they print, write and refuse."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from outrider.doctor import curves
from outrider.plots.pictures import PICTURES, crossover

from .calling import Command

TINY = ["-n", "2", "-m", "12", "-r", "2"]


@pytest.fixture(scope="session")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("prompts") / "own.txt"
    file.write_text("the quick brown fox\njumps over the lazy dog\n")
    return file


def test_decode_writes_what_it_prints(
    command: Command, pair: list[str], prompts: Path, tmp_path: Path
) -> None:
    out = tmp_path / "result"
    options = ["-w", str(prompts), "-k", "2,auto", *TINY, "-o", str(out), "--json"]
    ran = command("bench", "decode", *pair, *options)
    assert ran.code == 0, ran
    assert ran.record == json.loads(out.with_suffix(".json").read_text()) | {
        "provenance": ran.record["provenance"]
    }
    names = [row["contender"] for row in ran.record["rows"]]
    assert names == ["plain", "draft-model K=2", "draft-model K=auto"]
    assert [row["identical"] for row in ran.record["rows"]] == ["-", "4/4", "4/4"]
    assert "draft-model K=auto" in out.with_suffix(".md").read_text()


@pytest.mark.parametrize(
    ("axis", "options"),
    [
        ("k", ["-k", "1,2"]),
        ("batch", ["--values", "1,2", "-k", "2"]),
        ("context", ["--values", "8,16", "-k", "2"]),
        ("temperature", ["--values", "0,1", "-k", "2"]),
    ],
)
def test_sweeps_and_their_pictures(
    command: Command,
    pair: list[str],
    prompts: Path,
    tmp_path: Path,
    axis: str,
    options: list[str],
) -> None:
    out = tmp_path / "sweep"
    ran = command(
        "bench", "sweep", *pair, "--axis", axis, *options, "-w", str(prompts), *TINY, "-o", str(out)
    )
    assert ran.code == 0, ran
    record = json.loads(out.with_suffix(".json").read_text())
    assert record["kind"] == f"sweep-{axis}"
    drafting = [row for row in record["rows"] if row["contender"] != "plain"]
    assert len(drafting) == 2
    assert ("efficiency" in drafting[0]) == (axis == "k")
    drawn = command("plot", str(out.with_suffix(".json")), "--out", str(tmp_path))
    assert drawn.code == 0, drawn
    pictures = [Path(line) for line in drawn.out.split()]
    assert len(pictures) == 2 * len(PICTURES[f"sweep-{axis}"])
    for picture in pictures:
        if picture.suffix == ".svg":
            ElementTree.parse(picture)
        else:
            assert picture.read_bytes().startswith(b"\x89PNG")


def test_refusals(command: Command, pair: list[str], tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    other.write_text("{}")
    for args, words in [
        (["bench", "decode", *pair, "-w", "cod"], ["Did you mean 'code'?"]),
        (["bench", "decode", *pair, "-k", "x"], ["'x'"]),
        (["bench", "decode", *pair, "-r", "0"], ["--repeats"]),
        (["bench", "sweep", *pair, "--axis", "size"], ["--axis"]),
        (["bench", "sweep", *pair, "--axis", "batch", "--values", "0"], ["out of range"]),
        (["bench", "serve", "http://127.0.0.1:9"], ["no OpenAI-compatible server"]),
        (["bench", "serve", "nowhere://x"], ["http://HOST:PORT"]),
        (["plot", str(other)], ["no result of outrider bench"]),
        (["plot", str(tmp_path / "none.json")], ["No such file"]),
        (["plot", str(other), "--formats", "pdf"], ["png, svg"]),
        (["doctor", *pair, "--plot", "x.pdf"], [".png or an .svg"]),
    ]:
        ran = command(*args)
        assert (ran.code, ran.out) == (2, ""), ran
        assert ran.err.count("\n") == 1
        assert all(word in ran.err for word in words), ran


def test_where_a_curve_crosses() -> None:
    assert crossover([1, 2, 4], [2.0, 1.5, 1.1]) is None
    assert crossover([1, 4], [1.5, 0.5]) == pytest.approx(2.0)
    assert crossover([1, 2], [0.9, 0.8]) == 1.0


def test_the_doctor_measures_and_advises(
    command: Command,
    pair: list[str],
    prompts: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(curves, "ROUNDS", 2)
    monkeypatch.setattr(curves, "TIMED_TOKENS", 16)
    monkeypatch.setattr(curves, "SURVIVAL_TOKENS", 32)
    monkeypatch.setattr(curves, "BUDGET_S", 1e4)
    picture = tmp_path / "curves.svg"
    ran = command(
        "doctor", *pair, "--prompts", str(prompts), "--check", "--plot", str(picture), "--json"
    )
    assert ran.code == 0, ran
    record = ran.record
    assert {f["what"] for f in record["findings"]} >= {"kernels", "tokenizers", "positions"}
    assert all(f["state"] != "problem" for f in record["findings"])
    assert set(record["acceptance"]) == {"draft-model", "ngram"}
    assert set(record["reading_s"]) == {"draft-model", "ngram"}
    assert record["reading_s"]["draft-model"]  # what plan prices a prompt with
    assert {"1", "16"} <= set(record["passes_s"])
    for entry in record["advice"]:
        measured = entry["measured_speedup"]
        assert (measured is None) == (entry["proposer"] is None)
    assert record["helps"] == any(entry["proposer"] for entry in record["advice"])
    ElementTree.parse(picture)
    assert "will not help" in ran.err or "is expected" in ran.err


def test_the_doctor_of_a_slow_model_measures_less(
    command: Command, pair: list[str], prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(curves, "SURVIVAL_TOKENS", 32)
    monkeypatch.setattr(curves, "BUDGET_S", 1e-3)
    ran = command("doctor", *pair, "--prompts", str(prompts), "--json")
    assert ran.code == 0, ran
    assert set(ran.record["passes_s"]) == {"1"}
    assert [entry["batch"] for entry in ran.record["advice"]] == [1, 2]
    assert set(ran.record["acceptance"]) == {"draft-model", "ngram"}
    assert "will not help" in ran.err or "is expected" in ran.err


def test_the_doctor_names_a_drafter_that_does_not_fit(
    command: Command, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from outrider.testing import write_tiny_llama

    monkeypatch.setattr(curves, "ROUNDS", 1)
    monkeypatch.setattr(curves, "TIMED_TOKENS", 8)
    monkeypatch.setattr(curves, "SURVIVAL_TOKENS", 16)
    other = write_tiny_llama(tmp_path / "other", vocab_size=64)
    ran = command("doctor", str(target), "--draft-model", str(other))
    assert ran.code == 1, ran
    assert "problem" in ran.out
    assert "do not share a vocabulary" in " ".join(ran.out.split())
