"""Recognises the build of vLLM by its Python interpreter, without importing vLLM.

vLLM's CPU build runs its kernels in C++ unless Triton has a CPU backend, and two of them are wrong
(seen in 0.32; vLLM's issue 55005 was open then, so newer versions may still have the fault):

    expand_kernel   spreads temperature, top_k and top_p over the positions of drafts, but writes
                    into a copy, so that uninitialised memory is used instead. This concerns every
                    method that drafts, if a request of the batch samples.
    rms_norm        takes the first row of stacked weights for all: a DFlash head normalises the
                    context of all its layers as if it were the first layer's. This costs
                    acceptance, never correctness.
"""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path

from outrider.errors import ConfigError

PROBE = """
import json, os, sys
from importlib.metadata import version
found = version("vllm")
asked = os.environ.get("VLLM_TARGET_DEVICE") == "cpu"
try:
    from triton.backends import backends
except ImportError:
    backends = {}
is_cpu = asked or "cpu" in found or sys.platform == "darwin"
print(json.dumps({"version": found, "is_cpu": is_cpu, "has_triton": "cpu" in backends}))
"""
TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Build:
    version: str
    is_cpu: bool
    has_triton: bool  # for the CPU; on a GPU Triton is always there

    @property
    def has_cpu_kernels(self) -> bool:
        return self.is_cpu and not self.has_triton


def examine(program: Path) -> Build | None:
    """The build of vLLM's executable; None if its Python with vLLM is not found."""
    interpreter = _interpreter(program.resolve())
    if interpreter is None:
        return None
    try:
        ran = subprocess.run(
            [interpreter, "-c", PROBE],
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=True,
        )
        return Build(**json.loads(ran.stdout.splitlines()[-1]))
    except (OSError, subprocess.SubprocessError, ValueError, TypeError, IndexError):
        return None


def no_sampling(build: Build | None) -> str | None:
    """Why a vLLM that drafts may not sample; None: it may."""
    if build is None:
        return (
            "it is not known which build of vLLM this is, and its CPU build does not sample "
            "exactly while it drafts: ask for temperature 0, or serve with -k 0"
        )
    if build.has_cpu_kernels:
        return (
            f"vLLM {build.version} does not sample exactly while it drafts (its CPU kernels lose "
            "the temperatures of drafts): ask for temperature 0, or serve with -k 0"
        )
    return None


def refuse_rule(build: Build | None, verifier: str | None) -> None:
    """ConfigError for a rule that the build cannot run."""
    if verifier == "block" and build is not None and build.has_cpu_kernels:
        raise ConfigError("vLLM's CPU build has no block rule: use --verifier token")


def _interpreter(program: Path) -> Path | None:
    """The interpreter in the program's first line, or the one beside the program."""
    try:
        with program.open("rb") as file:
            line = file.readline(4096).decode("utf-8", "replace")
    except OSError:
        return None
    named = Path(line.removeprefix("#!").strip())
    if line.startswith("#!") and "python" in named.name and named.exists():
        return named
    beside = program.with_name("python")
    return beside if beside.exists() else None
