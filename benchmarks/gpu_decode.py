"""The GPU engine measured on a random 8B model: passes, cycles, plain and speculative decoding.

    python benchmarks/gpu_decode.py [--only SECTION,...] [--result NAME] [--out FOLDER]

Needs one CUDA device of 80 GB. Every section stands for itself: one that fails is reported and the
others go on; the result file is written anew after each.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import gpu_engine
import numpy as np
import report
import torch
from gpu_engine import STARTED, say
from gpu_pair import LLAMA_1B, LLAMA_8B, RandomTensors, make, make_transformers, weight_bytes

from outrider.contracts import StepBatch
from outrider.cuda.ahead import num_runners_up, prepared_cycles
from outrider.cuda.cycle import Cycle
from outrider.cuda.ops import Pass, TorchOps
from outrider.cuda.tiles import Shape, Tiles
from outrider.cuda.triton_ops import TritonOps
from outrider.engine import build
from outrider.engine.build import EngineConfig
from outrider.engine.engine import Engine
from outrider.model.borrowed import Borrowed
from outrider.model.cuda_decoder import CudaDecoder
from outrider.model.cuda_eagle3 import CudaEagle3
from outrider.model.heads import Eagle3Config, Eagle3Head
from outrider.model.int8 import RoundedLayer, round_rows
from outrider.model.tokenizer import load_tokenizer
from outrider.testing import write_tiny_tokenizer

DEVICE = torch.device("cuda")
FULL_LAYERS, EPSILON, SHARPNESS, NUM_DRAFTS = 3, 0.05, 4.0, 4


def timed(run: Callable[[], object], count: int = 20, rounds: int = 5) -> float:
    """Milliseconds of one run: the median of several rounds, each `count` runs in a row."""
    run()
    torch.cuda.synchronize()
    times = []
    for _ in range(rounds):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(count):
            run()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) / count)
    return statistics.median(times)


def graph_of(run: Callable[[], object]) -> Callable[[], None]:
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    replay: Callable[[], None] = graph.replay
    return replay


class Bench:
    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder
        self.tables: dict[str, list[dict[str, Any]]] = {}
        self.failed: dict[str, str] = {}
        self.tensors = RandomTensors(
            DEVICE, full_layers=FULL_LAYERS, epsilon=EPSILON, sharpness=SHARPNESS
        )
        self.tiles: dict[Shape, Tiles] = {}
        self.options: dict[str, Any] = {}
        self._models: dict[str, CudaDecoder] = {}

    def model(self, name: str) -> CudaDecoder:
        """By size and, behind it, "int8" for weights of 8 bits."""
        if name not in self._models:
            if name.startswith("1B"):
                made = make(RandomTensors(DEVICE, seed=1), LLAMA_1B, DEVICE)
            else:
                layers = 32 if name.startswith("8B") else FULL_LAYERS
                made = make(self.tensors, LLAMA_8B, DEVICE, num_hidden_layers=layers)
            self._models[name] = made.round_weights() if name.endswith("int8") else made
            say("made", name, f"{torch.cuda.memory_allocated() / 1e9:.1f} GB on the device")
        return self._models[name]

    def prepare(self, model: CudaDecoder) -> None:
        """After an `allocate`: the tiles and options that were found best."""
        if isinstance(model.ops, TritonOps):
            model.ops.tiles.update(self.tiles)
            for name, value in self.options.items():
                setattr(model.ops, name, value)

    def cycle(self, draft: str | None, num_drafts: int, **more: Any) -> Cycle:
        cycle = Cycle(
            self.model("8B"), self.model(draft) if draft else None, num_drafts=num_drafts, **more
        )
        for model in (cycle.target, cycle.draft):
            if model is not None:
                self.prepare(model)
        return cycle

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        say("section", name)
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            self.failed[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
        self.write()

    def write(self) -> None:
        tables = {heading: rows for heading, rows in self.tables.items() if rows}
        if not tables:
            return
        notes = (
            f"Random weights in the shape of an 8B Llama, bfloat16, {torch.cuda.get_device_name()}."
            f" Layers from {FULL_LAYERS} on add {EPSILON} of what they would, the head is"
            f" {SHARPNESS:g} times as sharp: the first {FULL_LAYERS} layers are the draft model."
            " Times are medians of device events; `tokens_per_s` is a generation by the clock."
        )
        if self.failed:
            notes += f" Failed: {json.dumps(self.failed)}."
        report.write(self.name, "Decoding on a GPU", tables, notes, self.folder)


def layout(context: int, width: int, page: int = 16) -> StepBatch:
    pages = -(-(context + width) // page)
    return StepBatch(
        tokens_T=np.arange(5, 5 + width, dtype=np.int32),
        positions_T=np.arange(context, context + width, dtype=np.int32),
        starts_S1=np.array([0, width], np.int32),
        context_S=np.array([context], np.int32),
        tables_SW=np.arange(pages, dtype=np.int32)[None],
        logit_rows_R=np.arange(width, dtype=np.int32),
    )


SHAPES = {
    "qkv": Shape(6144, 4096),
    "o": Shape(4096, 4096),
    "gate-up": Shape(14336, 4096, True),
    "down": Shape(4096, 14336),
    "head": Shape(128256, 4096),
}
Weight = tuple[torch.Tensor, torch.Tensor | None]  # and its scales, where it is int8


def weights_of(model: CudaDecoder, name: str) -> list[Weight]:
    if name == "head":
        return [(model.head_VH, model.head_scale_V)]
    field = name.replace("-", "_")
    found: list[Weight] = []
    for layer in model.layers:
        weight = getattr(layer, field)
        scale = getattr(layer.scales, field) if isinstance(layer, RoundedLayer) else None
        found.append((weight.t() if name in ("o", "down") else weight, scale))
    return found


def apply(ops: Any, name: str, x: torch.Tensor, weight: Weight, out: torch.Tensor) -> None:
    gated, add = SHAPES[name].gated, name in ("o", "down")
    ops.linear(x, weight[0], out, scale_N=weight[1], gated=gated, add=add)


def correct(bench: Bench) -> None:
    """Every product at every width, and attention, against float32 on fresh inputs."""
    rows = bench.tables.setdefault("Kernels against float32", [])
    model = bench.model("8B")
    ops = TritonOps(DEVICE, tiles=bench.tiles)
    ops.reserve(64, 32, 128, 4096, 128256)
    for name, rounded in [(name, rounded) for name in SHAPES for rounded in (False, True)]:
        outputs, inputs, *_ = SHAPES[name]
        weight = weights_of(model, name)[0]
        if rounded:
            weight = round_rows(weight[0])
        x = torch.randn(16, inputs, device=DEVICE).bfloat16()
        dtype = torch.float32 if name == "head" else torch.bfloat16
        start = torch.randn(16, outputs, device=DEVICE).to(dtype)
        exact = start.float()
        apply(TorchOps(), name, x.float(), (weight[0].float(), weight[1]), exact)
        whole = start.clone()
        apply(ops, name, x, weight, whole)
        error = float((whole.float() - exact).norm() / exact.norm())
        same = True
        for width in range(1, 17):
            out = start[:width].clone()
            apply(ops, name, x[:width].contiguous(), weight, out)
            same &= torch.equal(out, whole[:width])
        kernel = f"{name}, int8" if rounded else name
        rows.append({"kernel": kernel, "relative error": error, "same bits at widths 1..16": same})
        say(rows[-1])
        assert error < 1e-2, name
    for context in (0, 15, 16, 17, 511, 4095):
        worst = 0.0
        for width in (1, 5, 16):
            batch = layout(context, width)
            store = torch.randn(2, 8192, 8, 128, device=DEVICE).bfloat16()
            qkv = torch.randn(width, 48, 128, device=DEVICE).bfloat16()
            masks = torch.tensor([(1 << i) | 1 for i in range(width)], device=DEVICE)
            order = torch.randperm(8192 // 16, device=DEVICE)[: batch.tables_SW.shape[1]]
            ends = (context, context + width)
            counts = [torch.tensor([n], dtype=torch.int32, device=DEVICE) for n in ends]
            where = Pass(1, width, *[torch.zeros(width, device=DEVICE, dtype=torch.int32)] * 3,
                         masks, *counts, order.int()[None].contiguous())  # fmt: skip
            out = torch.full((width, 32, 128), torch.nan, device=DEVICE, dtype=torch.bfloat16)
            ops.attend(qkv, store, where, 16, out)
            exact = torch.empty(width, 32, 128, device=DEVICE)
            TorchOps().attend(qkv.float(), store.float(), where, 16, exact)
            worst = max(worst, float((out.float() - exact).norm() / exact.norm()))
        rows.append({"kernel": f"attention, context {context}", "relative error": worst,
                     "same bits at widths 1..16": "-"})  # fmt: skip
        say(rows[-1])
        assert worst < 1e-2


CANDIDATES = {  # rows, inputs, split, warps, stages
    "qkv": [(32, 512, 1, 4, 3), (32, 512, 2, 4, 3), (16, 512, 1, 4, 4), (64, 256, 1, 4, 4),
            (64, 256, 2, 4, 4), (64, 512, 2, 4, 3), (32, 256, 1, 4, 5), (64, 512, 1, 4, 3),
            (128, 256, 4, 4, 3), (32, 1024, 2, 4, 2)],
    "o": [(32, 512, 2, 4, 3), (32, 512, 1, 4, 3), (16, 512, 1, 4, 4), (64, 512, 2, 4, 3),
          (64, 512, 4, 4, 3), (128, 256, 4, 4, 3), (32, 1024, 2, 4, 2), (32, 512, 4, 4, 2),
          (32, 512, 2, 8, 3), (16, 1024, 1, 4, 3)],
    "gate-up": [(64, 128, 1, 4, 4), (64, 256, 1, 4, 3), (32, 256, 1, 4, 4), (32, 512, 1, 4, 2),
                (32, 512, 1, 4, 3), (128, 128, 1, 4, 3), (128, 128, 1, 8, 3), (16, 512, 1, 4, 3)],
    "down": [(32, 512, 2, 4, 3), (32, 512, 1, 4, 3), (64, 512, 2, 4, 3), (64, 512, 4, 4, 3),
             (128, 256, 4, 4, 3), (32, 1024, 2, 4, 2), (32, 512, 4, 4, 2), (64, 256, 2, 4, 4),
             (32, 256, 2, 4, 4)],
    "head": [(64, 256, 1, 4, 4), (128, 128, 1, 4, 4), (32, 512, 1, 4, 3), (64, 512, 1, 4, 3),
             (128, 256, 1, 4, 3), (128, 256, 1, 8, 3), (64, 256, 1, 4, 3)],
}  # fmt: skip


ROUNDED_CANDIDATES = {  # several programs on each processor, all of them at once
    "qkv": [(64, 256, 1, 8, 5), (16, 512, 1, 4, 4), (16, 512, 1, 4, 3), (32, 256, 1, 4, 4),
            (32, 256, 2, 4, 4), (64, 256, 2, 4, 3), (64, 256, 4, 4, 4), (64, 128, 2, 4, 5),
            (32, 512, 2, 4, 3), (16, 1024, 1, 4, 3), (128, 128, 4, 4, 4)],
    "o": [(64, 512, 2, 8, 4), (64, 256, 4, 4, 4), (64, 256, 4, 4, 3), (32, 256, 4, 4, 3),
          (16, 512, 1, 4, 4), (16, 512, 2, 4, 3), (32, 512, 2, 4, 3), (64, 512, 4, 4, 3),
          (128, 256, 4, 4, 3), (32, 256, 2, 4, 4)],
    "gate-up": [(128, 256, 1, 4, 3), (32, 256, 1, 4, 3), (64, 128, 1, 4, 4), (64, 128, 1, 4, 5),
                (32, 128, 1, 4, 5), (64, 256, 1, 4, 3), (16, 512, 1, 4, 3), (32, 256, 1, 2, 3)],
    "down": [(128, 256, 4, 8, 4), (64, 256, 4, 4, 4), (64, 512, 4, 4, 3), (64, 256, 4, 4, 5),
             (32, 512, 2, 4, 3), (32, 256, 4, 4, 4), (128, 256, 4, 4, 4), (32, 512, 4, 4, 3),
             (16, 512, 2, 4, 4)],
    "head": [(64, 256, 1, 4, 3), (128, 256, 1, 4, 3), (32, 256, 1, 4, 3), (64, 128, 1, 4, 4)],
}  # fmt: skip


def library_products(x: torch.Tensor, weights: list[Weight]) -> None:
    for weight, _ in weights:
        torch.matmul(x, weight.t())


def products(
    ops: TritonOps, x: torch.Tensor, weights: list[Weight], out: torch.Tensor, gated: bool
) -> None:
    for weight, scale in weights:
        ops.linear(x, weight, out, scale_N=scale, gated=gated)


def tune_products(
    bench: Bench, heading: str, model: CudaDecoder, candidates: dict[str, Any], num_tokens: int
) -> None:
    """The fastest tiles for each product."""
    rows = bench.tables.setdefault(heading, [])
    for name, shape in SHAPES.items():
        outputs, inputs, gated, _ = shape
        weights = weights_of(model, name)
        rounded = weights[0][1] is not None
        x = torch.randn(num_tokens, inputs, device=DEVICE).bfloat16()
        dtype = torch.float32 if name == "head" else torch.bfloat16
        out = torch.zeros(num_tokens, outputs, device=DEVICE, dtype=dtype)
        key = shape._replace(rounded=rounded)
        best: tuple[float, Tiles] | None = None
        library = 0.0
        if not rounded:
            library = timed(graph_of(partial(library_products, x, weights))) / len(weights)
        for candidate in candidates[name]:
            tiles = Tiles(*candidate)
            ops = TritonOps(DEVICE, tiles={key: tiles})
            ops.reserve(16, 32, 128, 4096, 128256)

            try:
                ms = timed(graph_of(partial(products, ops, x, weights, out, gated)), 8, 3) / len(
                    weights
                )
            except Exception as error:
                say(name, candidate, "failed:", str(error).splitlines()[0][:100])
                continue
            say(name, candidate, f"{ms * 1e3:.1f} us")
            if best is None or ms < best[0]:
                best = ms, tiles
        assert best is not None
        bench.tiles[key] = best[1]
        rows.append({
            "product": name, "us": best[0] * 1e3, "TB/s": weights[0][0].nbytes / best[0] / 1e9,
            "library us": library * 1e3 or "-", "tiles": str(best[1]),
        })  # fmt: skip
        say(rows[-1])


def tune(bench: Bench) -> None:
    """The fastest tiles for each product, then prefetching and overlap for whole passes."""
    model = bench.model("8B")
    tune_products(bench, "Products of an 8B layer, 5 tokens", model, CANDIDATES, 5)
    overlap = bench.tables.setdefault(
        "Overlap of kernels and attention's programs, one token at context 512", []
    )
    results = []
    for options in (
        {"pdl": False},
        {"pdl": True},
        {"pdl": True, "key_block": 64},
        {"pdl": True, "programs": 256},
        {"pdl": True, "key_block": 64, "programs": 256},
    ):
        bench.options = options
        try:
            ms = pass_ms(bench, model, 512, 1)
            far = pass_ms(bench, model, 4096, 5)
        except Exception as error:
            say(options, "failed:", str(error).splitlines()[0][:200])
            continue
        overlap.append({"options": json.dumps(options), "ms": ms, "5 at 4096, ms": far})
        say(overlap[-1])
        results.append((ms + far, options))
    bench.options = min(results, key=lambda result: result[0])[1]


def tune_int8(bench: Bench) -> None:
    heading = "Products of an 8B layer by int8 weights, 1 token"
    tune_products(bench, heading, bench.model("8B, int8"), ROUNDED_CANDIDATES, 1)


def pass_ms(bench: Bench, model: CudaDecoder, context: int, width: int) -> float:
    model.allocate(1024, 16)
    assert model._store is not None
    model._store.normal_()
    bench.prepare(model)
    batch = layout(context, width)
    model.forward(batch)
    (graph,) = model._graphs.values()
    return timed(graph.replay)


def call_all(runs: list[Callable[[], None]]) -> None:
    for run in runs:
        run()


def parts(bench: Bench) -> None:
    """What lies between the products: each operation of all layers by itself."""
    rows = bench.tables.setdefault("Between the products, one token, all layers", [])
    model = bench.model("8B")
    for context in (512, 4096):
        pass_ms(bench, model, context, 1)
        where, ops, store = model.inputs.at(1, 1), model.ops, model._store
        assert store is not None
        heads = model._qkv[:1].view(1, -1, 128)
        one, x, normed = model._attended[:1], model._x[:1], model._normed[:1]
        turn = (None, None, 1e-5, model._turns, where)
        runs = {
            "norms": [partial(ops.norm, x, model.norm_H, 1e-5, normed)] * 65,
            "rope, store": [partial(ops.rope, heads, *turn, layer) for layer in store],
            "attention": [partial(ops.attend, heads, layer, where, 16, one) for layer in store],
            "draw": [partial(model.draw, 1)],
        }
        for name, run in runs.items():
            ms = timed(graph_of(partial(call_all, run)))
            rows.append({"context": context, "operation": name, "ms": ms})
            say(rows[-1])


def copy_rate() -> float:
    """TB/s read and written together."""
    data = torch.empty(2 << 30, dtype=torch.bfloat16, device=DEVICE).normal_()
    other = torch.empty_like(data)
    return 2 * data.nbytes / timed(lambda: other.copy_(data)) / 1e9


def passes(bench: Bench) -> None:
    price_passes(bench, "Passes", bench.model("8B"))


def passes_int8(bench: Bench) -> None:
    price_passes(bench, "Passes by int8 weights", bench.model("8B, int8"))


def price_passes(bench: Bench, heading: str, model: CudaDecoder) -> None:
    rows = bench.tables.setdefault(heading, [])
    bandwidth = copy_rate()
    floor = weight_bytes(model) / bandwidth / 1e9
    say(f"copy {bandwidth:.2f} TB/s, floor {floor:.2f} ms")
    base = 0.0
    for context in (512, 4096):
        for width in (1, 5, 16):
            ms = pass_ms(bench, model, context, width)
            base = base or ms
            rows.append({
                "context": context, "tokens": width, "ms": ms, "over decode at 512": ms / base,
                "floor ms": floor, "of the floor": floor / ms, "copy TB/s": bandwidth,
                "capture s": model.capture_s,
            })  # fmt: skip
            say(rows[-1])


def prompt(length: int, seed: int = 0) -> list[int]:
    random = np.random.default_rng(seed)
    tokens: list[int] = random.integers(0, 128256, length).tolist()
    return tokens


def verifying(target: CudaDecoder, where: Pass) -> None:
    target.compute(where)
    target.draw(where.num_sequences * where.width)


def cycles(bench: Bench) -> None:
    """A cycle against what its parts take one by one."""
    rows = bench.tables.setdefault("Cycles, K = 4, context 512", [])
    for name in ("3 layers", "3 layers, int8", "1B", "1B, int8"):
        cycle = bench.cycle(name, NUM_DRAFTS, max_length=1500)
        cycle.start([prompt(512)])
        for _ in range(3):
            cycle.launch()
        cycle.emitted()
        target, draft = cycle.target, cycle.draft
        assert draft is not None
        where = target.inputs.at(1, NUM_DRAFTS + 1)
        parts = {
            "draft ms": graph_of(partial(draft.draft, 1, 2, NUM_DRAFTS)),
            "verify ms": graph_of(partial(verifying, target, where)),
        }
        took = {key: timed(part) for key, part in parts.items()}
        cycle.start([prompt(512)])
        cycle.launch()
        cycle.emitted()
        start = time.perf_counter()
        for _ in range(100):
            cycle.launch()
            cycle.emitted(behind=1)
        cycle.emitted()
        ms = (time.perf_counter() - start) * 10
        rows.append({
            "draft": name, **took, "cycle ms, by the clock": ms,
            "parts over cycle": sum(took.values()) / ms,
        })  # fmt: skip
        say(rows[-1])


def clocked(cycle: Cycle, count: int) -> tuple[list[int], list[int], float]:
    """`count` tokens of the one sequence, how many each cycle emitted, and the seconds it took."""
    tokens: list[int] = []
    lengths: list[int] = []
    torch.cuda.synchronize()
    start = time.perf_counter()
    cycle.launch()
    while len(tokens) < count:
        cycle.launch()
        (emitted,) = cycle.emitted(behind=1)
        tokens += emitted
        lengths.append(len(emitted))
    return tokens[:count], lengths, (time.perf_counter() - start) * count / len(tokens)


def part_ms(cycle: Cycle) -> float:
    """Drafting and verifying of one cycle, each by itself."""
    target, draft, num_drafts, others = (
        cycle.target, cycle.draft, cycle.num_drafts, cycle.num_others,
    )  # fmt: skip
    where = target.inputs.at(1, 1 + num_drafts * (1 + others), others)
    ms = timed(graph_of(partial(verifying, target, where)))
    if draft is not None:
        ms += timed(graph_of(partial(draft.draft, 1, 2, num_drafts, num_others=others)))
    return ms


KINDS = [  # draft's weights, K, runners-up
    ("-", 0, 0),
    *(("bfloat16", num, 0) for num in (2, 3, 4)),
    *(("int8", num, 0) for num in (3, 4, 5)),
    ("int8", 3, 1),
    ("int8", 3, 2),
    ("int8", 4, 1),
    ("int8", 4, 2),
    ("int8", 5, 2),
]
DRAFTS = {"-": None, "bfloat16": "3 layers", "int8": "3 layers, int8"}


def decode(bench: Bench) -> None:
    """Plain and speculative, greedy and sampled, two texts of each: the same tokens, how fast.

    The formula: (1 - alpha^(K+1)) / (1 - alpha) tokens in the time of the parts, over a plain pass.
    """
    rows = bench.tables.setdefault("Decoding, one sequence, 512 tokens of prompt", [])
    count, texts = 512, (0, 1)
    for temperature in (0.0, 1.0):
        plain: list[list[int]] = []
        plain_rate = plain_ms = 0.0
        for kind, num_drafts, num_others in KINDS:
            cycle = bench.cycle(DRAFTS[kind], num_drafts, num_others=num_others, max_length=1500)
            cycle.start([prompt(512)])
            clocked(cycle, 8)  # captures
            took: list[float] = []
            lengths: list[int] = []
            written: list[list[int]] = []
            for text in texts:
                cycle.start([prompt(512, text)], temperature=temperature, seed=1)
                tokens, emitted, seconds = clocked(cycle, count)
                written.append(tokens)
                lengths += emitted
                took.append(seconds)
            rate = count * len(texts) / sum(took)
            ms = part_ms(cycle)
            if not num_drafts:
                plain, plain_rate, plain_ms = written, rate, ms
            same = sum(
                a == b
                for ours, theirs in zip(plain, written, strict=True)
                for a, b in zip(ours, theirs, strict=True)
            )
            row = {
                "temperature": temperature, "draft": kind, "K": num_drafts,
                "runners-up": num_others, "tokens_per_s": rate, "over plain": rate / plain_rate,
                "tokens per cycle": sum(lengths) / len(lengths), "parts, ms": ms,
                "tokens as plain": f"{same} of {count * len(texts)}",
                "alpha": "-", "formula": "-", "of the formula": "-",
            }  # fmt: skip
            if num_drafts and not num_others:
                judged = sum(min(length, num_drafts) for length in lengths)
                alpha = (sum(lengths) - len(lengths)) / judged
                promised = sum(alpha**i for i in range(num_drafts + 1)) * plain_ms / ms
                row |= {
                    "alpha": alpha, "formula": promised,
                    "of the formula": rate / plain_rate / promised,
                }  # fmt: skip
            rows.append(row)
            say(rows[-1])


@contextmanager
def engines(bench: Bench, **config: Any) -> Iterator[Engine]:
    """An engine around the 8B target with the 3 layers, in int8, for its draft model."""
    with tempfile.TemporaryDirectory() as name:
        folder = write_tiny_tokenizer(Path(name), num_tokens=9000)
        settings = EngineConfig(
            model=str(folder),
            draft_model=str(folder),
            proposer="draft-model",
            device="cuda",
            **config,
        )
        with patch.object(build, "load_model", lambda _, **__: bench.model("3 layers, int8")):
            yield build.assemble(settings, bench.model("8B"), load_tokenizer(str(folder)))


def engine(bench: Bench) -> None:
    """The engine that the command line and the server use, beside the bare cycle."""
    rows = bench.tables.setdefault("Engine, one sequence, 512 tokens of prompt", [])
    texts = [prompt(512, seed) for seed in range(2)]
    plain: dict[float, list[gpu_engine.Run]] = {}
    for num_drafts in (0, 3, 4):
        bare: dict[float, tuple[float, float]] = {}
        for temperature in (0.0, 1.0):
            others = num_runners_up(1, num_drafts)
            name = "3 layers, int8" if num_drafts else None
            cycle = bench.cycle(name, num_drafts, num_others=others, max_length=1500)
            cycle.start(texts[:1], temperature=temperature, seed=1)
            clocked(cycle, 8)  # captures
            took, lengths = 0.0, []
            for text in texts:
                cycle.start([text], temperature=temperature, seed=1)
                _, emitted, seconds = clocked(cycle, 512)
                took += seconds
                lengths += emitted
            bare[temperature] = 512 * len(texts) / took, statistics.mean(lengths)
        with engines(bench, num_draft_tokens=num_drafts, kv_tokens=4096) as made:
            for temperature, (bare_rate, bare_length) in bare.items():
                write = partial(
                    gpu_engine.decode, made, speculation=made.default, max_tokens=512,
                    temperature=temperature,
                )  # fmt: skip
                write(texts[:1], max_tokens=64)
                runs = [write([text]) for text in texts]
                rate = statistics.harmonic_mean(run.rate for run in runs)
                steps = [run.stats.num_tokens / run.stats.num_steps for run in runs]
                plain.setdefault(temperature, runs)
                same = [
                    gpu_engine.same_as_plain(made, [text], *both)["sequences as plain"]
                    for text, *both in zip(texts, plain[temperature], runs, strict=True)
                ]
                rows.append({
                    "K": num_drafts, "temperature": temperature, "tokens_per_s": rate,
                    "bare cycle, tokens/s": bare_rate, "of the bare cycle": rate / bare_rate,
                    "tokens per step": statistics.mean(steps), "of the bare cycle's": bare_length,
                    "texts as plain": f"{same.count('1 of 1')} of {len(texts)}",
                    "prepared": bench.model("8B").prepared(),
                })  # fmt: skip
                say(rows[-1])


def eagle(bench: Bench) -> None:
    """Cycles with an EAGLE-3 head in the target's shape. It is random, too: what they take."""
    rows = bench.tables.setdefault("Cycles with an EAGLE-3 head, context 512", [])
    target = bench.model("8B")
    shape = target.config
    with DEVICE:
        module = Eagle3Head(
            Eagle3Config(
                hidden_size=shape.hidden_size, vocab_size=shape.vocab_size,
                draft_vocab_size=32000, taps=(2, 16, 29), num_attention_heads=shape.num_heads,
                num_key_value_heads=shape.num_kv_heads, head_dim=shape.head_dim,
                intermediate_size=shape.intermediate_size,
            )
        )  # fmt: skip
    borrowed = Borrowed(target.embedding_VH, target.norm_H, target.head_VH, shape.norm_eps)
    for rounded in (False, True):
        target.allocate(64, 16)
        head = CudaEagle3(module, borrowed, target, rounded=rounded)
        head.allocate(64, 16)
        for num_drafts in (2, 4):
            took = target.cycle_s(head, 1, num_drafts, 512)
            cycles = prepared_cycles(target, head, 1, num_drafts)
            assert took is not None
            assert cycles is not None
            cycles.abandon()
            cycles.empty(512)
            cycles.launch()
            start = time.perf_counter()
            for _ in range(50):
                cycles.launch()
                cycles.land(0)
            ms = (time.perf_counter() - start) * 20
            cycles.abandon()
            draft_ms, verify_ms = (seconds * 1e3 for seconds in took)
            rows.append({
                "head's weights": "int8" if rounded else "bfloat16", "K": num_drafts,
                "runners-up": cycles.num_others, "draft ms": draft_ms, "verify ms": verify_ms,
                "cycle ms, by the clock": ms, "parts over cycle": (draft_ms + verify_ms) / ms,
            })  # fmt: skip
            say(rows[-1])


def auto(bench: Bench) -> None:
    """The controller's own choice against plain decoding, in turns, in the same engine."""
    config = {"num_draft_tokens": "auto", "kv_tokens": 48 * 1024, "max_sequences": 64}
    prepared = bench.tables.setdefault("Prepared at the engine's start", [])
    for start in ("first", "later"):  # kernels are compiled once
        began = time.perf_counter()
        with engines(bench, **config) as made:
            took = time.perf_counter() - began
        prepared.append({
            "start": start, "seconds, prices included": took,
            "steps": bench.model("8B").prepared(),
        })  # fmt: skip
        say(prepared[-1])
    with engines(bench, **config) as made:
        bench.tables["Auto against plain, the engine, 512 tokens of prompt"] = gpu_engine.auto_rows(
            made,
            lambda size: [prompt(512, seed) for seed in range(size)],
            max_tokens=160,
        )


def batches(bench: Bench) -> None:
    rows = bench.tables.setdefault("Batches, 512 tokens of prompt, greedy", [])
    for size in (1, 4, 16, 64):
        plain_rate = 0.0
        for num_drafts in (0, 1, 3):
            if size * (num_drafts + 1) > 64:
                continue
            cycle = bench.cycle(
                "3 layers" if num_drafts else None,
                num_drafts,
                num_sequences=size,
                max_length=800,
            )
            prompts = [prompt(512, seed) for seed in range(size)]
            cycle.start(prompts, temperature=0.0)
            cycle.generate(4)
            torch.cuda.synchronize()
            start = time.perf_counter()
            outputs, num_cycles = cycle.generate(64)
            took = time.perf_counter() - start
            rate = sum(map(len, outputs)) / took
            plain_rate = plain_rate or rate
            rows.append({
                "batch": size, "K": num_drafts, "tokens_per_s": rate,
                "over plain": rate / plain_rate, "ms per cycle": took / num_cycles * 1e3,
            })  # fmt: skip
            say(rows[-1])


def transformers_rates(bench: Bench) -> None:
    """transformers' own loops on the same weights and prompt."""
    rows = bench.tables.setdefault("transformers, one sequence, 512 tokens of prompt, greedy", [])
    target = make_transformers(bench.tensors, LLAMA_8B)
    draft = make_transformers(bench.tensors, LLAMA_8B, num_hidden_layers=FULL_LAYERS)
    draft.generation_config.num_assistant_tokens = NUM_DRAFTS
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    draft.generation_config.assistant_confidence_threshold = 0.0
    tokens = torch.tensor([prompt(512)], device=DEVICE)
    mask = torch.ones_like(tokens)
    cycle = bench.cycle(None, 0, max_length=1500)
    cycle.start([prompt(512)])
    (ours,), _ = cycle.generate(64)
    ours_rate: dict[int, float] = {}
    for row in bench.tables.get("Decoding, one sequence, 512 tokens of prompt", []):
        if row["temperature"] == 0.0:
            ours_rate[row["K"]] = row["tokens_per_s"]
    for name, assistant, num_drafts in (("generate", None, 0), ("assisted", draft, NUM_DRAFTS)):

        def run(count: int, assistant: Any = assistant) -> Any:
            with torch.no_grad():
                return target.generate(
                    tokens, attention_mask=mask, max_new_tokens=count,
                    assistant_model=assistant,
                )  # fmt: skip

        run(4)
        torch.cuda.synchronize()
        times = []
        for count in (8, 72):
            start = time.perf_counter()
            out = run(count)
            torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        rate = 64 / (times[1] - times[0])  # without the prompt
        written = out[0, 512:].tolist()
        same = sum(a == b for a, b in zip(ours, written, strict=False))
        rows.append({
            "loop": name, "tokens_per_s": rate,
            "ours over it": ours_rate.get(num_drafts, 0.0) / rate,
            "tokens as ours": f"{same} of 64",
        })  # fmt: skip
        say(rows[-1])


SECTIONS: dict[str, Callable[[Bench], None]] = {
    "correct": correct,
    "tune": tune,
    "tune-int8": tune_int8,
    "passes": passes,
    "passes-int8": passes_int8,
    "parts": parts,
    "cycles": cycles,
    "decode": decode,
    "engine": engine,
    "eagle": eagle,
    "auto": auto,
    "transformers": transformers_rates,
    "batches": batches,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--only", default=",".join(SECTIONS), metavar="SECTION,...", help=", ".join(SECTIONS)
    )
    parser.add_argument("--seconds", type=float, default=1e9, help="start no section after this")
    parser.add_argument("--result", default="gpu-decode", help="name of the result file")
    report.add_out(parser)
    given = parser.parse_args()
    names = given.only.split(",")
    unknown = [name for name in names if name not in SECTIONS]
    if unknown:
        parser.error(f"no such section: {', '.join(unknown)}; there are {', '.join(SECTIONS)}")
    torch.backends.cuda.matmul.allow_tf32 = False
    bench = Bench(given.result, given.out)
    for name in names:
        if time.monotonic() - STARTED > given.seconds:
            bench.failed[name] = "no time left"
            continue
        with bench.section(name):
            SECTIONS[name](bench)
    bench.write()
    say("failed:", bench.failed or "nothing")


if __name__ == "__main__":
    main()
