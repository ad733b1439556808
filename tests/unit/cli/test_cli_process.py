"""What only a real process can show: speed of the help, signals and pipes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from .calling import Command

OUTRIDER = [sys.executable, "-m", "outrider"]


def test_help_names_every_command(command: Command) -> None:
    ran = command("--help")
    assert ran.code == 0
    for name in ("demo", "generate", "theory"):
        assert name in ran.out
    assert command().out == ran.out  # no arguments: the same help


@pytest.mark.parametrize("name", ["demo", "generate", "theory"])
def test_help_of_a_command(command: Command, name: str) -> None:
    ran = command(name, "--help")
    assert ran.code == 0
    assert "Example" in ran.out
    assert ran.out.count("╭") > 1 or name == "theory"  # options are grouped


def test_version(command: Command) -> None:
    ran = command("--version")
    assert ran.code == 0
    for word in ("outrider", "torch", "kernels", "optional", "plots"):
        assert word in ran.out


@pytest.mark.parametrize("args", [["--help"], ["theory"], ["generate", "--help"]])
def test_quick_answers_do_not_load_torch(args: list[str]) -> None:
    script = (
        "import sys; from outrider.cli.app import app; from outrider.cli.errors import run; "
        f"run(app, {args}); sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_reader_that_leaves(pair: list[str]) -> None:
    args = [*OUTRIDER, "generate", *pair, "-p", "hello", "-m", "80", "--ignore-eos"]
    with subprocess.Popen(args, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        error = process.stderr.read()
        assert process.wait(60) == 141
    assert error == b""


# Each step takes so long that an interrupt finds the command at work, however fast the machine.
# What a shell runs in the background ignores interrupts, and so would its grandchildren.
SLOW = """
import signal, time
signal.signal(signal.SIGINT, signal.default_int_handler)
from outrider.engine.engine import Engine
step = Engine.step
def slow(self):
    time.sleep(0.2)
    return step(self)
Engine.step = slow
from outrider.cli import main
main()
"""


def test_an_interrupt_ends_quietly(pair: list[str]) -> None:
    args = [sys.executable, "-c", SLOW, "generate", *pair, "-k", "0"]
    args += ["-p", "hello", "-m", "80", "--ignore-eos"]
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        args, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        first = process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=60)
    assert process.returncode == 130
    assert first
    assert "Traceback" not in error
