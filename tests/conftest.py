"""Settings every test shares."""

from __future__ import annotations

import os
import tempfile

import pytest
import torch
from hypothesis import HealthCheck, settings

# Timings vary on shared machines: a slow example is no failure.
settings.register_profile(
    "outrider", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("outrider")
_cache = tempfile.TemporaryDirectory(prefix="outrider-tests-")
os.environ["OUTRIDER_CACHE"] = _cache.name  # not the user's
torch.set_num_threads(1)  # the tensors of the tests are tiny


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    from exactness.same_tokens import TALLY

    if TALLY:
        terminalreporter.write_line(
            f"same tokens: {TALLY['compared']} outputs compared with plain decoding, "
            f"{TALLY['excused']} differences excused as near-ties"
        )
