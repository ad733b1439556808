"""A step through transformers with our KV store over transformers' own step, in turns.

    python benchmarks/fallback.py [--batches 1,4,8] [--rounds 40] [--out FOLDER]

Random float32 weights in the shape of SmolLM2-135M; one new token for each sequence after a context
of 128; transformers keeps its own cache. Ratios are medians over rounds of neighbouring steps.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import report
import torch
import transformers

from outrider.contracts import StepBatch
from outrider.model.transformers_model import TransformersModel
from outrider.testing import write_tiny_tokenizer

CONTEXT, BLOCK, BLOCKS = 128, 16, 16


def batch(num_seqs: int, num_new: int, context: int) -> StepBatch:
    def ints(values: Any) -> Any:
        return np.array(values, np.int32)

    return StepBatch(
        tokens_T=ints([5 + i % 40 for i in range(num_seqs * num_new)]),
        positions_T=ints(list(range(context, context + num_new)) * num_seqs),
        starts_S1=ints([num_new * i for i in range(num_seqs + 1)]),
        context_S=ints([context] * num_seqs),
        tables_SW=ints([[s * BLOCKS + j for j in range(BLOCKS)] for s in range(num_seqs)]),
        logit_rows_R=ints([num_new * (i + 1) - 1 for i in range(num_seqs)]),
    )


@torch.no_grad()
def measure(ours: TransformersModel, theirs: Any, num_seqs: int, rounds: int) -> dict[str, Any]:
    ours.forward(batch(num_seqs, CONTEXT, 0))
    prompt = torch.tensor([[5 + i % 40 for i in range(CONTEXT)]] * num_seqs)
    cache = theirs(prompt, use_cache=True, logits_to_keep=1).past_key_values
    token = torch.tensor([[5]] * num_seqs)
    seconds: list[tuple[float, float]] = []
    for round_ in range(rounds + 3):
        started = time.perf_counter()
        ours.forward(batch(num_seqs, 1, CONTEXT + round_))
        between = time.perf_counter()
        theirs(token, past_key_values=cache, use_cache=True, logits_to_keep=1)
        seconds.append((between - started, time.perf_counter() - between))
    found = seconds[3:]
    return {
        "batch": num_seqs,
        "ours, ms": 1e3 * median(a for a, _ in found),
        "transformers, ms": 1e3 * median(b for _, b in found),
        "ours / transformers": median(a / b for a, b in found),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--batches", default="1,4,8")
    parser.add_argument("--rounds", type=int, default=40)
    report.add_out(parser)
    asked = parser.parse_args()
    config = transformers.LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        write_tiny_tokenizer(folder)
        ours = TransformersModel.load(folder)
        ours.allocate(64 * BLOCKS, BLOCK)
        theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        rows = [
            measure(ours, theirs.eval(), int(size), asked.rounds)
            for size in asked.batches.split(",")
        ]
    report.write("fallback", "The fallback's step", {"SmolLM2-135M": rows}, "", asked.out)


if __name__ == "__main__":
    main()
