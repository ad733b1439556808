"""Settings every test shares."""

from __future__ import annotations

import os
import tempfile
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

from outrider import native

# Timings vary on shared machines: a slow example is no failure. The suite tries the same examples
# every time, so that it judges the change at hand; `make explore` tries others.
settings.register_profile(
    "outrider",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    print_blob=True,
    derandomize="OUTRIDER_EXPLORE" not in os.environ,
)
settings.load_profile("outrider")
_cache = tempfile.TemporaryDirectory(prefix="outrider-tests-")
os.environ["OUTRIDER_CACHE"] = _cache.name  # not the user's
os.environ["OUTRIDER_STRICT"] = "1"  # a fault of a fast executor raises
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is first imported
torch.set_num_threads(1)  # the tensors of the tests are tiny
if "PYTEST_XDIST_WORKER" in os.environ:  # as many processes as cores already
    native.set_threads(1)


def pytest_sessionfinish(session: pytest.Session) -> None:
    from exactness.same_tokens import TALLY

    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["same tokens"] = dict(TALLY)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    from exactness.same_tokens import TALLY

    TALLY.update(getattr(node, "workeroutput", {}).get("same tokens", {}))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    from exactness.same_tokens import TALLY

    if TALLY:
        terminalreporter.write_line(
            f"same tokens: {TALLY['compared']} outputs compared with plain decoding, "
            f"{TALLY['excused']} differences excused as near-ties"
        )
