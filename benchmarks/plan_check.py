"""`outrider plan` against the real server, then on paper: 10 000 requests per second.

    python benchmarks/plan_check.py            six to seven minutes; writes results/plan-check.*
    make reference                             draws it

The server's costs are measured with constant numbers of streams: seconds of a step at each batch
size, with and without drafts, and of reading a prompt. The simulation, fed with these curves, says
what Poisson arrivals meet; the server gets the very same arrivals. Calibrations and loads take
turns: all of the former give the curves, the two around a load give the machine's pace while it
ran. Nothing of what a load met goes into its prediction. The server computes with one thread, which
leaves a core for requests and for the client.
"""

from __future__ import annotations

import argparse
import random
import time
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

import report
from plan_client import (
    CALIBRATING_TOKENS,
    PROMPT_TOKENS,
    ROOT,
    STREAMS,
    TEMPERATURE,
    Client,
    K,
    Stream,
    serving,
)

from outrider import LLM
from outrider.plan.costs import Curves, Hardware, ModelSize, Roofline
from outrider.plan.fleet import Goal, Replica, plan
from outrider.plan.simulate import Arrival, Load, Outcome, poisson, simulate
from outrider.policy.costs import between
from outrider.policy.measured import StepCosts
from outrider.registry import WITH_MODEL
from outrider.sampling import SamplingParams
from outrider.theory import expected_tokens

PROMPTS = (1, 4, 16, 32, 48, 64, 96, 192)  # lengths whose reading is timed
OUTPUT_TOKENS = 48
SETTLED = 8
STAGES, LONGEST = (0, 8, 16, 32, 64), 96  # of outputs, along which acceptance is measured
ROUNDS, FEWEST_ROUNDS, SIMULATIONS = 5, 3, 10
LAST_START_S = 240  # no further round begins later: a slow machine has fewer of them
NEAR = 0.15
SHARES = (0.3, 0.6, 0.85, 1.3)  # of what the server can do
RATES = (10, 100, 1000, 10_000)
ENDING = ": predicted / measured"
Rows = list[dict[str, Any]]
Point = tuple[str, int, int]  # what was timed, K, streams or tokens


# --- curves ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Of one draft: on average, and from so many tokens of an output on."""

    alpha: float
    alpha_from: dict[int, float]

    def gain(self, k: int, start: int, end: int) -> float:
        """Tokens of a step that gives tokens `start` to `end` of an output."""
        stages = [max(s for s in self.alpha_from if s <= at) for at in range(start, end)]
        steps = sum(1 / expected_tokens(self.alpha_from[stage], k) for stage in stages)
        return len(stages) / steps


def acceptance() -> Acceptance:
    """Counts verified drafts only: drafts after a rejected one are not verified."""
    llm = LLM("bundled", draft_model="bundled:draft", num_draft_tokens=K, max_sequences=8)
    engine = llm.engine
    tokens = engine.tokenizer.encode((ROOT / "src/outrider/bench/texts/long.jsonl").read_text())
    params = [
        SamplingParams(max_tokens=LONGEST, temperature=TEMPERATURE, ignore_eos=True, seed=seed)
        for seed in range(96)
    ]
    asked = [
        engine.add(tokens[at : at + PROMPT_TOKENS], each)
        for at, each in zip(range(0, 271 * len(params), 271), params, strict=True)
    ]
    judged = {stage: [0, 0] for stage in STAGES}  # accepted, refused
    lengths = dict.fromkeys(asked, 0)
    for step in engine.run(asked):
        for event in step.events:
            stage = judged[max(s for s in STAGES if s <= lengths[event.request_id])]
            num_accepted = len(event.tokens) - 1
            stage[0] += num_accepted
            stage[1] += num_accepted < len(event.draft_tokens)
            lengths[event.request_id] += len(event.tokens)
    accepted, refused = (sum(column) for column in zip(*judged.values(), strict=True))
    return Acceptance(
        accepted / (accepted + refused), {stage: a / (a + r) for stage, (a, r) in judged.items()}
    )


@dataclass(frozen=True, slots=True)
class Model:
    """The server as the simulation knows it."""

    curves: Curves
    accepted: Acceptance
    latency_s: float

    def outcomes(self, replay: Replay) -> list[Outcome]:
        """Several: whether a draft is accepted is chance."""
        return [
            simulate(
                self.curves,
                replay.load,
                alpha=self.accepted.alpha,
                alpha_from=self.accepted.alpha_from,
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

    def __init__(self, client: Client, accepted: Acceptance) -> None:
        self._client, self._accepted = client, accepted
        self._gain = {k: accepted.gain(k, SETTLED, CALIBRATING_TOKENS) for k in (0, K)}
        self._sittings: list[dict[Point, float]] = []

    def __len__(self) -> int:
        return len(self._sittings)

    def run(self) -> None:
        ask = self._client.ask
        found = {("step", k, n): self._step_s(n, k) for k in (0, K) for n in STREAMS}
        for length in PROMPTS:
            found["wait", 0, length] = fmean(ask(length, 1, 0).ttft_s for _ in range(3))
        for length in (PROMPTS[1], PROMPTS[-1]):
            found["rest", K, length] = fmean(ask(length, 3, K).rest_s for _ in range(5))
        found["beside", 0, 1] = fmean(self._client.beside_a_stream(5))
        self._sittings.append(found)

    def _step_s(self, n: int, k: int) -> float:
        """While all streams run: after the last prompt was read, before the first stream ends."""
        streams = self._client.at_once(n, CALIBRATING_TOKENS, k)
        # A drafter reads its prompts after the first token: a few more may pass.
        start = max(min(t for t, count in s.counts if count > SETTLED) for s in streams)
        end = min(s.counts[-1][0] for s in streams)
        rates = [rate for s in streams if (rate := s.rate(start, end)) is not None]
        return self._gain[k] / fmean(rates)

    @property
    def means(self) -> dict[Point, float]:
        """Not medians: what the server meets are busy moments, too."""
        return {point: fmean(s[point] for s in self._sittings) for point in self._sittings[0]}

    def pace(self, number: int) -> float:
        """Of the machine around the `number`-th load; 2: everything took twice its mean time."""
        means, around = self.means, self._sittings[number : number + 2]
        return median(fmean(s[point] for s in around) / means[point] for point in means)

    def model(self, pace: float = 1.0) -> Model:
        found = {point: seconds * pace for point, seconds in self.means.items()}
        step = {k: {n: found["step", k, n] for n in STREAMS} for k in (0, K)}
        waits = {length: found["wait", 0, length] for length in PROMPTS}
        verify = {length: step[0][1] + wait - waits[1] for length, wait in waits.items()}
        overhead = {n: step[0][n] - between(verify, n) for n in STREAMS}
        draft = {
            n: {K: max(0.0, step[K][n] - between(verify, n * (K + 1)) - overhead[n])}
            for n in STREAMS
        }
        short, long = PROMPTS[1], PROMPTS[-1]
        reading_s = max(0.0, found["rest", K, long] - found["rest", K, short])
        reading = {WITH_MODEL: {short: 0.0, long: reading_s}}
        costs = StepCosts({1: verify}, overhead, {WITH_MODEL: draft}, reading)
        curves = Curves(costs, WITH_MODEL)
        # A request meets half a step on average, then shares a pass.
        shared_s = step[0][1] / 2 + curves.pass_s(2, 0, 2)
        return Model(curves, self._accepted, max(0.0, found["beside", 0, 1] - shared_s))


# --- the comparison -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Replay:
    """One load as the server met it."""

    k: int
    load: Load
    trace: list[Arrival]
    calibrations: int  # that came before it
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
    client: Client, calibration: Calibration, seconds: float, rounds: int
) -> dict[tuple[int, float], list[Replay]]:
    """Every load in every round, with calibrations between them."""
    client.at_once(max(STREAMS), CALIBRATING_TOKENS, K)
    found: dict[tuple[int, float], list[Replay]] = {(k, s): [] for k in (0, K) for s in SHARES}
    started = time.perf_counter()
    calibration.run()
    for number in range(rounds):
        if number >= FEWEST_ROUNDS and time.perf_counter() - started > LAST_START_S:
            break
        for share in SHARES:
            model = calibration.model()
            for k in (0, K):
                load = share_of(model, k, share)
                trace = poisson(random.Random(number), load, max(24, round(load.rate * seconds)))
                replayed = client.replay(trace, k)
                found[k, share].append(Replay(k, load, trace, len(calibration), *replayed))
            calibration.run()
        print(f"round {number + 1}: {time.perf_counter() - started:.0f} s", flush=True)
    return found


def share_of(model: Model, k: int, share: float) -> Load:
    """A share of what the server can do by its curves."""
    curves, most = model.curves, max(STREAMS)
    step_s = curves.pass_s(most * (k + 1), 0, most) + curves.draft_s(most, k)
    reading_s = curves.pass_s(PROMPT_TOKENS, 0, 1) - curves.pass_s(1, 0, 1)
    if k:
        reading_s += curves.read_s(PROMPT_TOKENS)
    gain = model.accepted.gain(k, 0, OUTPUT_TOKENS)
    service_s = OUTPUT_TOKENS / gain * step_s / most + reading_s
    return Load(rate=share / service_s, prompt_tokens=PROMPT_TOKENS, output_tokens=OUTPUT_TOKENS)


def compared(share: float, replays: list[Replay], calibration: Calibration) -> dict[str, Any]:
    """Medians over the rounds, of what was measured and of what was predicted in it."""
    paces = [calibration.pace(replay.calibrations - 1) for replay in replays]
    measured = [replay.measured() for replay in replays]

    def predicted(slower: float) -> list[dict[str, float]]:
        return [
            replay.predicted(calibration.model(pace * slower))
            for replay, pace in zip(replays, paces, strict=True)
        ]

    expected, expected_slower = predicted(1.0), predicted(1.01)
    row: dict[str, Any] = {
        "K": replays[0].k,
        "load": share,
        "requests per s": median(replay.load.rate for replay in replays),
        "requests": sum(len(replay.trace) for replay in replays),
    }
    for name in measured[0]:
        row[name] = median(found[name] for found in measured)
        row[name + ENDING] = median(
            p[name] / m[name] for p, m in zip(expected, measured, strict=True)
        )
    name = "first token, s"
    row["first token: % for 1 % of pace"] = 100 * median(
        s[name] / p[name] - 1 for s, p in zip(expected_slower, expected, strict=True)
    )
    return row


def at_its_pace(share: float, replays: list[Replay], calibration: Calibration) -> dict[str, Any]:
    """Whether the queue of an overloaded server is understood, whatever the machine's pace was.

    There a small error of the pace is a large one of the wait, and two calibrations do not tell it
    so well. The tokens per second of the load itself do: this is no prediction of them.
    """
    ratios: list[dict[str, float]] = []
    paces: list[float] = []
    for replay in replays:
        measured, pace = replay.measured(), calibration.pace(replay.calibrations - 1)
        found, before = replay.predicted(calibration.model(pace)), pace
        for _ in range(3):
            pace *= found["tokens per s"] / measured["tokens per s"]
            found = replay.predicted(calibration.model(pace))
        paces.append(pace / before)
        ratios.append({name: found[name] / measured[name] for name in measured})
    return {
        "K": replays[0].k,
        "load": share,
        "least pace / calibrated": min(paces),
        "greatest pace / calibrated": max(paces),
        **{
            name + ": simulated / measured": median(r[name] for r in ratios)
            for name in ("first token, s", "per token, s")
        },
    }


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
            alpha > 0: plan(make, load, Goal(tpot_s=0.01), alpha=alpha, price=2.5)
            for alpha in (0.0, 0.7)
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
    parser.add_argument("--seconds", type=float, default=4.0, help="of each load, in each round")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="at most")
    given = parser.parse_args()
    accepted = acceptance()
    with serving() as client:
        calibration = Calibration(client, accepted)
        replays = replay_loads(client, calibration, given.seconds, given.rounds)
    model = calibration.model()
    curves = model.curves
    checked = [compared(share, rounds, calibration) for (_, share), rounds in replays.items()]
    overloaded = [
        at_its_pace(share, rounds, calibration)
        for (_, share), rounds in replays.items()
        if share > 1
    ]
    ratios = [value for row in checked for name, value in row.items() if name.endswith(ENDING)]
    num_near = sum(abs(ratio - 1) <= NEAR for ratio in ratios)
    paces = [calibration.pace(number) for number in range(len(calibration) - 1)]
    for row in checked:
        print(row, flush=True)
    paper = on_paper()
    costs: Rows = [
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
            "plain step, s": curves.measured.passes[1][n],
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
    stages = ", ".join(f"{alpha:.2f} from {at}" for at, alpha in accepted.alpha_from.items())
    notes = (
        f"{num_near} of {len(ratios)} predictions are within {NEAR:.0%} of what was measured. "
        f"The bundled target and draft model in `outrider serve`, {max(STREAMS)} sequences at "
        f"most, temperature {TEMPERATURE}, prompts of {PROMPT_TOKENS} and outputs of "
        f"{OUTPUT_TOKENS} tokens on average. Curves are measured with constant numbers of streams "
        f"in {len(calibration)} calibrations between the loads; the two around a load give the "
        f"machine's pace while it ran ({min(paces):.2f} to {max(paces):.2f} of the mean time). "
        f"Acceptance of a draft: {accepted.alpha:.3f} on average, by tokens of output {stages}. "
        "'load' is the share of what the server can do by these curves. Simulation and server get "
        "the same Poisson arrivals; latencies are means over requests, all figures medians of "
        f"{len(next(iter(replays.values())))} rounds. '% for 1 % of pace': by how much the "
        "predicted wait for the first token grows when every cost does by 1 %. The client runs on "
        "the same machine. On paper: 8B target, 0.5B draft, acceptance 0.7, prompts of 512 and "
        "outputs of 256 tokens, devices of 3.35 TB/s, 990 TFLOP/s and 80 GB at 2.5 an hour, 95 of "
        "100 requests with a first token within 1 s and 10 ms per token: computed, not measured."
    )
    tables = {
        "predicted and measured": checked,
        "overload at the pace that gives the measured tokens per s": overloaded,
        "the curves": costs,
        "a fleet on paper": paper,
    }
    report.write("plan-check", "The plan against the server", tables, notes)


if __name__ == "__main__":
    main()
