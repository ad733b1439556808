"""The fault matrix: what can go wrong with a server, and the test that makes it happen.

After every row the process lives, /health says 200, nothing runs or waits, no KV block is in use
and a fixed greedy question has the answer it had before (`Live.check`, run by the fixtures).
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SERVER = "tests/integration/server"
DISCONNECTS = f"{SERVER}/test_disconnects.py"
OVERLOAD = f"{SERVER}/test_overload.py"
FAULTS = f"{SERVER}/test_engine_faults.py"
PROCESS = f"{SERVER}/test_process.py"
REFUSALS = f"{SERVER}/test_refusals.py"
EXACTNESS = f"{SERVER}/test_served_exactness.py"
BAD_INPUT = f"{SERVER}/test_bad_input.py"
TENANTS = f"{SERVER}/test_tenants.py"
TOOLS = f"{SERVER}/test_tools.py"
MODELS = f"{SERVER}/test_models.py"
LIVE_PAGE = "tests/e2e/test_live_page.py"

# row: (what happens, where its tests are, how their names begin)
MATRIX = {
    1: ("close mid-stream: aborted with the step under way", DISCONNECTS, "test_row_1_"),
    2: ("close a whole reply", DISCONNECTS, "test_row_2_"),
    3: ("200 cancels, then an answer", DISCONNECTS, "test_row_3_"),
    4: ("close while queued: never prefilled", DISCONNECTS, "test_row_4_"),
    5: ("slow reader: bounded buffer", DISCONNECTS, "test_row_5_"),
    6: ("queue full: 503 + Retry-After", OVERLOAD, "test_rows_6_and_7_"),
    7: ("queue time-out", OVERLOAD, "test_rows_6_and_7_"),
    8: ("KV exhausted: preempted, same tokens", OVERLOAD, "test_row_8_"),
    9: ("KV exhausted in verify: rejected slots freed", OVERLOAD, "test_row_9_"),
    10: ("prompt too long: 400 context_length_exceeded", OVERLOAD, "test_row_10_"),
    11: ("draft crosses the context: clipped, length", OVERLOAD, "test_row_11_"),
    12: ("out of memory in verify: again at K=0, else that request 503", FAULTS, "test_row_12_"),
    13: ("drafter raises: falls back, identical output", FAULTS, "test_row_13_"),
    14: ("target raises: every request an error, non-zero exit", PROCESS, "test_row_14_"),
    15: ("NaN logits: that request 500, neighbours unchanged", FAULTS, "test_row_15_"),
    16: ("engine hangs: watchdog fails /health", FAULTS, "test_row_16_"),
    17: ("SIGTERM with drain: in-flight finish, new 503, exit 0", PROCESS, "test_row_17_"),
    18: ("SIGTERM without: exit < 5 s, no orphans", PROCESS, "test_row_18_"),
    19: ("SIGINT while loading", PROCESS, "test_rows_19_and_20_"),
    20: ("not ready: 503", PROCESS, "test_rows_19_and_20_"),
    21: ("port in use: one line, exit 1", REFUSALS, "test_row_21_"),
    22: ("greedy losslessness over proposers", EXACTNESS, "test_row_22_"),
    23: ("sampled losslessness (chi squared)", EXACTNESS, "test_row_23_"),
    24: ("same seed alone and in a batch", EXACTNESS, "test_row_24_"),
    25: ("proposer x parameter: 200 or 400, never 5xx", EXACTNESS, "test_row_25_"),
    26: ("ids in range", EXACTNESS, "test_row_26_"),
    27: ("all drafts banned: still ends", EXACTNESS, "test_row_27_"),
    28: ("stop string across an accepted span", EXACTNESS, "test_row_28_"),
    29: ("UTF-8 over chunks", EXACTNESS, "test_row_29_"),
    30: ("n=10^9, 10^5 prompts, 10^4 stops: 400 at once", BAD_INPUT, "test_row_30_"),
    31: ("NaN, Inf, -1, 2^63, bool as int: 400 with param", BAD_INPUT, "test_row_31_"),
    32: ("1 MB header, 100 MB body, slow body", BAD_INPUT, "test_row_32_"),
    33: ("deep JSON, NUL, wrong content type", BAD_INPUT, "test_row_33_"),
    34: ("schemathesis with negative data: no 5xx", f"{SERVER}/test_fuzz.py", "test_row_34_"),
    35: ("(a+)+$ and recursive schemas", f"{SERVER}/test_structured.py", "test_row_35_"),
    36: ("template injection", BAD_INPUT, "test_row_36_"),
    37: ("auto_map or pickled model refused", REFUSALS, "test_row_37_"),
    38: ("odd Host header without a key: 401", BAD_INPUT, "test_row_38_"),
    39: ("error bodies leak nothing", BAD_INPUT, "test_row_39_"),
    40: ("image_url: 400, no connection", BAD_INPUT, "test_row_40_"),
    41: ("prefix cache across keys", TENANTS, "test_row_41_"),
    42: ("shared suffix store across keys", TENANTS, "test_row_42_"),
    43: ("pad: sizes in buckets", TENANTS, "test_row_43_"),
    44: ("paced: same sizes for 0 % and 100 % acceptance", TENANTS, "test_row_44_"),
    45: ("live page only for the own key", LIVE_PAGE, "test_row_45_"),
    46: ("model text with markup is inert", LIVE_PAGE, "test_row_46_"),
    47: (
        "acceptance collapse: at least 0.97 of plain speed",
        "tests/unit/policy/test_controller.py",
        "test_a_junk_drafter_costs_at_most_three_percent",
    ),
    48: ("soak, 10 % cancels: memory and files flat", f"{SERVER}/test_matrix.py", "test_row_48_"),
    49: ("truncated safetensors: clear message", REFUSALS, "test_row_49_"),
    50: (
        "kill -9 while training: resumes from the last whole checkpoint",
        "tests/e2e/test_train.py",
        "test_a_killed_run_resumes_to_the_same_curve",
    ),
    51: ("an Ollama client hangs up", DISCONNECTS, "test_row_51_"),
    52: ("tool schemas that are bombs, recursive $ref", TOOLS, "test_schemas_that_are_bombs_"),
    53: ("10,000 tools, names that are none: 400", TOOLS, "test_what_cannot_be_is_refused"),
    54: ("unknown roles: 200 or 400", TOOLS, "test_row_54_"),
    55: ("a flood of stored responses", f"{SERVER}/test_dialects.py", "test_a_flood_of_responses_"),
    56: ("models switch under load", MODELS, "test_models_switch_under_load"),
    57: ("no unload while streaming", MODELS, "test_idle_models_are_unloaded_but_not_"),
}


def test_every_row_has_its_test() -> None:
    assert list(MATRIX) == list(range(1, 58))
    names = {
        path: {
            node.name
            for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8")))
            if isinstance(node, ast.FunctionDef)
        }
        for _, path, _ in MATRIX.values()
    }
    missing = [
        row
        for row, (_, path, beginning) in MATRIX.items()
        if not any(name.startswith(beginning) for name in names[path])
    ]
    assert not missing


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
def test_row_48_a_short_soak(folders: tuple[Path, Path]) -> None:
    """`make soak` is the long one: 20 minutes, on the bundled family."""
    command = [sys.executable, str(ROOT / "benchmarks/soak.py"), "--seconds", "10"]
    command += ["--model", str(folders[0]), "--", "--proposer", "ngram", "--threads", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stdout + done.stderr
