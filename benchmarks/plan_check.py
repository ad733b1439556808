"""`outrider plan` against the real server, then on paper: 10 000 requests per second.

    python benchmarks/plan_check.py            three to four minutes; writes results/plan-check.*
    make reference                             draws it

The server's costs are measured with constant numbers of streams: seconds of a step at each batch
size, with and without drafts, and of reading a prompt. The simulation, fed with these curves, says
what Poisson arrivals meet; the server gets the very same arrivals. Both are measured in turns, so
that a machine that changes its pace does so for both. The server computes with one thread, which
leaves a core for requests and for the client.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

import report

from outrider import LLM
from outrider.bench.serve import Answer, Server
from outrider.errors import ConfigError
from outrider.integrations.vllm.child import free_port
from outrider.plan.costs import Curves, Hardware, ModelSize, Roofline
from outrider.plan.fleet import Goal, Replica, plan
from outrider.plan.simulate import Arrival, Load, Outcome, poisson, simulate
from outrider.theory import expected_tokens

ROOT = Path(__file__).parents[1]
K = 3
STREAMS = (1, 2, 4, 8, 16)
PROMPTS = (32, 96, 192)  # lengths whose reading is timed
PROMPT_TOKENS, OUTPUT_TOKENS = 64, 48
CALIBRATING_TOKENS = 64
SHARES = (0.3, 0.6, 0.85, 1.3)  # of what the server can do
RATES = (10, 100, 1000, 10_000)
TEMPERATURE = 0.8
Rows = list[dict[str, Any]]


class Client:
    """The server under test and prompts of any length for it."""

    def __init__(self, url: str) -> None:
        self.server = Server(url)
        texts = (ROOT / "src/outrider/bench/texts/long.jsonl").read_text()
        self._tokens = LLM("bundled", num_draft_tokens=0).engine.tokenizer.encode(texts)
        self._next = 0

    def ask(self, num_prompt: int, num_output: int, k: int) -> Answer:
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
            "stream_options": {"include_usage": True},
            "speculation": {"num_draft_tokens": k},
        }
        return self.server.complete(body)

    def at_once(self, count: int, num_output: int, k: int) -> list[Answer]:
        with ThreadPoolExecutor(count) as pool:
            asked = [pool.submit(self.ask, PROMPT_TOKENS, num_output, k) for _ in range(count)]
            return [one.result() for one in asked]

    def replay(self, trace: list[Arrival], k: int) -> tuple[float, list[Answer]]:
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
    client = Client(f"http://127.0.0.1:{port}")
    try:
        for _ in range(240):
            try:
                client.server.get("/health")
                client.ask(8, 8, 0)
                break
            except ConfigError:
                time.sleep(0.25)
        yield client
    finally:
        process.terminate()
        process.wait(60)


# --- curves ---------------------------------------------------------------------------------------


class Calibration:
    """Seconds of passes and of drafting, from the outside: whatever the server adds is in them."""

    def __init__(self, client: Client, alpha: float) -> None:
        self._client = client
        self._gain = {k: expected_tokens(alpha, k) for k in (0, K)}
        self._steps: dict[int, dict[int, list[float]]] = {
            k: {n: [] for n in STREAMS} for k in self._gain
        }
        self._reading: dict[int, list[float]] = {length: [] for length in PROMPTS}

    def run(self) -> None:
        for k, sizes in self._steps.items():
            for n, found in sizes.items():
                answers = self._client.at_once(n, CALIBRATING_TOKENS, k)
                # Who started early also waited for the prompts of the others.
                last = max(answer.ttft_s for answer in answers)
                late = [answer for answer in answers if answer.ttft_s > 0.9 * last]
                found.append(fmean(answer.tpot_s for answer in late) * self._gain[k])
        for length, waits in self._reading.items():
            waits += [self._client.ask(length, 1, 0).ttft_s for _ in range(4)]

    def curves(self) -> Curves:
        verify = {n: median(found) for n, found in self._steps[0].items()}
        verify |= {length: median(waits) for length, waits in self._reading.items()}
        plain = Curves(verify, {1: 0.0}, {})
        draft = {
            n: {K: max(0.0, median(found) - plain.pass_s(n * (K + 1), 0))}
            for n, found in self._steps[K].items()
        }
        return Curves(verify, {1: 0.0}, draft)


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
    share: float
    load: Load
    trace: list[Arrival]
    took_s: float
    answers: list[Answer]

    def row(self, curves: Curves, alpha: float) -> dict[str, Any]:
        predicted = simulate(
            curves,
            self.load,
            alpha=alpha,
            max_sequences=max(STREAMS),
            num_draft_tokens=self.k,
            trace=self.trace,
            warm_up=0.0,
        )
        return {
            "K": self.k,
            "load": self.share,
            "requests per s": self.load.rate,
            "requests": len(self.trace),
            **compared(predicted, self.took_s, self.answers),
        }


def replay_loads(
    client: Client, calibration: Calibration, alpha: float, seconds: float
) -> list[Replay]:
    """Every load, with a calibration before each and after the last."""
    client.at_once(max(STREAMS), CALIBRATING_TOKENS, K)
    calibration.run()
    found = []
    most = max(STREAMS)
    for k in (0, K):
        for share in SHARES:
            curves = calibration.curves()
            step_s = curves.pass_s(most * (k + 1), 0) + curves.draft_s(most, k)
            reading_s = curves.pass_s(PROMPT_TOKENS, 0) - curves.pass_s(1, 0)
            service_s = OUTPUT_TOKENS / expected_tokens(alpha, k) * step_s / most + reading_s
            load = Load(
                rate=share / service_s, prompt_tokens=PROMPT_TOKENS, output_tokens=OUTPUT_TOKENS
            )
            trace = poisson(random.Random(len(found)), load, max(20, round(load.rate * seconds)))
            took_s, answers = client.replay(trace, k)
            found.append(Replay(k, share, load, trace, took_s, answers))
            calibration.run()
    return found


def compared(predicted: Outcome, took: float, answers: list[Answer]) -> dict[str, Any]:
    measured = {
        "tokens per s": sum(answer.num_tokens for answer in answers) / took,
        "first token, s": fmean(answer.ttft_s for answer in answers),
        "per token, s": fmean(a.tpot_s for a in answers if a.num_tokens > 1),
    }
    simulated = {
        "tokens per s": predicted.tokens_per_s,
        "first token, s": fmean(predicted.ttft_s),
        "per token, s": fmean(predicted.tpot_s),
    }
    found: dict[str, Any] = {}
    for name, value in measured.items():
        found[name] = value
        found[f"{name}: predicted / measured"] = simulated[name] / value
    return found


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
    parser.add_argument("--seconds", type=float, default=10.0, help="of each load")
    given = parser.parse_args()
    alpha = acceptance()
    with serving() as client:
        calibration = Calibration(client, alpha)
        replays = replay_loads(client, calibration, alpha, given.seconds)
    curves = calibration.curves()
    checked = [replay.row(curves, alpha) for replay in replays]
    for row in checked:
        print(row, flush=True)
    paper = on_paper()
    costs = [
        {
            "streams": n,
            "plain step, s": curves.pass_s(n, 0),
            f"step with K = {K}, s": curves.pass_s(n * (K + 1), 0) + curves.draft_s(n, K),
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
    notes = (
        f"The bundled target and draft model in `outrider serve`, {max(STREAMS)} sequences at "
        f"most, temperature {TEMPERATURE}, prompts of {PROMPT_TOKENS} and outputs of "
        f"{OUTPUT_TOKENS} tokens on average. Curves are measured with constant numbers of streams; "
        f"acceptance of a draft: {alpha:.3f}. 'load' is the share of what the server can do by "
        "these curves. Simulation and server get the same Poisson arrivals; means over all "
        "requests. The client runs on the same machine. On paper: 8B target, 0.5B draft, "
        "acceptance 0.7, prompts of 512 and outputs of 256 tokens, devices of 3.35 TB/s, 990 "
        "TFLOP/s and 80 GB at 2.5 an hour, 95 of 100 requests with a first token within 1 s and "
        "10 ms per token: computed, not measured."
    )
    tables = {
        "predicted and measured": checked,
        "the curves": costs,
        "a fleet on paper": paper,
    }
    report.write("plan-check", "The plan against the server", tables, notes)


if __name__ == "__main__":
    main()
