"""Drafts on mixtures of experts: the price of a pass, and K = auto beside plain decoding.

    python benchmarks/moe_bounds.py [--shapes 64x8,128x8] [--batches 1,2,4,8,16,32] [--out FOLDER]

`EXPERTSxACTIVE`: a model of the shape of OLMoE or Qwen3-MoE, made small, with random bfloat16
weights: its router spreads tokens evenly, so that further tokens touch as many further experts as
they can. `pass`: the time of a pass over n new tokens of one sequence over that of one, beside the
bytes of weights that it reads (the union of the experts that its tokens touch). `auto`: drafts of
prescribed acceptance that cost nothing; all ways decode the same texts at the same time, the one
with the least progress steps next; ratios are medians over the rounds.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import report
import torch
import transformers

from outrider.bench.contenders import Ours, race
from outrider.bench.decode import jobs_of, ours
from outrider.bench.settings import Settings
from outrider.bench.workloads import load_workload
from outrider.contracts import Model
from outrider.engine.build import EngineConfig, build
from outrider.engine.engine import Engine
from outrider.engine.request import Speculation
from outrider.model import bundled_path, load_model
from outrider.model.driver import Driver
from outrider.model.experts import ExpertLayer
from outrider.model.torch_decoder import TorchDecoder

WIDTHS = (1, 2, 3, 5, 9, 17)
ALPHAS = (0.3, 0.7)
FIXED = (2, 4)
CONTEXT = 64
NOTES = (
    "Random weights in bfloat16: the router is even, which is the dearest case for drafts. `pass "
    "over n`: seconds over those of a pass over one token, medians; `bytes`: of the weights that "
    "it reads, the union of its experts counted from the router's choices. `auto` and fixed K: "
    "tokens per second over plain decoding's at the same time, drafts of prescribed acceptance, "
    "outputs equal in every run. `plain`: plain decoding a second time, which shows the noise."
)


def write_model(folder: Path, experts: int, active: int, size: str) -> Path:
    """OLMoE's or Qwen3-MoE's shape with the tokenizer of the bundled models."""
    hidden, inner, layers = {"small": (512, 256, 6), "large": (1024, 512, 12)}[size]
    common: dict[str, Any] = {
        "vocab_size": 8192,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": max(hidden // 256, 1),
        "max_position_embeddings": 4096,
        "num_experts": experts,
        "num_experts_per_tok": active,
        "pad_token_id": None,
        "eos_token_id": 0,
    }
    if experts < 128:
        config: Any = transformers.OlmoeConfig(**common, intermediate_size=inner)
    else:
        config = transformers.Qwen3MoeConfig(
            **common, head_dim=64, moe_intermediate_size=inner, intermediate_size=2 * hidden
        )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(bundled_path("target") / name, folder)
    return folder


def unions(folder: Path, tokens: list[int]) -> dict[int, float]:
    """Experts that a pass over n tokens touches, on average over layers and places."""
    chosen: list[torch.Tensor] = []
    model = TorchDecoder.load(folder)
    plain_route = ExpertLayer.route

    def route(self: ExpertLayer, h_TH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights, experts = plain_route(self, h_TH)
        chosen.append(experts)
        return weights, experts

    ExpertLayer.route = route  # type: ignore[method-assign]
    try:
        Driver(model).forward({"a": tokens})
    finally:
        ExpertLayer.route = plain_route  # type: ignore[method-assign]
    found = {}
    for width in WIDTHS:
        sizes = [
            len(torch.unique(experts[at : at + width]))
            for experts in chosen
            for at in range(0, len(tokens) - width + 1, width)
        ]
        found[width] = sum(sizes) / len(sizes)
    return found


def passes(folder: Path, experts: int, rounds: int) -> list[dict[str, Any]]:
    model = load_model(folder, backend="native")
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(1, 8192, (CONTEXT + 153,), generator=generator).tolist()
    driver = Driver(model)
    driver.forward({"a": tokens[:CONTEXT]})
    driver.keep("a", range(CONTEXT))
    seconds: dict[int, list[float]] = {width: [] for width in WIDTHS}
    for round_ in range(rounds + 2):
        for width in WIDTHS:
            at = CONTEXT + (round_ * 17) % 136
            started = time.perf_counter()
            driver.forward({"a": tokens[at : at + width]})
            if round_ > 1:
                seconds[width].append(time.perf_counter() - started)
            driver.keep("a", [])
    touched = unions(folder, tokens[CONTEXT:])
    read = {width: _bytes(model, touched[width]) for width in WIDTHS}
    return [
        {
            "experts": experts,
            "n": width,
            "ms": 1e3 * median(seconds[width]),
            "pass over n": median(a / b for a, b in zip(seconds[width], seconds[1], strict=True)),
            "bytes": read[width] / read[1],
            "experts touched": touched[width],
        }
        for width in WIDTHS
    ]


def _bytes(model: Model, touched: float) -> float:
    """Of the weights that a pass reads; of embedding and head one counts."""
    config = model.config  # type: ignore[attr-defined]
    one = 3 * config.hidden_size * config.experts.inner
    sparse = sum(config.experts.layers)
    embedding = config.vocab_size * config.hidden_size * (not config.tied)
    rest = model.spec.num_parameters - embedding - one * config.experts.count * sparse
    return 2.0 * float(rest + one * touched * sparse)


def by_batch(engine: Engine, alpha: float, batch: int, rounds: int) -> dict[str, Any]:
    name = f"synthetic:{alpha}"
    ways = [c for c in ours(engine, [name], [*FIXED, "auto"]) if isinstance(c, Ours)]
    ways.append(Ours("plain again", engine, Speculation(num_draft_tokens=0)))
    settings = Settings(max_tokens=64)
    jobs = jobs_of(engine, load_workload("code", max(4, batch)), ways, settings)
    rates: dict[str, list[float]] = {way.name: [] for way in ways}
    for round_ in range(rounds + 1):
        order = ways[round_ % len(ways) :] + ways[: round_ % len(ways)]
        runs = race([way.start(jobs, batch) for way in order])
        for way, run in zip(order, runs, strict=True):
            assert run.outputs == runs[0].outputs, f"{way.name} changed the output"
            if round_:  # the first one measures costs
                rates[way.name].append(run.num_tokens / run.seconds)
    plain, *fixed, auto, again = (rates[way.name] for way in ways)

    def over_plain(some: list[float]) -> float:
        return median(a / b for a, b in zip(some, plain, strict=True))

    return {
        "acceptance": alpha,
        "batch": batch,
        **{f"K = {k}": over_plain(found) for k, found in zip(FIXED, fixed, strict=True)},
        "auto": over_plain(auto),
        "plain": over_plain(again),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--shapes", default="64x8,128x8", help="EXPERTSxACTIVE,...")
    parser.add_argument("--size", default="small", choices=("small", "large"))
    parser.add_argument("--batches", default="1,2,4,8,16,32")
    parser.add_argument("--alphas", default=",".join(map(str, ALPHAS)))
    parser.add_argument("--rounds", type=int, default=3)
    report.add_out(parser)
    asked = parser.parse_args()
    tables: dict[str, list[dict[str, Any]]] = {"passes": []}
    for shape in asked.shapes.split(","):
        experts, active = (int(number) for number in shape.split("x"))
        with tempfile.TemporaryDirectory() as folder:
            model = write_model(Path(folder), experts, active, asked.size)
            tables["passes"] += passes(model, experts, 12 * asked.rounds)
            engine = build(EngineConfig(model=str(model), proposer="ngram", max_sequences=64))
            rows = tables[f"{experts} experts, {active} active: over plain decoding"] = []
            for alpha in map(float, asked.alphas.split(",")):
                for batch in map(int, asked.batches.split(",")):
                    rows.append(by_batch(engine, alpha, batch, asked.rounds))
                    print(rows[-1], flush=True)
            print(f"least auto: {min(row['auto'] for row in rows):.3f}", flush=True)
    report.write("moe-bounds", "Drafts on mixtures of experts", tables, NOTES, asked.out)


if __name__ == "__main__":
    main()
