"""What the serving benchmarks share: servers as processes, prompts, and a streaming client.

On a small machine the client is a load too: it reads bytes and parses them when all is over.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

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


@dataclass(slots=True)
class Answer:
    """One stream as its client saw it."""

    started_s: float
    arrivals_s: list[float]  # of every piece of the body
    text: str
    num_tokens: int

    @property
    def ttft_s(self) -> float:
        return self.arrivals_s[0] - self.started_s

    @property
    def tpot_s(self) -> float:
        """Time per token after the first."""
        return (self.arrivals_s[-1] - self.arrivals_s[0]) / max(self.num_tokens - 1, 1)


async def ask(url: str, body: dict[str, Any]) -> Answer:
    """Streams one completion; nothing is parsed before the last byte is there."""
    host, port = url.removeprefix("http://").split(":")
    content = json.dumps(body | {"stream": True, "stream_options": {"include_usage": True}})
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}:{port}\r\nConnection: close\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    started = time.perf_counter()
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write((head + content).encode())
    received, arrivals = b"", []
    try:
        while piece := await reader.read(1 << 16):
            received += piece
            if b"data: " in piece:
                arrivals.append(time.perf_counter())
    finally:
        writer.close()
    status, _, rest = received.partition(b"\r\n")
    if b" 200 " not in status:
        raise RuntimeError(f"{url} says {received[:400]!r}")
    chunks = [
        json.loads(line[6:])
        for line in rest.replace(b"\r\n", b"\n").split(b"\n")
        if line.startswith(b"data: {")
    ]
    text = "".join(chunk["choices"][0]["text"] for chunk in chunks if chunk["choices"])
    return Answer(started, arrivals, text, chunks[-1]["usage"]["completion_tokens"])


async def together(url: str, bodies: list[dict[str, Any]]) -> tuple[float, list[Answer]]:
    """All at once; how long that took, and every answer."""
    started = time.perf_counter()
    answers = await asyncio.gather(*(ask(url, body) for body in bodies))
    return max(answer.arrivals_s[-1] for answer in answers) - started, list(answers)


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
        "m.version = lambda name: vllm.__version__ if name == 'vllm' else f(name)\n"
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
    command = [*vllm_command(python), "serve", str(model), "--dtype", "float32"]
    command += ["--max-model-len", "1024", "--enforce-eager", *args]
    with _server(command, {"VLLM_CPU_KVCACHE_SPACE": "2"}) as found:
        yield found


@contextmanager
def _server(
    command: list[str], environment: dict[str, str]
) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    port = free_port()
    process = subprocess.Popen(
        [*command, "--port", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=os.environ | environment,
        start_new_session=True,
    )
    url = f"http://127.0.0.1:{port}"
    try:
        _wait_until_healthy(url, process)
        yield url, process
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
    """A server runs only inside the block: whoever is idle must not cost the others anything."""
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
