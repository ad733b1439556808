"""What the engine costs over a bare loop, with drafts of zero length.

Three ways to decode the same tokens, in turns within one process: a bare loop that does nothing but
the target's forward and an argmax (or a seeded draw) per token, not even text; the engine with no
proposer; and the engine with a proposer whose budget is zero. (And with a draft model, for the
share of its time that is not spent in the models' calls.) What counts are medians over many
short texts: other people's load comes in bursts, and the engine may compute several steps in one.
Ratios are taken inside a turn, where the machine is about the same for all, and the interval is
the bootstrap's.

    python benchmarks/overhead.py [--backend torch|native] [--repeats 60] [--no-drafts]
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np
import report

from outrider.bench.statistics import Estimate, estimate
from outrider.contracts import StepBatch, Stream
from outrider.engine.build import EngineConfig, build
from outrider.engine.engine import Engine
from outrider.engine.lane import fresh_salt
from outrider.engine.request import Speculation
from outrider.noise import draw_key
from outrider.sampling import RowParams, SamplingParams, draw_tokens

PROMPT = "def quicksort(items):\n    "


def bare_loop(engine: Engine, prompt: list[int], params: SamplingParams) -> tuple[list[int], float]:
    """The least that decoding can do on this model; returns the tokens and the seconds of one."""
    kv, target = engine.kv, engine.target
    tokens = list(prompt)
    [scratch] = kv.scratch(1)
    kv.reserve(scratch, len(prompt) + params.max_tokens)
    table = kv.table(scratch)[None]
    rows = RowParams.of([params], [1])
    computed, times = 0, []
    while len(tokens) < len(prompt) + params.max_tokens:
        new = tokens[computed:]
        batch = StepBatch(
            tokens_T=np.array(new, np.int32),
            positions_T=np.arange(computed, len(tokens), dtype=np.int32),
            starts_S1=np.array([0, len(new)], np.int32),
            context_S=np.array([computed], np.int32),
            tables_SW=table,
            logit_rows_R=np.array([len(new) - 1], np.int32),
        )
        logits = target.forward(batch).logits_RV
        computed = len(tokens)
        key = draw_key(params.seed or 0, 0, len(tokens), Stream.TARGET)
        tokens += draw_tokens(logits, rows, [key])
        times.append(time.perf_counter())
    kv.free(scratch)
    # The prompt is not what is measured.
    return tokens[len(prompt) :], (times[-1] - times[0]) / (len(times) - 1)


def engine_loop(
    engine: Engine, prompt: list[int], params: SamplingParams, proposer: str | None, count: int = 0
) -> tuple[list[int], float, float]:
    """Tokens, seconds of one, and the share of them that was not spent in drafts and passes."""
    speculation = Speculation(proposer=proposer, num_draft_tokens=count)
    request = engine.add(prompt, params, speculation=speculation, salt=fresh_salt())
    steps = engine.run([request])
    next(steps)
    models_s = 0.0
    started = time.perf_counter()
    for step in steps:
        models_s += step.timing.draft_s + step.timing.verify_s
    seconds = time.perf_counter() - started
    tokens = engine.collect(request).tokens
    return tokens, seconds / (len(tokens) - 1), 1 - models_s / seconds


def in_turns(ours: list[float], theirs: list[float]) -> Estimate:
    return estimate([a / b for a, b in zip(ours, theirs, strict=True)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--repeats", type=int, default=60)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--no-drafts", action="store_true", help="leave the draft model out")
    options = parser.parse_args()
    engine = build(
        EngineConfig(
            backend=options.backend, dtype=options.dtype, num_draft_tokens=0, prefix_caching=False
        )
    )
    prompt = engine.tokenizer.encode(PROMPT)
    rows = []
    for temperature in (0.0, 1.0):
        params = SamplingParams(
            temperature=temperature, seed=1, max_tokens=options.tokens, ignore_eos=True
        )
        bare: list[float] = []
        plain: list[float] = []
        empty: list[float] = []
        drafted: list[float] = []  # its tokens are the same, its time is not what is compared
        outside: dict[str | None, list[float]] = {None: [], "ngram": [], "draft-model": []}
        engines = [(plain, None, 0), (empty, "ngram", 0), (drafted, "draft-model", 4)]
        if options.no_drafts:
            engines.pop()
        expected: list[int] | None = None
        for turn in range(options.repeats):
            for way in (range(-1, len(engines)), range(len(engines) - 1, -2, -1))[turn % 2]:
                if way < 0:
                    tokens, seconds = bare_loop(engine, prompt, params)
                    bare.append(seconds)
                else:
                    taken, proposer, count = engines[way]
                    tokens, seconds, share = engine_loop(engine, prompt, params, proposer, count)
                    taken.append(seconds)
                    outside[proposer].append(share)
                expected = expected or tokens
                assert tokens == expected, "the engine must decode what the bare loop decodes"
        row = {
            "temperature": temperature,
            "bare loop, ms/token": statistics.median(bare) * 1e3,
            "engine, plain": statistics.median(plain) * 1e3,
            "engine, empty drafts": statistics.median(empty) * 1e3,
            **in_turns(empty, plain).to_dict("empty drafts / plain"),
            **in_turns(empty, bare).to_dict("empty drafts / bare loop"),
            "outside the models, plain": statistics.median(outside[None]),
        }
        if drafted:
            row["outside the models, draft-model K=4"] = statistics.median(outside["draft-model"])
        rows.append(row)
    name = type(engine.target).__name__
    report.write(
        f"overhead-{name}-{options.dtype}",
        f"Engine with drafts of zero length against a bare loop ({name}, {options.dtype})",
        {"Seconds per token, medians": rows},
        f"{options.repeats} interleaved repeats of {options.tokens} tokens, bundled target.",
    )


if __name__ == "__main__":
    main()
