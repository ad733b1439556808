"""The GPU engine measured on a random 8B model: passes, cycles, plain and speculative decoding.

    python benchmarks/gpu_decode.py [--only SECTION,...] [--result NAME] [--out FOLDER]

Needs one CUDA device of 80 GB. Every section stands for itself: one that fails is reported and the
others go on; the result file is written anew after each.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import gpu_engine
import report
import torch
from gpu_bench import DEVICE, FULL_LAYERS, NUM_DRAFTS, Bench, graph_of, prompt, timed
from gpu_cycle import Cycle
from gpu_engine import STARTED, say
from gpu_kernels import correct, parts, passes, passes_int8, tune, tune_int8
from gpu_pair import LLAMA_8B, make_transformers

from outrider.cuda.ops import Pass
from outrider.engine import build
from outrider.engine.build import EngineConfig
from outrider.engine.engine import Engine
from outrider.executors.cuda import CudaExecutor
from outrider.executors.cuda_cycles import num_runners_up
from outrider.kv.cache import KVCache
from outrider.model.borrowed import Borrowed
from outrider.model.cuda_decoder import CudaDecoder
from outrider.model.cuda_eagle3 import CudaEagle3
from outrider.model.heads import Eagle3Config, Eagle3Head
from outrider.model.tokenizer import load_tokenizer
from outrider.testing import write_tiny_tokenizer


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
    borrowed = Borrowed(
        embedding_VH=target.embedding_VH, norm_H=target.norm_H, head_VH=target.head_VH,
        norm_eps=shape.norm_eps,
    )  # fmt: skip
    for rounded in (False, True):
        target.allocate(64, 16)
        head = CudaEagle3(module, borrowed, target, rounded=rounded)
        head.allocate(64, 16)
        for num_drafts in (2, 4):
            executor = CudaExecutor(target, KVCache(64, 16), {}, {})
            took = executor.measure(head, 1, num_drafts, 512)
            cycles = executor.prepared(head, 1, num_drafts)
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
    """`auto` against plain decoding, in turns, in the same engine."""
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
