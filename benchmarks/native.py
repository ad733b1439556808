"""The native CPU step: bandwidth, the price of verifying M tokens, drafting, prefill.

    python benchmarks/native.py [--models 25M,160M,700M] [--rounds 15] [--threads N]

The result file is named after the models: the larger ones take minutes, and may be run one by one.

Everything is measured in turns within one process, and a ratio is the median over rounds of
neighbouring measurements, so a busy moment falls on both sides. `25M` is the bundled target with
the bundled draft; 160M and 700M are random weights in common shapes, since speed does not depend
on their values. Context 256, one sequence.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import report
import torch
from safetensors.torch import save_file

from outrider import native
from outrider.contracts import Model, StepBatch
from outrider.model.bundled import bundled_path
from outrider.model.native_decoder import NativeDecoder
from outrider.model.torch_decoder import TorchDecoder
from outrider.sampling import RowParams, SamplingParams

CONTEXT, BLOCK, PREFILL = 256, 16, 512
WIDTHS = (1, 2, 3, 5, 9, 17)
DTYPES = ("float32", "bfloat16", "int8", "int4")
SHAPES = {  # hidden, layers, heads, kv heads, intermediate, vocabulary
    "160M": (768, 12, 12, 4, 2816, 49152),
    "700M": (1536, 20, 24, 8, 5632, 49152),
}


def batch(num_new: int, context: int, logit_rows: list[int] | None = None) -> StepBatch:
    def ints(values: Any) -> Any:
        return np.array(values, np.int32)

    width = (CONTEXT + PREFILL) // BLOCK + 2
    return StepBatch(
        tokens_T=ints([5 + i % 50 for i in range(num_new)]),
        positions_T=ints(range(context, context + num_new)),
        starts_S1=ints([0, num_new]),
        context_S=ints([context]),
        tables_SW=ints([range(width)]),
        logit_rows_R=ints(range(num_new) if logit_rows is None else logit_rows),
    )


def prepare(model: Model) -> None:
    model.allocate((CONTEXT + PREFILL) // BLOCK + 2, BLOCK)
    model.forward(batch(CONTEXT, 0, [CONTEXT - 1]))


def random_model(folder: Path, name: str) -> Path:
    """A Llama of this shape with random bfloat16 weights."""
    hidden, layers, heads, kv_heads, inner, vocab = SHAPES[name]
    dim = hidden // heads
    shapes = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    for i in range(layers):
        at = f"model.layers.{i}."
        shapes |= {
            f"{at}input_layernorm.weight": (hidden,),
            f"{at}self_attn.q_proj.weight": (heads * dim, hidden),
            f"{at}self_attn.k_proj.weight": (kv_heads * dim, hidden),
            f"{at}self_attn.v_proj.weight": (kv_heads * dim, hidden),
            f"{at}self_attn.o_proj.weight": (hidden, heads * dim),
            f"{at}post_attention_layernorm.weight": (hidden,),
            f"{at}mlp.gate_proj.weight": (inner, hidden),
            f"{at}mlp.up_proj.weight": (inner, hidden),
            f"{at}mlp.down_proj.weight": (hidden, inner),
        }
    tensors = {
        key: torch.ones(shape) if len(shape) == 1 else torch.randn(shape) * shape[-1] ** -0.5
        for key, shape in shapes.items()
    }
    save_file({k: t.bfloat16() for k, t in tensors.items()}, folder / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def timed(model: Model, what: StepBatch) -> float:
    started = time.perf_counter()
    model.forward(what)
    return time.perf_counter() - started


class Times:
    """Seconds by name and round; ratios are medians over rounds."""

    def __init__(self) -> None:
        self.of: dict[tuple[str, Any], list[float]] = defaultdict(list)

    def add(self, name: str, key: Any, seconds: float) -> None:
        self.of[name, key].append(seconds)

    def median(self, name: str, key: Any) -> float:
        return statistics.median(self.of[name, key])

    def ratio(self, above: tuple[str, Any], below: tuple[str, Any]) -> float:
        pairs = zip(self.of[above], self.of[below], strict=True)
        return statistics.median(a / b for a, b in pairs)


def measure(name: str, folder: Path, rounds: int, threads: int | None) -> dict[str, Any]:
    """Rows of the tables for one model."""
    models = {dtype: NativeDecoder.load(folder, dtype=dtype, threads=threads) for dtype in DTYPES}
    for model in models.values():
        prepare(model)
    probe = np.ones(64 << 20, np.float32)
    times, bandwidths = Times(), []
    order = random.Random(0)
    batches = {width: batch(width, CONTEXT) for width in WIDTHS}
    for _ in range(rounds):
        bandwidths.append(native.read_bandwidth(probe))
        for dtype in order.sample(DTYPES, len(DTYPES)):
            timed(models[dtype], batches[1])  # what the others left in the caches is gone
            for width in order.sample(WIDTHS, len(WIDTHS)):
                times.add(dtype, width, timed(models[dtype], batches[width]))
    bandwidth = max(bandwidths)
    speed, verify = [], []
    for dtype, model in models.items():
        decode = times.median(dtype, 1)
        moved = model.weight_bytes + CONTEXT * model.spec.kv_bytes_per_token
        speed.append(
            {
                "model": name,
                "weights": dtype,
                "MB read": moved / 1e6,
                "decode(1) ms": decode * 1e3,
                "GB/s": moved / decode / 1e9,
                "of measured bandwidth": moved / decode / bandwidth,
                "speed against float32": times.ratio(("float32", 1), (dtype, 1)),
                "load s": model.load_s,
            }
        )
        row: dict[str, Any] = {"model": name, "weights": dtype}
        for width in WIDTHS[1:]:
            row[f"verify({width})/decode(1)"] = times.ratio((dtype, width), (dtype, 1))
        verify.append(row)
    return {
        "speed": speed,
        "verify": verify,
        "bandwidth": {
            "model": name,
            "best GB/s": bandwidth / 1e9,
            "median GB/s": statistics.median(bandwidths) / 1e9,
        },
        "prefill": prefill(name, folder, models, max(2, rounds // 4)),
    }


def prefill(
    name: str, folder: Path, models: dict[str, NativeDecoder], rounds: int
) -> list[dict[str, Any]]:
    torch.set_num_threads(native.num_threads())
    theirs = TorchDecoder.load(folder)
    prepare(theirs)
    what = batch(PREFILL, 0, [PREFILL - 1])
    times = Times()
    for _ in range(rounds):
        times.add("torch", PREFILL, timed(theirs, what))
        for dtype, model in models.items():
            times.add(dtype, PREFILL, timed(model, what))
    return [
        {
            "model": name,
            "weights": dtype,
            f"{PREFILL} tokens ms": times.median(dtype, PREFILL) * 1e3,
            "speed against torch float32": times.ratio(("torch", PREFILL), (dtype, PREFILL)),
        }
        for dtype in models
    ]


def drafting(rounds: int, threads: int | None, num_drafts: int = 4) -> list[dict[str, Any]]:
    """A draft step of the bundled draft against decode(1) of the bundled target in float32."""
    target = NativeDecoder.load(bundled_path("target"), dtype="float32", threads=threads)
    drafts = {
        dtype: NativeDecoder.load(bundled_path("draft"), dtype=dtype, threads=threads)
        for dtype in DTYPES
    }
    prepare(target)
    for model in drafts.values():
        prepare(model)
    times = Times()
    what = batch(1, CONTEXT)
    count = np.array([num_drafts], np.int32)
    key = np.array([7], np.uint64)
    for _ in range(rounds * 4):
        for dtype, model in drafts.items():
            times.add(f"target {dtype}", 1, timed(target, what))  # as in decoding: caches are cold
            for temperature in (0.0, 1.0):
                params = SamplingParams(temperature=temperature)
                started = time.perf_counter()
                model.draft_chain(what, count, RowParams.of([params], [1]), key)
                times.add(dtype, temperature, (time.perf_counter() - started) / num_drafts)
    return [
        {
            "draft weights": dtype,
            "temperature": temperature,
            "draft step us": times.median(dtype, temperature) * 1e6,
            "draft step / target decode(1)": times.ratio(
                (dtype, temperature), (f"target {dtype}", 1)
            ),
        }
        for dtype in DTYPES
        for temperature in (0.0, 1.0)
    ]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", default="25M,160M,700M")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int)
    options = parser.parse_args()
    native.set_threads(options.threads)
    tables: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for name in options.models.split(","):
        with tempfile.TemporaryDirectory() as temporary:
            bundled = name not in SHAPES
            folder = bundled_path("target") if bundled else random_model(Path(temporary), name)
            rows = measure(name, folder, options.rounds, options.threads)
        tables["Decoding one token"] += rows["speed"]
        tables["Verifying M tokens in one step"] += rows["verify"]
        tables["Prefill"] += rows["prefill"]
        tables["Read bandwidth of the machine, same run"].append(rows["bandwidth"])
        if bundled:
            tables[f"Drafting, four tokens in one call, against {name} float32"] = drafting(
                options.rounds, options.threads
            )
    report.write(
        f"native-{options.models.replace(',', '-')}",
        "The native CPU step",
        dict(tables),
        f"Instruction set {native.isa()}, {native.num_threads()} threads, context {CONTEXT}, one "
        "sequence. Ratios are medians over rounds of measurements taken next to each other.",
    )


if __name__ == "__main__":
    main()
