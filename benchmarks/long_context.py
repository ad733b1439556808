"""A long prompt: prefill, decoding with and without drafts, attention's bandwidth, memory.

    python benchmarks/long_context.py [--shapes 135M,1B] [--length 32768] [--out FOLDER]

Random bfloat16 weights in the shapes of SmolLM2-135M and Llama-3.2-1B: speed does not depend on
their values. One sequence. The drafter knows the output and drafts it with a prescribed acceptance
at no cost, so that the rest is what a long context does to the target. `attention`: the bytes of
keys and values that a decoding pass reads beyond those of a short context, over its further time,
over the read bandwidth of this machine.
"""

from __future__ import annotations

import argparse
import json
import resource
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
from outrider.bench.synthetic import add_synthetic
from outrider.engine.build import EngineConfig, build
from outrider.engine.engine import Engine
from outrider.engine.request import Speculation
from outrider.model.bundled import bundled_path
from outrider.sampling import SamplingParams

SHAPES = {  # hidden, layers, heads, kv heads, intermediate
    "135M": (576, 30, 9, 3, 1536),
    "1B": (2048, 16, 32, 8, 8192),
}
SHORT, ANSWER = 256, 48
VOCAB = 8192
NOTES = (
    "One sequence, greedy, 48 tokens after each prompt; `drafts`: K = 4, each accepted with "
    "probability 0.6, at no cost. "
    "`attention of bandwidth`: see the script. Memory of the process at its most."
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


def answer(
    engine: Engine, prompt: list[int], num_tokens: int, proposer: str | None, output: list[int]
) -> tuple[float, list[int]]:
    """Seconds, the prompt included, and the tokens. `output`: what the drafter knows."""
    wish = Speculation() if proposer is None else Speculation(proposer=proposer, num_draft_tokens=4)
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
    started = time.perf_counter()
    request = engine.add(prompt, params, speculation=wish, prediction=output)
    for _ in engine.run([request]):
        pass
    return time.perf_counter() - started, engine.collect(request).completions[0].tokens


def measure(shape: str, lengths: list[int], rounds: int) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder), shape, max(lengths))
        engine = build(
            EngineConfig(
                model=str(model),
                proposer="ngram",
                max_sequences=1,
                kv_tokens=max(lengths) + 512,
            )
        )
        drafts = add_synthetic(engine, 0.6)
        data = np.ones(1 << 26, np.float32)
        bandwidth = max(native.read_bandwidth(data, 3) for _ in range(3))
        rows: list[dict[str, Any]] = []
        tokens = torch.randint(1, VOCAB, (max(lengths),)).tolist()
        base_s, base_length = 0.0, 0
        for length in lengths:
            prompt = tokens[:length]
            prefill_s, _ = answer(engine, prompt, 1, None, [])
            plain, drafted = [], []
            for _ in range(rounds):  # the prompt is in the prefix cache now
                first_s, _ = answer(engine, prompt, 1, None, [])
                seconds, output = answer(engine, prompt, ANSWER, None, [])
                plain.append(seconds - first_s)
                seconds, got = answer(engine, prompt, ANSWER, drafts, output)
                assert got == output, "drafts changed the output"
                drafted.append(seconds - first_s)
            step_s = median(plain) / (ANSWER - 1)
            row = {
                "shape": shape,
                "prompt": length,
                "prefill, tokens/s": length / prefill_s,
                "plain, tokens/s": 1 / step_s,
                "drafts, tokens/s": (ANSWER - 1) / median(drafted),
                "speedup": median(plain) / median(drafted),
                "attention of bandwidth": "-",
                "KV, MiB": length * engine.target.spec.kv_bytes_per_token / 2**20,
                "memory, MiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
            }
            if base_length:
                read = (length - base_length) * engine.target.spec.kv_bytes_per_token
                row["attention of bandwidth"] = read / (step_s - base_s) / bandwidth
            else:
                base_s, base_length = step_s, length
            rows.append(row)
            print(row, flush=True)
        return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--shapes", default="135M,1B")
    parser.add_argument("--length", type=int, default=32768)
    parser.add_argument("--rounds", type=int, default=3)
    report.add_out(parser)
    asked = parser.parse_args()
    lengths = sorted({SHORT, asked.length // 8, asked.length})
    rows = [
        row for shape in asked.shapes.split(",") for row in measure(shape, lengths, asked.rounds)
    ]
    report.write("long-context", "Long prompts", {"one sequence": rows}, NOTES, asked.out)


if __name__ == "__main__":
    main()
