"""A context of 32k tokens: decoding with and without drafts, prefill, attention, memory.

    python benchmarks/long_context.py [--shapes 135M,1B] [--length 32768] [--out FOLDER]

Random bfloat16 weights in the shapes of SmolLM2-135M and Llama-3.2-1B, and empty keys and values
in memory that exists: the time of a pass depends on neither. One sequence, the native step.
`drafts`: tokens per second if each of 4 drafts is accepted with probability 0.6, from passes over
5 and over 1 tokens; drafting takes no time. `attention`: the bytes of keys and values that a pass
over one token reads beyond those of a short context, over its further time, over the read
bandwidth of this machine. `prefill`: from passes over 512 tokens at several contexts.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import report
import torch
from safetensors.torch import save_file

from outrider import native
from outrider.model import bundled_path, load_model
from outrider.model.driver import Driver

SHAPES = {  # hidden, layers, heads, kv heads, intermediate
    "135M": (576, 30, 9, 3, 1536),
    "1B": (2048, 16, 32, 8, 8192),
}
SHORT, CHUNK, WIDTH, ALPHA = 256, 512, 5, 0.6
VOCAB = 8192
NOTES = (
    "One sequence. `drafts`: 4 of them, each accepted with probability 0.6, at no cost. See the "
    "script for `attention of bandwidth` and for what is not computed."
)


def write_model(folder: Path, shape: str, length: int) -> Path:
    hidden, layers, heads, kv_heads, inner = SHAPES[shape]
    dim = hidden // heads
    shapes = {"model.embed_tokens.weight": (VOCAB, hidden), "model.norm.weight": (hidden,)}
    for i in range(layers):
        at = f"model.layers.{i}."
        shapes |= {
            f"{at}input_layernorm.weight": (hidden,),
            f"{at}post_attention_layernorm.weight": (hidden,),
            f"{at}self_attn.q_proj.weight": (heads * dim, hidden),
            f"{at}self_attn.k_proj.weight": (kv_heads * dim, hidden),
            f"{at}self_attn.v_proj.weight": (kv_heads * dim, hidden),
            f"{at}self_attn.o_proj.weight": (hidden, heads * dim),
            f"{at}mlp.gate_proj.weight": (inner, hidden),
            f"{at}mlp.up_proj.weight": (inner, hidden),
            f"{at}mlp.down_proj.weight": (hidden, inner),
        }
    torch.manual_seed(0)
    tensors = {
        name: torch.ones(size) if len(size) == 1 else torch.randn(size) * size[-1] ** -0.5
        for name, size in shapes.items()
    }
    save_file({k: t.bfloat16() for k, t in tensors.items()}, folder / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": length + 256,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(bundled_path("target") / name, folder)
    return folder


def pass_s(driver: Driver, context: int, width: int, rounds: int) -> float:
    """The median time of a pass over `width` tokens after `context` others."""
    driver.skip("a", context)
    batch = driver.batch({"a": list(range(1, width + 1))})
    seconds = []
    for _ in range(rounds + 1):
        started = time.perf_counter()
        driver.model.forward(batch)
        seconds.append(time.perf_counter() - started)
    driver.release("a")
    return median(seconds[1:] or seconds)


def prefill_s(driver: Driver, length: int) -> float:
    """Of a whole prompt, from passes at five contexts."""
    contexts = [length * i // 4 for i in range(4)] + [length - CHUNK]
    seconds = [pass_s(driver, context, CHUNK, 0) for context in contexts]
    area = sum(
        (b - a) * (x + y) / 2
        for a, b, x, y in zip(contexts, contexts[1:], seconds, seconds[1:], strict=False)
    )
    return area / CHUNK + seconds[-1]


def measure(
    folder: Path, shape: str, lengths: list[int], kv_dtype: str, rounds: int
) -> list[dict[str, Any]]:
    model = load_model(folder, backend="native", kv_dtype=kv_dtype)
    driver = Driver(model, num_blocks=(max(lengths) + CHUNK) // 16 + 1, block_size=16)
    place = 0
    while done := model.populate(place, 1 << 28):  # type: ignore[attr-defined]
        place += done
    data = np.ones(1 << 26, np.float32)
    bandwidth = max(native.read_bandwidth(data, 3) for _ in range(3))
    per_token = model.spec.kv_bytes_per_token
    expected = sum(ALPHA**i for i in range(WIDTH))
    base_s = 0.0
    rows = []
    for length in lengths:
        plain_s, drafts_s = (pass_s(driver, length, n, rounds) for n in (1, WIDTH))
        row: dict[str, Any] = {
            "shape": shape,
            "K/V": kv_dtype,
            "context": length,
            "plain, tokens/s": 1 / plain_s,
            "drafts, tokens/s": expected / drafts_s,
            "speedup": expected * plain_s / drafts_s,
            "attention of bandwidth": "-",
            "K/V, MiB": length * per_token / 2**20,
            "prefill, tokens/s": "-",
        }
        if plain_s > 1.2 * base_s > 0:  # else the difference is noise
            read = (length - SHORT) * per_token
            row["attention of bandwidth"] = read / (plain_s - base_s) / bandwidth
        base_s = base_s or plain_s
        if length == max(lengths) and kv_dtype == "auto":
            row["prefill, tokens/s"] = length / prefill_s(driver, length)
        rows.append(row)
        print(row, flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--shapes", default="135M,1B")
    parser.add_argument("--length", type=int, default=32768)
    parser.add_argument("--kv-dtypes", default="auto,int8")
    parser.add_argument("--rounds", type=int, default=9)
    report.add_out(parser)
    asked = parser.parse_args()
    lengths = sorted({SHORT, asked.length // 8, asked.length})
    rows = []
    for shape in asked.shapes.split(","):
        with tempfile.TemporaryDirectory() as folder:
            model = write_model(Path(folder), shape, asked.length + CHUNK)
            for kv_dtype in asked.kv_dtypes.split(","):
                rows += measure(model, shape, lengths, kv_dtype, asked.rounds)
    report.write("long-context", "A context of 32k", {"one sequence": rows}, NOTES, asked.out)


if __name__ == "__main__":
    main()
