"""Products, attention and whole passes of a random 8B model on a GPU: right, tuned and timed."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from gpu_bench import DEVICE, Bench, graph_of, layout, timed
from gpu_engine import say
from gpu_pair import weight_bytes

from outrider.cuda.ops import Pass, TorchOps
from outrider.cuda.tiles import Shape, Tiles
from outrider.cuda.triton_ops import TritonOps
from outrider.model.cuda_decoder import CudaDecoder
from outrider.model.int8 import RoundedLayer, round_rows

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
            zeros = torch.zeros(width, device=DEVICE, dtype=torch.int32)
            where = Pass(
                1,
                width,
                tokens_T=zeros,
                positions_T=zeros,
                slots_T=zeros,
                masks_T=masks,
                contexts_S=counts[0],
                lengths_S=counts[1],
                tables_SW=order.int()[None].contiguous(),
            )
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
    assert isinstance(model.store, torch.Tensor)
    model.store.normal_()
    bench.prepare(model)
    batch = layout(context, width)
    model.forward(batch)
    (graph,) = model._graphs.values()
    return timed(graph.replay)


def call_all(runs: Sequence[Callable[[], None]]) -> None:
    for run in runs:
        run()


def parts(bench: Bench) -> None:
    """What lies between the products: each operation of all layers by itself."""
    rows = bench.tables.setdefault("Between the products, one token, all layers", [])
    model = bench.model("8B")
    for context in (512, 4096):
        pass_ms(bench, model, context, 1)
        where, ops, store = model.inputs.at(1, 1), model.ops, model.store
        assert isinstance(store, torch.Tensor)
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
