"""One provenance file per run: command, data, versions and results."""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from outrider.train.trainer import Report


def environment() -> dict[str, str]:
    """Versions and machine that can change a result."""
    import transformers

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "device": device,
        "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def write_provenance(
    path: Path, *, report: Report, results: dict[str, Any], data: dict[str, Any]
) -> None:
    """Write atomically: command, versions, data hashes, results and the learning curve."""
    record = {
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "environment": environment(),
        "data": data,
        "results": results,
        "run": asdict(report),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(record, indent=1) + "\n")
    os.replace(partial, path)
