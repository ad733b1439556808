"""The speed to expect of a new drafter: its target with it and without, on held-out prompts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from outrider.config import EngineConfig, SamplingParams, Speculation
from outrider.engine.build import build
from outrider.engine.lane import fresh_salt

TOKENS = 96
NUM_DRAFTS = 4


def expected_speed(
    model: str, drafter: Path, prompts: Sequence[list[int]], *, temperature: float
) -> dict[str, float]:
    """Tokens per second after the prompts; the two ways take turns, one request at a time."""
    engine = build(EngineConfig(model=model, draft_model=str(drafter), num_draft_tokens=NUM_DRAFTS))
    ways = {"plain": Speculation(proposer=None), "drafted": engine.default}
    seconds, counts = dict.fromkeys(ways, 0.0), dict.fromkeys(ways, 0)
    for number, prompt in enumerate([prompts[0], *prompts]):  # the first warms up
        for way, speculation in ways.items():
            params = SamplingParams(temperature=temperature, seed=number, max_tokens=TOKENS)
            id = engine.add(prompt, params, speculation=speculation, salt=fresh_salt())
            for _ in engine.run([id]):
                pass
            result = engine.collect(id)
            times = result.times
            if number and times.first_token_s is not None and times.last_token_s is not None:
                seconds[way] += times.last_token_s - times.first_token_s
                counts[way] += len(result.tokens) - 1
    speeds = {way: counts[way] / max(seconds[way], 1e-9) for way in ways}
    return {**speeds, "speedup": speeds["drafted"] / max(speeds["plain"], 1e-9)}
