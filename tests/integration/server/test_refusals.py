"""What `outrider serve` refuses to do at all. Rows 21, 37 and 49 of the fault matrix."""

from __future__ import annotations

import json
import re
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from outrider.cli.app import app
from outrider.cli.errors import run
from outrider.model import load_model

Refused = Callable[..., str]


@pytest.fixture
def refused(
    folders: tuple[Path, Path],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> Refused:
    """Runs `outrider serve`, which must end by itself; returns its one line of complaint."""
    monkeypatch.setattr("outrider.server.logs.set_up", lambda form, level: None)
    monkeypatch.delenv("OUTRIDER_API_KEY", raising=False)

    def call(*args: str, model: Path = folders[0], code: int = 2) -> str:
        capfd.readouterr()
        found = run(app, ["serve", str(model), "--port", "0", "--threads", "1", *args])
        lines = capfd.readouterr().err.splitlines()
        complaints = [line for line in lines if not line.startswith("outrider: loading")]
        assert found == code
        assert len(complaints) == 1, lines
        return complaints[0]

    return call


@pytest.fixture
def copy(folders: tuple[Path, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(folders[0], tmp_path / "model"))


def edit(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_row_21_a_port_in_use(refused: Refused) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        line = refused("--port", str(taken.getsockname()[1]), code=1)
    assert "in use" in line


def test_row_37_models_that_need_their_own_code(refused: Refused, copy: Path) -> None:
    edit(copy, model_type="evil", auto_map={"AutoModelForCausalLM": "modeling_evil.Evil"})
    assert re.search("auto_map|code", refused(model=copy, code=1))


def test_row_37_code_beside_a_known_model_never_runs(copy: Path, tmp_path: Path) -> None:
    witness = tmp_path / "it ran"
    edit(copy, auto_map={"AutoModelForCausalLM": "modeling_evil.Evil"})
    (copy / "modeling_evil.py").write_text(f"open({str(witness)!r}, 'w')\nclass Evil: pass\n")
    load_model(copy)
    assert not witness.exists()


def test_row_37_pickles(refused: Refused, copy: Path) -> None:
    (copy / "model.safetensors").rename(copy / "pytorch_model.bin")
    assert "safetensors" in refused(model=copy, code=1)


def test_row_49_truncated_weights_are_named(refused: Refused, copy: Path) -> None:
    whole = (copy / "model.safetensors").read_bytes()
    (copy / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    assert re.search("truncated|incomplete|download", refused(model=copy, code=1))


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--host", "0.0.0.0"], "API key"),
        (["--host", "::"], "API key"),
        (["--host", "example.com"], "API key"),
        (["--log-format", "xml"], "Known: json, text"),
        (["--log-level", "loud"], "Known: debug, error, info, warning"),
        (["--num-draft-tokens", "many"], "a number or auto"),
        (["--paced", "0"], "paced"),
        (["--max-queue", "0"], "max_queue"),
        (["--queue-timeout", "nan"], "queue_timeout_s"),
        (["--proposers", "nrgam"], "Did you mean 'ngram'"),
        (["--api-key-file", "/nowhere"], "No such file"),
        (["--chat-template", "/nowhere"], "No such file"),
    ],
)
def test_mistakes_cost_one_line(refused: Refused, args: list[str], says: str) -> None:
    assert says in refused(*args)


def test_key_files_may_hold_several_keys_but_not_none(refused: Refused, tmp_path: Path) -> None:
    from outrider.options import read_keys

    file = tmp_path / "keys"
    file.write_text("first-key\n\n  second-key\n")
    assert read_keys(file) == ("first-key", "second-key")
    file.write_text("\n")
    assert "no key" in refused("--api-key-file", str(file))
    file.write_text("ключ", encoding="utf-8")
    assert "ASCII" in refused("--api-key-file", str(file))


def test_a_template_that_is_none_is_refused(refused: Refused, tmp_path: Path) -> None:
    file = tmp_path / "template"
    file.write_text("{% for message in messages %}")
    assert "cannot be compiled" in refused("--chat-template", str(file))
