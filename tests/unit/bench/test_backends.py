"""`bench serve --backend`: our own servers, started, measured and ended."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from outrider.bench.backends import bench_backends, launched
from outrider.bench.report import Result
from outrider.cli.app import app
from outrider.cli.errors import run
from outrider.errors import ConfigError


def fake(url: str) -> Result:
    rows = [{"contender": "plain"}, {"contender": "the server"}]
    return Result("serve", "t", rows, ("contender",), "", {"server": url})


def test_rows_of_all_backends_share_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    class Launched:
        def __init__(self, args: list[str]) -> None:
            asked.append(list(args))

        def __enter__(self) -> str:
            return "http://x"

        def __exit__(self, *rest: object) -> None:
            pass

    monkeypatch.setattr("outrider.bench.backends.launched", Launched)
    found = bench_backends(["native", "vllm"], "m", ["-k", "2"], ["--enforce-eager"], fake)
    names = [row["contender"] for row in found.rows]
    assert names == ["native, plain", "native", "vllm, plain", "vllm"]
    assert asked == [
        ["m", "--backend", "native", "-k", "2"],
        ["m", "--backend", "vllm", "-k", "2", "--vllm-arg=--enforce-eager"],
    ]
    assert found.settings["server"] == "native, vllm"


def test_mistakes_cost_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("OUTRIDER_VLLM", str(tmp_path / "none"))
    for args, message in (
        (["m", "--backend", "sglang"], "native, vllm or both"),
        (["m", "--backend", "native", "--vllm-arg=-x"], "needs --backend vllm"),
        (["http://127.0.0.1:1", "--serve-arg=-k"], "need --backend"),
    ):
        assert run(app, ["bench", "serve", *args]) == 2
        err = capsys.readouterr().err.strip()
        assert message in err
        assert len(err.splitlines()) == 1


def test_a_server_that_does_not_start_says_why() -> None:
    with pytest.raises(ConfigError, match="no folder") as caught, launched(["no/such/folder"]):
        pass
    assert os.linesep not in str(caught.value)
