"""`outrider --version`: the version, the kernels in use and the optional parts installed."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from outrider import __version__

# extra -> the modules it brings
OPTIONAL_PARTS = {
    "server": ("fastapi", "uvicorn", "httptools", "prometheus_client"),
    "plots": ("matplotlib",),
    "grammar": ("llguidance",),
    "otel": ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http"),
    "vllm": ("vllm",),
}


def version_text() -> str:
    present = [name for name, modules in OPTIONAL_PARTS.items() if all(map(_is_there, modules))]
    absent = [name for name in OPTIONAL_PARTS if name not in present]
    lines = [
        f"outrider {__version__}",
        f"python   {platform.python_version()}, torch {_version_of('torch')}, "
        f"transformers {_version_of('transformers')}",
        f"kernels  {_kernels()}",
        f"optional {', '.join(present) or 'none'} installed",
    ]
    if absent:
        lines[-1] += f"; not installed: {', '.join(absent)} (pip install 'outrider[NAME]')"
    return "\n".join(lines)


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # its parent package is missing
        return False


def _version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "(not installed)"


def _kernels() -> str:
    from outrider import native

    on_cpu = (
        f"native ({native.isa()}, {native.num_threads()} threads)"
        if native.available()
        else f"torch ({native.why_unavailable()})"
    )
    triton = "triton" if _is_there("triton") else "none: a CUDA build of torch brings triton"
    return f"{on_cpu}; on a GPU {triton}"
