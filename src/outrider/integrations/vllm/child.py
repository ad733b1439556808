"""The vLLM process: starts it in a process group, reads its log, ends it with all its workers."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import re
import shutil
import signal
import socket
import sys
from collections import deque
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from pathlib import Path

from outrider.errors import ConfigError

VARIABLE = "OUTRIDER_VLLM"
LAST_LINES = 200
_ERROR = re.compile(r"\b(\w*(?:Error|Exception)): (.+)|error: (.+)")
_PR_SET_PDEATHSIG = 1


def find_vllm() -> Path:
    """vLLM's executable: the one named in the environment, ours, or the shell's."""
    named = os.environ.get(VARIABLE)
    if named:
        found = shutil.which(named)
        if found is None:
            raise ConfigError(f"{VARIABLE} names {named}, which is no program")
        return Path(found)
    beside = Path(sys.executable).with_name("vllm")
    if beside.exists():
        return beside
    found = shutil.which("vllm")
    if found is None:
        raise ConfigError(
            "vLLM is not installed: pip install 'outrider[vllm]', "
            f"or name the vllm of another environment in {VARIABLE}"
        )
    return Path(found)


def free_port() -> int:
    """A free local port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Child:
    """One run of a program. `start`, then `wait`; `stop` at any time, any number of times."""

    def __init__(self, command: Seq[str], environment: Mapping[str, str] | None = None) -> None:
        self.command = list(command)
        self.environment = {**os.environ, **(environment or {})}
        self.process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._lines: deque[str] = deque(maxlen=LAST_LINES)

    async def start(self) -> None:
        self.process = await asyncio.create_subprocess_exec(
            *self.command,
            env=self.environment,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_die_with_parent if sys.platform == "linux" else None,
            limit=1 << 20,
        )
        self._reader = asyncio.create_task(self._read())

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.returncode is None

    async def wait(self) -> int:
        """The exit code; negative: the signal that ended it."""
        assert self.process is not None
        code = await self.process.wait()
        self._kill_group()  # workers that outlived it
        if self._reader is not None:
            await asyncio.wait({self._reader}, timeout=2)
        return code

    async def stop(self, grace_s: float = 10.0) -> None:
        """SIGTERM, then SIGKILL for the rest of the group."""
        if self.process is None:
            return
        if self.is_running:
            with contextlib.suppress(ProcessLookupError):
                self.process.terminate()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.process.wait(), grace_s)
        self._kill_group()
        await self.process.wait()

    def reason(self) -> str:
        """The last error that it printed, in one line."""
        for line in reversed(self._lines):
            found = _ERROR.search(line)
            if found:
                kind, text, plain = found.groups()
                return f"{kind}: {text}" if kind else plain
        return self._lines[-1] if self._lines else "it printed nothing"

    def _kill_group(self) -> None:
        assert self.process is not None
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)

    async def _read(self) -> None:
        """Forwards its log to ours."""
        assert self.process is not None
        assert self.process.stdout is not None
        while True:
            try:
                raw = await self.process.stdout.readline()
            except ValueError:  # a line that is too long is dropped
                continue
            if not raw:
                return
            line = raw.decode("utf-8", "replace").rstrip()
            if line:
                self._lines.append(line)
                print(line, file=sys.stderr, flush=True)


def _die_with_parent() -> None:
    """In the child, before the program: it ends, and frees its GPU, if its parent is killed."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
