"""`outrider train` as a user runs it: killed and resumed, and telling mistakes in one line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tiny_training import TEXT, write_trained_target

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("train")
    write_trained_target(folder / "target", num_steps=20)
    (folder / "text.txt").write_text(TEXT)
    return folder


def command(folder: Path, out: str, *more: str) -> list[str]:
    return [
        *(sys.executable, "-m", "outrider", "train", "draft", str(folder / "text.txt")),
        *("--target", str(folder / "target"), "--out", str(folder / out), "--steps", "60"),
        *("--length", "32", "--batch", "2", "--json", *more),
    ]


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}


# Dies in the middle of writing its sixth checkpoint, as if killed there.
DIES = """
import os, signal, torch
save, saved = torch.save, []
def half(state, stream):
    saved.append(stream)
    if len(saved) == 6:
        stream.write(b"half a checkpoint")
        stream.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    save(state, stream)
torch.save = half
from outrider.cli import main
main()
"""


def curve(folder: Path, out: str) -> list[float]:
    record = json.loads((folder / out / "provenance.json").read_text())
    return [row["loss"] for row in record["run"]["curve"]]


@pytest.mark.slow
def test_a_killed_run_resumes_to_the_same_curve(folder: Path) -> None:
    whole = subprocess.run(
        command(folder, "whole"), env=environment(), capture_output=True, text=True, timeout=300
    )
    assert whole.returncode == 0, whole.stderr
    words = command(folder, "killed", "--checkpoint-every", "0")
    assert words[1:3] == ["-m", "outrider"]
    victim = subprocess.run(
        [words[0], "-c", DIES, *words[3:]], env=environment(), capture_output=True, timeout=300
    )
    assert victim.returncode == -signal.SIGKILL, victim.stderr
    assert (folder / "killed" / "checkpoint.pt").exists()
    assert not (folder / "killed" / "provenance.json").exists()
    again = subprocess.run(
        command(folder, "killed"), env=environment(), capture_output=True, text=True, timeout=300
    )
    assert again.returncode == 0, again.stderr
    assert curve(folder, "killed") == curve(folder, "whole")
    outcome = json.loads(again.stdout.splitlines()[-1])
    assert outcome["after"]["alpha"] > outcome["before"]["alpha"]


def test_a_mistake_costs_one_line(folder: Path) -> None:
    done = subprocess.run(
        command(folder, "none", "--loss", "kl"),
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 2
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1
    assert "unknown loss 'kl'" in lines[0]


@pytest.mark.slow
def test_two_processes_train_one_drafter(folder: Path) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    words = command(folder, "shared", "--steps", "6")
    done = subprocess.run(
        [*launcher, "--nproc-per-node", "2", *words[1:]],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    alone = subprocess.run(
        command(folder, "alone", "--steps", "6"),
        env=environment(),
        capture_output=True,
        timeout=300,
    )
    assert alone.returncode == 0
    assert curve(folder, "shared") == pytest.approx(curve(folder, "alone"), abs=1e-3)
