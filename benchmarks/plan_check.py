"""`outrider plan` against the real server, then on paper: 10 000 requests per second.

    python benchmarks/plan_check.py            four to five minutes; writes results/plan-check.*
    make reference                             draws it

The server's costs are measured with constant numbers of streams: seconds of a step at each batch
size, with and without drafts, and of reading a prompt. The simulation, fed with these curves, says
what Poisson arrivals meet; the server gets the very same arrivals. Both are measured in turns, so
that a machine that changes its pace does so for both. The server computes with one thread, which
leaves a core for requests and for the client.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import cached_property
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from statistics import fmean, median
from typing import Any

import report

from outrider import LLM
from outrider.integrations.vllm.child import free_port
from outrider.plan.costs import Curves, Hardware, ModelSize, Roofline, between
from outrider.plan.fleet import Goal, Replica, plan
from outrider.plan.simulate import Arrival, Load, Outcome, poisson, simulate
from outrider.theory import expected_tokens

ROOT = Path(__file__).parents[1]
K = 3
STREAMS = (1, 2, 4, 8, 16)
PROMPTS = (1, 4, 16, 32, 96, 192)  # lengths whose reading is timed
PROMPT_TOKENS, OUTPUT_TOKENS = 64, 48
CALIBRATING_TOKENS, SETTLED = 64, 8
ROUNDS, SIMULATIONS = 3, 10
SHARES = (0.3, 0.6, 0.85, 1.3)  # of what the server can do
RATES = (10, 100, 1000, 10_000)
TEMPERATURE = 0.8
Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Stream:
    """One answer as its client saw it, read only when all is over: the server needs the cores."""

    sent_s: float
    lines: list[tuple[float, bytes]]

    @cached_property
    def counts(self) -> list[tuple[float, int]]:
        """When how many tokens were there."""
        events = [(at, json.loads(line[6:])) for at, line in self.lines if line[:7] == b"data: {"]
        return [(at, e["usage"]["completion_tokens"]) for at, e in events if e["choices"]]

    @property
    def num_tokens(self) -> int:
        return self.counts[-1][1]

    @property
    def ttft_s(self) -> float:
        return self.counts[0][0] - self.sent_s

    @property
    def rest_s(self) -> float:
        """From the first token to the last."""
        return self.counts[-1][0] - self.counts[0][0]

    @property
    def tpot_s(self) -> float:
        return self.rest_s / max(1, self.num_tokens - 1)

    def at(self, when_s: float) -> int:
        return max((n for time_s, n in self.counts if time_s <= when_s), default=0)


class Client:
    """The server under test and prompts of any length for it."""

    def __init__(self, port: int) -> None:
        self.port = port
        texts = (ROOT / "src/outrider/bench/texts/long.jsonl").read_text()
        self._tokens = LLM("bundled", num_draft_tokens=0).engine.tokenizer.encode(texts)
        self._next = 0

    def ask(self, num_prompt: int, num_output: int, k: int) -> Stream:
        """A stream over a piece of text that was not used before."""
        self._next += 1
        at = 61 * self._next % (len(self._tokens) - num_prompt)
        body = {
            "model": "bundled",
            "prompt": self._tokens[at : at + num_prompt],
            "max_tokens": num_output,
            "temperature": TEMPERATURE,
            "seed": self._next,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            "speculation": {"num_draft_tokens": k},
        }
        headers = {"Content-Type": "application/json"}
        with closing(HTTPConnection("127.0.0.1", self.port, timeout=60)) as connection:
            sent_s = time.perf_counter()
            connection.request("POST", "/v1/completions", json.dumps(body), headers)
            response = connection.getresponse()
            if response.status != 200:
                raise HTTPException(response.read(300))
            return Stream(sent_s, [(time.perf_counter(), line) for line in response])

    def at_once(self, count: int, num_output: int, k: int) -> list[Stream]:
        with ThreadPoolExecutor(count) as pool:
            asked = [pool.submit(self.ask, PROMPT_TOKENS, num_output, k) for _ in range(count)]
            return [one.result() for one in asked]

    def replay(self, trace: list[Arrival], k: int) -> tuple[float, list[Stream]]:
        """Requests at the trace's times; the seconds until the last has ended."""
        started = time.perf_counter()
        with ThreadPoolExecutor(128) as pool:
            asked = []
            for arrival in trace:
                time.sleep(max(0.0, started + arrival.at_s - time.perf_counter()))
                asked.append(pool.submit(self.ask, arrival.prompt_tokens, arrival.output_tokens, k))
            answers = [one.result() for one in asked]
        return time.perf_counter() - started, answers


@contextmanager
def serving() -> Iterator[Client]:
    port = free_port()
    args = ["serve", "bundled", "--draft-model", "bundled:draft", "-k", str(K), "--port", str(port)]
    args += ["--max-num-seqs", str(max(STREAMS)), "--no-prefix-caching", "--log-level", "warning"]
    args += ["--threads", "1"]
    process = subprocess.Popen([sys.executable, "-m", "outrider", *args])
    try:
        client = Client(port)
        for _ in range(240):
            try:
                client.ask(8, 8, 0)
                break
            except (OSError, HTTPException):  # still loading
                time.sleep(0.25)
        yield client
    finally:
        process.terminate()
        process.wait(60)


# --- curves ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Model:
    """The server as the simulation knows it."""

    curves: Curves
    alpha: float
    latency_s: float

    def outcomes(self, replay: Replay) -> list[Outcome]:
        """Several: whether a draft is accepted is chance."""
        return [
            simulate(
                self.curves,
                replay.load,
                alpha=self.alpha,
                max_sequences=max(STREAMS),
                num_draft_tokens=replay.k,
                trace=replay.trace,
                warm_up=0.0,
                latency_s=self.latency_s,
                seed=seed,
            )
            for seed in range(SIMULATIONS)
        ]


class Calibration:
    """Seconds of passes and of drafting, from the outside: whatever the server adds is in them."""

    def __init__(self, client: Client, alpha: float) -> None:
        self._client, self._alpha = client, alpha
        self._gain = {k: expected_tokens(alpha, k) for k in (0, K)}
        self._steps: dict[int, dict[int, list[float]]] = {
            k: {n: [] for n in STREAMS} for k in self._gain
        }
        self._waits: dict[int, list[float]] = {length: [] for length in PROMPTS}
        self._rests: dict[int, list[float]] = {length: [] for length in (PROMPTS[1], PROMPTS[-1])}

    def run(self) -> None:
        for k, sizes in self._steps.items():
            for n, found in sizes.items():
                found.append(self._step_s(n, k))
        for length, waits in self._waits.items():
            waits += [self._client.ask(length, 1, 0).ttft_s for _ in range(3)]
        for length, rests in self._rests.items():
            rests += [self._client.ask(length, 3, K).rest_s for _ in range(5)]

    def _step_s(self, n: int, k: int) -> float:
        """While all streams run: after the last prompt was read, before the first stream ends."""
        streams = self._client.at_once(n, CALIBRATING_TOKENS, k)
        # A drafter reads its prompts after the first token: a few more may pass.
        start = max(min(t for t, count in s.counts if count > SETTLED) for s in streams)
        end = min(s.counts[-1][0] for s in streams)
        num_tokens = sum(s.at(end) - s.at(start) for s in streams)
        return (end - start) * n * self._gain[k] / num_tokens

    def curves(self) -> Curves:
        """Means: what the server meets are busy moments, too."""
        step = {k: {n: fmean(s) for n, s in sizes.items()} for k, sizes in self._steps.items()}
        waits = {length: fmean(found) for length, found in self._waits.items()}
        verify = {length: step[0][1] + wait - waits[1] for length, wait in waits.items()}
        overhead = {n: step[0][n] - between(verify, n) for n in STREAMS}
        draft = {
            n: {K: max(0.0, step[K][n] - between(verify, n * (K + 1)) - overhead[n])}
            for n in STREAMS
        }
        short, long = (fmean(found) for found in self._rests.values())
        reading = dict(zip(self._rests, (0.0, max(0.0, long - short)), strict=True))
        return Curves(verify, overhead, draft, reading)

    def model(self) -> Model:
        latency_s = max(0.0, fmean(self._waits[1]) - fmean(self._steps[0][1]))
        return Model(self.curves(), self._alpha, latency_s)


def acceptance() -> float:
    """Of one draft, such that K of them give the measured number of tokens per step."""
    llm = LLM("bundled", draft_model="bundled:draft", num_draft_tokens=K, max_sequences=8)
    texts = (ROOT / "src/outrider/bench/texts/long.jsonl").read_text()
    tokens = llm.engine.tokenizer.encode(texts)
    pieces = [tokens[at : at + PROMPT_TOKENS] for at in range(0, 24 * 401, 401)]
    results = llm.generate(
        pieces, max_tokens=OUTPUT_TOKENS, temperature=TEMPERATURE, ignore_eos=True, seed=1
    )
    accepted = sum(result.stats.num_accepted for result in results)
    wanted = 1 + accepted / sum(result.stats.num_proposals for result in results)
    low, high = 0.0, 1.0
    for _ in range(40):
        alpha = (low + high) / 2
        low, high = (alpha, high) if expected_tokens(alpha, K) < wanted else (low, alpha)
    return low


# --- the comparison -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Replay:
    """One load as the server met it."""

    k: int
    load: Load
    trace: list[Arrival]
    took_s: float
    answers: list[Stream]

    def measured(self) -> dict[str, float]:
        return {
            "tokens per s": sum(answer.num_tokens for answer in self.answers) / self.took_s,
            "first token, s": fmean(answer.ttft_s for answer in self.answers),
            "per token, s": fmean(a.tpot_s for a in self.answers if a.num_tokens > 1),
        }

    def predicted(self, model: Model) -> dict[str, float]:
        outcomes = model.outcomes(self)
        return {
            "tokens per s": fmean(found.tokens_per_s for found in outcomes),
            "first token, s": fmean(fmean(found.ttft_s) for found in outcomes),
            "per token, s": fmean(fmean(found.tpot_s) for found in outcomes),
        }


def replay_loads(
    client: Client, calibration: Calibration, alpha: float, seconds: float
) -> dict[tuple[int, float], list[Replay]]:
    """Every load in every round, with calibrations between them."""
    client.at_once(max(STREAMS), CALIBRATING_TOKENS, K)
    found: dict[tuple[int, float], list[Replay]] = {(k, s): [] for k in (0, K) for s in SHARES}
    for number in range(ROUNDS):
        for k in (0, K):
            calibration.run()
            for share in SHARES:
                load = share_of(calibration.curves(), alpha, k, share)
                trace = poisson(random.Random(number), load, max(20, round(load.rate * seconds)))
                found[k, share].append(Replay(k, load, trace, *client.replay(trace, k)))
    calibration.run()
    return found


def share_of(curves: Curves, alpha: float, k: int, share: float) -> Load:
    """A share of what the server can do by its curves."""
    most = max(STREAMS)
    step_s = curves.pass_s(most * (k + 1), 0, most) + curves.draft_s(most, k)
    reading_s = curves.pass_s(PROMPT_TOKENS, 0, 1) - curves.pass_s(1, 0, 1)
    if k:
        reading_s += curves.read_s(PROMPT_TOKENS)
    service_s = OUTPUT_TOKENS / expected_tokens(alpha, k) * step_s / most + reading_s
    return Load(rate=share / service_s, prompt_tokens=PROMPT_TOKENS, output_tokens=OUTPUT_TOKENS)


def compared(share: float, replays: list[Replay], model: Model) -> dict[str, Any]:
    """Medians over the rounds, of what was measured and of what was predicted in it."""
    measured = [replay.measured() for replay in replays]
    predicted = [replay.predicted(model) for replay in replays]
    row: dict[str, Any] = {
        "K": replays[0].k,
        "load": share,
        "requests per s": median(replay.load.rate for replay in replays),
        "requests": sum(len(replay.trace) for replay in replays),
    }
    for name in measured[0]:
        row[name] = median(found[name] for found in measured)
        row[f"{name}: predicted / measured"] = median(
            p[name] / m[name] for p, m in zip(predicted, measured, strict=True)
        )
    return row


# --- on paper -------------------------------------------------------------------------------------


def on_paper() -> Rows:
    """An 8B target with a 0.5B draft on devices of 3.35 TB/s, 990 TFLOP/s and 80 GB."""
    hardware = Hardware(bandwidth=3.35e12, flops=9.9e14, memory=8e10)
    target = ModelSize(num_parameters=8e9, kv_bytes_per_token=131072)
    draft = ModelSize(num_parameters=5e8, kv_bytes_per_token=8192, num_layers=8)

    def make(degree: int) -> Replica:
        costs = Roofline(hardware=hardware, target=target, draft=draft, degree=degree)
        return Replica(costs=costs, degree=degree, capacity=costs.capacity())

    rows = []
    for rate in RATES:
        load = Load(rate=rate, prompt_tokens=512, output_tokens=256)
        fleets = {
            speculate: plan(
                make, load, Goal(tpot_s=0.01), alpha=0.7, speculate=speculate, price=2.5
            )
            for speculate in (False, True)
        }
        rows.append(
            {
                "requests per s": rate,
                **{
                    f"{name} {how}": fleet.figures()[key]
                    for how, fleet in (("without", fleets[False]), ("with", fleets[True]))
                    for name, key in (
                        ("devices", "devices"),
                        ("tensor parallel", "tensor_parallel_size"),
                        ("mean batch", "mean_batch"),
                        ("cost per million tokens", "cost_per_million_tokens"),
                    )
                },
            }
        )
        print(rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each load, in each round")
    given = parser.parse_args()
    alpha = acceptance()
    with serving() as client:
        calibration = Calibration(client, alpha)
        replays = replay_loads(client, calibration, alpha, given.seconds)
    model = calibration.model()
    curves = model.curves
    checked = [compared(share, rounds, model) for (_, share), rounds in replays.items()]
    for row in checked:
        print(row, flush=True)
    paper = on_paper()
    costs = [
        {
            "streams": n,
            "plain step, s": curves.pass_s(n, 0, n),
            f"step with K = {K}, s": curves.pass_s(n * (K + 1), 0, n) + curves.draft_s(n, K),
        }
        for n in STREAMS
    ]
    costs += [
        {
            "streams": f"prompt of {n}",
            "plain step, s": curves.verify[n],
            f"step with K = {K}, s": "",
        }
        for n in PROMPTS
    ]
    costs += [
        {
            "streams": "a request, on its way",
            "plain step, s": model.latency_s,
            f"step with K = {K}, s": "",
        }
    ]
    notes = (
        f"The bundled target and draft model in `outrider serve`, {max(STREAMS)} sequences at "
        f"most, temperature {TEMPERATURE}, prompts of {PROMPT_TOKENS} and outputs of "
        f"{OUTPUT_TOKENS} tokens on average. Curves are measured with constant numbers of streams; "
        f"acceptance of a draft: {alpha:.3f}. 'load' is the share of what the server can do by "
        "these curves. Simulation and server get the same Poisson arrivals; latencies are means "
        f"over requests, all figures medians of {ROUNDS} rounds. The client runs on the same "
        "machine. On paper: 8B target, 0.5B draft, acceptance 0.7, prompts of 512 and outputs of "
        "256 tokens, devices of 3.35 TB/s, 990 TFLOP/s and 80 GB at 2.5 an hour, 95 of 100 "
        "requests with a first token within 1 s and 10 ms per token: computed, not measured."
    )
    tables = {
        "predicted and measured": checked,
        "the curves": costs,
        "a fleet on paper": paper,
    }
    report.write("plan-check", "The plan against the server", tables, notes)


if __name__ == "__main__":
    main()
