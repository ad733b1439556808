"""The bundled target with its EAGLE-3 head on a GPU: drafts in one graph, cycles without the host.

    python benchmarks/gpu_eagle.py

Code prompts are continued plainly and with drafts of several lengths, by cycles that follow one
another on the device and, for comparison, step by step. A target of 25M leaves a GPU little to
read: its steps are made of launches.
"""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Any

import gpu_engine
import report
import torch

from outrider.bench.workloads import load_workload
from outrider.llm import LLM

STARTED = time.monotonic()
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PROMPTS, COUNT = 6, 256


def say(*words: object) -> None:
    print(f"[{time.monotonic() - STARTED:6.1f}]", *words, flush=True)


def measure(drafts: tuple[int, ...], **settings: Any) -> list[dict[str, Any]]:
    made = LLM(
        "bundled",
        draft_model="bundled:eagle3",
        proposer="eagle3",
        device=DEVICE,
        backend="torch",
        num_draft_tokens=4,
        **settings,
    ).engine
    texts = [prompt.text for prompt in load_workload("code").prompts[:PROMPTS]]
    given = [made.tokenizer.encode(text)[:256] for text in texts]
    count = COUNT if DEVICE == "cuda" else 24
    return gpu_engine.one_stream(made, given, count, drafts, say=say)


def main() -> None:
    tables = {
        "Cycles without the host": measure((2, 3, 4)),
        "Every step by itself, a draft in one graph": measure((4,), max_ahead_steps=1),
    }
    name = torch.cuda.get_device_name() if DEVICE == "cuda" else "CPU"
    notes = (
        f"The bundled target (25M) and EAGLE-3 head, bfloat16, {name}. {PROMPTS} code prompts of at"
        f" most 256 tokens, {COUNT} tokens each; `over plain` is the median of each prompt's ratio"
        " to plain decoding in the same engine."
    )
    report.write("gpu-eagle", "EAGLE-3 on a GPU", tables, notes)
    out = os.environ.get("OUT")
    for path in report.RESULTS.glob("gpu-eagle.*"):
        if out:
            shutil.copy(path, Path(out) / path.name)


if __name__ == "__main__":
    main()
