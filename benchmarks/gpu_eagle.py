"""The bundled target with its EAGLE-3 head on a GPU: drafts in one graph, cycles without the host.

    python benchmarks/gpu_eagle.py [--out FOLDER]

Code prompts are continued plainly and with drafts of several lengths, by cycles that follow one
another on the device and, for comparison, step by step. A target of 25M leaves a GPU little to
read: its steps are made of launches.
"""

from __future__ import annotations

import argparse
from typing import Any

import gpu_engine
import report
import torch

from outrider.bench.workloads import load_workload
from outrider.llm import LLM

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PROMPTS, COUNT = 6, 256


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
    return gpu_engine.one_stream(made, given, count, drafts)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    report.add_out(parser)
    options = parser.parse_args()
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
    report.write("gpu-eagle", "EAGLE-3 on a GPU", tables, notes, options.out)


if __name__ == "__main__":
    main()
