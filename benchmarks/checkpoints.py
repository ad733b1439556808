"""Quantised files: decoding, verifying, reading a prompt and loading, beside llama.cpp.

    python benchmarks/checkpoints.py --smollm2 SmolLM2-135M-Instruct.Q4_1.gguf \\
        --llama VENV/bin/python [--cases 8B:Q4_K_M,8B:Q4_0] [--folder FOLDER]

VENV holds llama-cpp-python, built from source for this machine. Both engines have all cores and
the same file, and take turns: in every round each computes the same passes, a few in a row, of
which the first is not counted. Ratios are medians over rounds. 1B and 8B are random blocks in the
shapes of Llama-3.2-1B and Llama-3.1-8B; `--families` are random blocks in the shapes of six
families of about 1B. The result file is named after the shapes, or after the case if there is one:
the larger ones take minutes, and may be run one by one. `of read bandwidth` is the share of what
the machine reads in the same time, in the same rounds: a token reads all weights, and the keys and
values of its context. `to 100th s` is the time from the start of loading to the 100th token.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import checkpoint_files
import numpy as np
import report

from outrider import native
from outrider.contracts import StepBatch
from outrider.model.native_decoder import NativeDecoder

CONTEXT, BLOCK, FIRST, TEXT = 512, 16, 16, 100
WIDTHS = (1, 5, 9, 17)
FAMILIES = (
    "Llama-3.2-1B",
    "Qwen2.5-1.5B",
    "Qwen3-1.7B",
    "Gemma-3-1B",
    "OLMo-2-1B",
    "StableLM-2-1.6B",
)
CASES = "135M:Q4_1,135M:Q8_0,1B:Q4_K_M,1B:Q8_0,1B:Q4_0"


def batch(num_new: int, context: int, logit_rows: range) -> StepBatch:
    def ints(values: Any) -> Any:
        return np.array(values, np.int32)

    return StepBatch(
        tokens_T=ints([5 + i % 50 for i in range(num_new)]),
        positions_T=ints(range(context, context + num_new)),
        starts_S1=ints([0, num_new]),
        context_S=ints([context]),
        tables_SW=ints([range(2 * CONTEXT // BLOCK + 2)]),
        logit_rows_R=ints(logit_rows),
    )


class Ours:
    def __init__(self, path: Path) -> None:
        started = time.perf_counter()
        self.model = NativeDecoder.load(path)
        self.model.allocate(2 * CONTEXT // BLOCK + 2, BLOCK)
        self.evaluate(FIRST, 0)
        self.load_s = time.perf_counter() - started
        self.text_s = self.load_s + decode(self)

    def evaluate(self, count: int, at: int) -> float:
        started = time.perf_counter()
        rows = range(count) if count <= 32 else range(count - 1, count)
        self.model.forward(batch(count, at, rows))
        return time.perf_counter() - started


class Theirs:
    def __init__(self, python: str, path: Path) -> None:
        worker = Path(__file__).with_name("checkpoints_llama.py")
        self._process = subprocess.Popen(
            [python, str(worker)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.version = json.loads(self._line())["version"]
        self.load_s = self._order({"load": str(path)})
        self.load_s += self.evaluate(FIRST, 0)
        self.text_s = self.load_s + decode(self)

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    def _order(self, order: dict[str, Any]) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return float(json.loads(self._line())["seconds"])

    def evaluate(self, count: int, at: int) -> float:
        return self._order({"eval": count, "at": at})

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def decode(who: Ours | Theirs) -> float:
    return sum(who.evaluate(1, FIRST + i) for i in range(TEXT - 1))


def measure(case: str, path: Path, rounds: int, python: str | None, prompts: int) -> dict[str, Any]:
    """The rows of one case: `decode`, `verify` and `prompt`."""
    path.read_bytes()[:0]  # into the page cache
    ours = Ours(path)
    theirs = Theirs(python, path) if python else None
    contenders: list[Ours | Theirs] = [ours, *([theirs] if theirs else [])]
    seconds: dict[tuple[str, int], list[float]] = {}

    def turn(count: int, at: int) -> None:
        for who in contenders:
            time.sleep(0.02)  # until the other engine's threads wait without spinning
            first = who.evaluate(count, at)
            again = max(1, min(8, int(0.05 / first)))
            found = sum(who.evaluate(count, at) for _ in range(again)) / again
            seconds.setdefault((type(who).__name__, count), []).append(found)

    for _ in range(prompts):
        turn(CONTEXT, 0)
    probe = np.ones(64 << 20, np.float32)
    bandwidth = []
    for _ in range(rounds):
        time.sleep(0.02)
        bandwidth.append(native.read_bandwidth(probe, repeats=2))
        for width in WIDTHS:
            turn(width, CONTEXT)
    if theirs:
        theirs.close()

    def ms(who: str, count: int) -> float:
        return median(seconds[who, count]) * 1e3

    def ratio(above: tuple[str, int], below: tuple[str, int]) -> float:
        return median(a / b for a, b in zip(seconds[above], seconds[below], strict=True))

    rows: dict[str, dict[str, Any]] = {
        key: {"case": case} for key in ("decode", "verify", "prompt")
    }
    size = ours.model.weight_bytes
    keys_values = CONTEXT * ours.model.spec.kv_bytes_per_token
    rows["decode"] |= {
        "file MB": path.stat().st_size / 1e6,
        "packed MB": size / 1e6,
        "K/V MB": keys_values / 1e6,
        "tokens/s": 1e3 / ms("Ours", 1),
        "of read bandwidth": (size + keys_values) / median(seconds["Ours", 1]) / median(bandwidth),
    }
    rows["prompt"] |= {
        f"{CONTEXT} tokens ms": ms("Ours", CONTEXT),
        "load to first s": ours.load_s,
        f"to {TEXT}th s": ours.text_s,
    }
    for width in WIDTHS[1:]:
        rows["verify"][f"verify({width})"] = ratio(("Ours", width), ("Ours", 1))
    if theirs:
        rows["decode"] |= {
            "llama.cpp tokens/s": 1e3 / ms("Theirs", 1),
            "ours / llama.cpp": ratio(("Theirs", 1), ("Ours", 1)),
        }
        rows["prompt"] |= {
            "llama.cpp ms": ms("Theirs", CONTEXT),
            "ours / llama.cpp": ratio(("Theirs", CONTEXT), ("Ours", CONTEXT)),
            "llama.cpp load to first s": theirs.load_s,
            f"llama.cpp to {TEXT}th s": theirs.text_s,
        }
        for width in WIDTHS[1:]:
            rows["verify"][f"llama.cpp verify({width})"] = ratio(("Theirs", width), ("Theirs", 1))
    return rows | {"version": theirs.version if theirs else ""}


def file_of(case: str, folder: Path, smollm2: Path) -> Path:
    shape, quantisation = case.split(":")
    if shape != "135M":
        shapes = checkpoint_files.SHAPES
        path = folder / f"{shape}-{quantisation}.gguf"
        return checkpoint_files.write(path, shapes[shape], quantisation, smollm2)
    if quantisation in smollm2.name:
        return smollm2
    return smollm2.with_name(smollm2.name.replace("Q4_1", quantisation))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--smollm2", type=Path, required=True)
    parser.add_argument("--llama", metavar="PYTHON")
    parser.add_argument("--cases", default=CASES)
    parser.add_argument("--families", action="store_true")
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--prompts", type=int, default=2, help="how often the prompt is read")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    report.add_out(parser)
    options = parser.parse_args()
    if options.families:
        options.cases = ",".join(f"{shape}:Q4_0" for shape in FAMILIES)
    found = []
    for case in options.cases.split(","):
        path = file_of(case, options.folder, options.smollm2)
        found.append(measure(case, path, options.rounds, options.llama, options.prompts))
    shapes = dict.fromkeys(case.split(":")[0] for case in options.cases.split(","))
    name = options.cases.replace(":", "-") if len(found) == 1 else "-".join(shapes)
    name = "families" if options.families else name
    report.write(
        f"checkpoints-{name}",
        "Quantised files",
        {
            f"Decoding at context {CONTEXT}": [rows["decode"] for rows in found],
            "Verifying M tokens, over decoding one": [rows["verify"] for rows in found],
            "Reading a prompt, loading": [rows["prompt"] for rows in found],
        },
        f"Instruction set {native.isa()}, {native.num_threads()} threads, one sequence. llama.cpp: "
        f"llama-cpp-python {found[0]['version']}, built for this machine.",
        folder=options.out,
    )


if __name__ == "__main__":
    main()
