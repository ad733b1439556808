"""Comparing speculative with plain decoding, and keeping count of every comparison.

A difference is only excused where the two best tokens were within 1e-4 of each other; how many
were compared and excused is printed at the end of the test run.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from outrider.engine.engine import Engine, Result
from outrider.engine.request import Request, Speculation
from outrider.prove.identity import explain
from outrider.sampling import SamplingParams

TALLY: Counter[str] = Counter()


def run(
    engine: Engine,
    prompts: list[list[int]],
    params: SamplingParams,
    speculation: Speculation | list[Speculation] | None = None,
    predictions: list[list[int]] | None = None,
) -> list[Result]:
    """All prompts in one batch; prompt i is decoded with seed `params.seed + i`."""
    ids = []
    for i, prompt in enumerate(prompts):
        ids.append(
            engine.add(
                prompt,
                seeded(params, i),
                speculation=speculation[i] if isinstance(speculation, list) else speculation,
                prediction=predictions[i] if predictions else "",
            )
        )
    for _ in engine.run(ids):
        pass
    return [engine.collect(request_id) for request_id in ids]


def seeded(params: SamplingParams, index: int) -> SamplingParams:
    return replace(params, seed=(params.seed or 0) + index)


def assert_same(
    engine: Engine,
    results: list[Result],
    plain: list[Result],
    params: SamplingParams,
    label: str,
    *,
    bitwise: bool = False,
) -> None:
    """`bitwise`: no near-tie is excused, for models whose rows do not depend on the pass."""
    for i, (result, expected) in enumerate(zip(results, plain, strict=True)):
        for sample, (got, want) in enumerate(
            zip(result.completions, expected.completions, strict=True)
        ):
            TALLY["compared"] += 1
            if got.tokens == want.tokens:
                assert (got.text, got.finish_reason) == (want.text, want.finish_reason), label
                continue
            request = Request(
                "explain", expected.prompt_tokens, seeded(params, i), Speculation(), expected.seed
            )
            found = explain(engine, request, sample, want.tokens, got.tokens)
            assert found is not None
            excused = found.is_near_tie and not bitwise
            assert excused, f"{label}: sequence {i}.{sample} differs: {found}"
            TALLY["excused"] += 1
