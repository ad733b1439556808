"""One load on several backends: starts `outrider serve` with each; one table for all."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from outrider.bench.report import Result
from outrider.errors import ConfigError
from outrider.integrations.vllm.child import free_port

BACKENDS = ("native", "vllm")
LOADING_S = 600.0
POLL_S = 0.2


def bench_backends(
    names: Sequence[str],
    model: str,
    flags: Sequence[str],
    vllm_args: Sequence[str],
    bench: Callable[[str], Result],
) -> Result:
    """`bench(url)` on each backend, which also names its contender. Raises ConfigError."""
    if unknown := [name for name in names if name not in BACKENDS]:
        raise ConfigError(f"--backend is native, vllm or both, not {unknown[0]!r}")
    if vllm_args and "vllm" not in names:
        raise ConfigError("--vllm-arg needs --backend vllm")
    found: list[Result] = []
    for name in names:
        args = [model, "--backend", name, *flags]
        if name == "vllm":
            args += [f"--vllm-arg={arg}" for arg in vllm_args]
        with launched(args) as url:
            result = bench(url)
        for row in result.rows:
            row["contender"] = name if row["contender"] == "the server" else f"{name}, plain"
        found.append(result)
    first = found[0]
    rows = [row for result in found for row in result.rows]
    return replace(first, rows=rows, settings={**first.settings, "server": ", ".join(names)})


@contextmanager
def launched(args: Sequence[str]) -> Iterator[str]:
    """The address of a ready `outrider serve ARGS`; stops it afterwards."""
    port = free_port()
    command = [sys.executable, "-m", "outrider", "serve", *args, "--port", str(port)]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            [*command, "--log-level", "warning"], stdout=subprocess.DEVNULL, stderr=log
        )
        url = f"http://127.0.0.1:{port}"
        try:
            deadline = time.monotonic() + LOADING_S
            while not _answers(url):
                if process.poll() is not None or time.monotonic() > deadline:
                    log.seek(0)
                    last = (log.read().strip().splitlines() or ["it said nothing"])[-1]
                    raise ConfigError(
                        f"outrider serve {' '.join(args)} does not run: "
                        f"{last.removeprefix('outrider: ')}"
                    )
                time.sleep(POLL_S)
            yield url
        finally:
            process.terminate()
            process.wait()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5):
            return True
    except (OSError, urllib.error.URLError):
        return False
