"""What learning from traffic gains: a head that learns beside one that does not.

    python benchmarks/learning.py [--minutes M] [--requests N] [--blocks N] [--without-speed]

SmolLM2 serves JSON records, then poems. Every block of requests has new topics and is answered
twice in turns, by the first weights and by the learnt ones; the tokens must be equal. Then the
learner sees the block and runs a round, as `outrider serve --learn` does in idle time.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from itertools import product
from random import Random
from typing import Any

import report
import torch
from torch import Tensor

from outrider.engine.build import EngineConfig, build
from outrider.engine.embed import states_of
from outrider.engine.engine import Engine
from outrider.engine.lane import fresh_salt
from outrider.engine.request import Speculation
from outrider.learn.learner import Learner
from outrider.learn.lesson import Weights
from outrider.model.chat_template import chat_ids
from outrider.proposers.eagle3 import Eagle3Proposer
from outrider.sampling import SamplingParams
from outrider.statistics import SpeculationStats

HEAD = "eagle3"
TEMPERATURES = {"JSON records": 0.0, "poems": 0.8}
ASKED = {
    "JSON records": "Write a JSON record with the fields name, origin, year, colour, tags and "
    "description for: {}. Answer with the JSON only.",
    "poems": "Write a short poem of two verses about {}.",
}
QUALITIES = ("an old", "a small", "a broken", "a famous", "a wooden", "a blue", "a lost", "a new")
THINGS = (
    "bridge", "lamp", "boat", "clock", "garden", "train", "violin", "kettle", "castle", "river",
    "coat", "bakery", "map", "bicycle", "window", "market", "lighthouse", "piano", "ladder", "well",
)  # fmt: skip
SECONDS_OF_A_BLOCK = 60.0  # a guess for the first one


class InProcess:
    """An engine as the learner's server."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.learnt: Weights | None = None

    def states(self, tokens: list[int], taps: tuple[int, ...]) -> Mapping[int, Tensor]:
        return states_of(self.engine, tokens, taps)

    def swap(self, scope: str, weights: Weights | None) -> None:
        self.learnt = weights


def answer(
    engine: Engine,
    prompts: list[list[int]],
    weights: Mapping[str, Tensor],
    number: int,
    temperature: float,
) -> tuple[list[list[int]], list[SpeculationStats], float]:
    """The answers of a block, one request after the other, and the seconds after their prompts."""
    engine.replace_weights(HEAD, weights)
    salt = fresh_salt()
    answers, stats, seconds = [], [], 0.0
    for index, prompt in enumerate(prompts):
        params = SamplingParams(temperature=temperature, seed=1000 * number + index, max_tokens=160)
        speculation = Speculation(proposer=HEAD, num_draft_tokens=4)
        id = engine.add(prompt, params, speculation=speculation, salt=salt)
        for _ in engine.run([id]):
            pass
        result = engine.collect(id)
        times = result.times
        assert times.last_token_s is not None
        assert times.first_token_s is not None
        seconds += times.last_token_s - times.first_token_s
        answers.append(result.tokens)
        stats.append(result.stats)
    return answers, stats, seconds


def merged(stats: list[SpeculationStats]) -> SpeculationStats:
    whole = SpeculationStats()
    for part in stats:
        whole.merge(part)
    return whole


def measure(minutes: float, num_requests: int, num_blocks: int) -> list[dict[str, Any]]:
    engine = build(EngineConfig(model="smollm2", num_draft_tokens=4))
    proposer = engine.proposers[HEAD]
    assert isinstance(proposer, Eagle3Proposer)
    loaded, server = proposer.loaded, InProcess(engine)
    first = {name: value.clone() for name, value in loaded.head.state_dict().items()}
    learner = Learner(
        loaded.head, loaded.borrowed, engine.target.spec.num_layers, server, every=256
    )
    began, longest = time.monotonic(), SECONDS_OF_A_BLOCK
    rows: list[dict[str, Any]] = []
    for share, domain in enumerate(ASKED, 1):
        topics = [f"{quality} {thing}" for quality, thing in product(QUALITIES, THINGS)]
        Random(1).shuffle(topics)
        until = began + 60 * minutes * share / len(ASKED)
        for _ in range(min(num_blocks, len(topics) // num_requests)):
            if time.monotonic() + longest > until:
                break
            block_began = time.monotonic()
            some, topics = topics[:num_requests], topics[num_requests:]
            asked = [[{"role": "user", "content": ASKED[domain].format(topic)}] for topic in some]
            prompts = [chat_ids(engine.tokenizer, one) for one in asked]
            rows.append({"block": len(rows) + 1, "traffic": domain} | block(
                engine, learner, server, prompts, first, len(rows), TEMPERATURES[domain]
            ))  # fmt: skip
            longest = time.monotonic() - block_began
            print(rows[-1], flush=True)
    return rows


def block(
    engine: Engine,
    learner: Learner,
    server: InProcess,
    prompts: list[list[int]],
    first: Weights,
    number: int,
    temperature: float,
) -> dict[str, Any]:
    learnt = server.learnt or first
    arms = {"fixed": first, "learnt": learnt}
    found = {}
    for name in sorted(arms, reverse=number % 2 == 1):
        found[name] = answer(engine, prompts, arms[name], number, temperature)
    assert found["fixed"][0] == found["learnt"][0], "the tokens differ"
    for prompt, tokens, stats in zip(prompts, *found["learnt"][:2], strict=True):
        learner.see("", prompt, [tokens], stats, temperature=temperature)
    num_tokens = sum(map(len, found["fixed"][0]))
    began, cpu = time.monotonic(), time.process_time()
    outcome = learner.run_next()
    row: dict[str, Any] = {"tokens": num_tokens}
    for name, (_, parts, seconds) in found.items():
        row[f"acceptance length, {name}"] = merged(parts).acceptance_length
        row[f"tokens/s, {name}"] = (num_tokens - len(prompts)) / seconds
    return row | {
        "then": "none" if outcome is None else outcome.action,
        "seconds to learn": time.monotonic() - began,
        "core seconds": time.process_time() - cpu,
    }


def over_all(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each kind of traffic: its first block, before anything of it was learnt, and its last
    half."""
    keys = [key for key in rows[0] if key.startswith(("acceptance length", "tokens/s"))]
    found = []
    for domain in ASKED:
        mine = [row for row in rows if row["traffic"] == domain]
        parts = {"first block": mine[:1], "last half": mine[len(mine) // 2 :]}
        for when, part in parts.items():
            sums = {
                key: sum(row[key] * row["tokens"] for row in part)
                / sum(row["tokens"] for row in part)
                for key in keys
            }
            ratios = {
                f"{kind}, learnt / fixed": sums[f"{kind}, learnt"] / sums[f"{kind}, fixed"]
                for kind in dict.fromkeys(key.partition(",")[0] for key in keys)
            }
            found.append({"traffic": domain, "when": when, "blocks": len(part)} | sums | ratios)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=7.0)
    parser.add_argument("--requests", type=int, default=16, help="of a block")
    parser.add_argument("--blocks", type=int, default=10, help="of each traffic, at most")
    parser.add_argument("--without-speed", action="store_true", help="on a busy machine")
    report.add_out(parser)
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows = measure(given.minutes, given.requests, given.blocks)
    if given.without_speed:
        timed = ("tokens/s", "seconds to learn", "core seconds")
        rows = [{k: v for k, v in row.items() if not k.startswith(timed)} for row in rows]
    report.write(
        "learning",
        "Learning from traffic: SmolLM2 and its EAGLE-3 head",
        {"over all": over_all(rows), "by block": rows},
        f"Blocks of {given.requests} requests with new topics, at most 160 tokens each, JSON "
        "records at temperature 0 and poems at 0.8, trees of at most 4 drafts per step, 4-bit "
        "target. Each block is answered by both weights in turns, with equal tokens, before the "
        "learner sees it: `learnt` are the weights of the rounds before. Speeds leave out prompts. "
        "A round trains with one thread.",
        given.out,
    )


if __name__ == "__main__":
    main()
