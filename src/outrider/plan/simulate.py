"""One replica as discrete events: requests arrive at random, and passes batch those present.

The unit of time is a pass. Between two passes arrived requests are admitted; a pass carries a
chunk of the oldest unread prompt and, for every sequence that decodes, its root and K drafts. K is
the best for the batch of that moment, as an adaptive server's would be. A drafter reads a prompt
after the first token is out.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections import deque
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

from outrider.config import EngineConfig
from outrider.errors import ConfigError
from outrider.plan.costs import Costs, best_k

WARM_UP = 0.2  # the first fifth of the requests met a replica that was not full yet
OVERRUN = 8  # batches of requests waiting: more arrive than can be served


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Requests per second, each with so many tokens on average."""

    rate: float
    prompt_tokens: int
    output_tokens: int

    def __post_init__(self) -> None:
        if self.rate <= 0 or self.prompt_tokens < 1 or self.output_tokens < 1:
            raise ConfigError("a load needs a positive rate, prompts and outputs")

    def reading_s(self, costs: Costs) -> float:
        """A drafter's reading of a prompt, for each token that comes out."""
        return costs.read_s(self.prompt_tokens) / self.output_tokens


class Arrival(NamedTuple):
    """One request of a trace."""

    at_s: float
    prompt_tokens: int
    output_tokens: int


@dataclass(slots=True)
class Outcome:
    """What a simulated replica did. Latencies are seconds, one per request after the warm-up."""

    num_requests: int = 0
    num_tokens: int = 0
    duration_s: float = 0.0
    busy_s: float = 0.0
    ttft_s: list[float] = field(default_factory=list)
    tpot_s: list[float] = field(default_factory=list)
    batch_sum: float = 0.0  # over passes, weighted by their time
    is_stable: bool = True  # whether the queue stayed bounded

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.duration_s if self.duration_s else 0.0

    @property
    def utilisation(self) -> float:
        return self.busy_s / self.duration_s if self.duration_s else 0.0

    @property
    def mean_batch(self) -> float:
        return self.batch_sum / self.busy_s if self.busy_s else 0.0


@dataclass(slots=True, eq=False)
class _Request:
    arrived_s: float
    prompt_left: int
    context: int
    output_left: int
    num_output: int
    unread: int  # tokens of the prompt that its drafter has not seen
    first_s: float = 0.0


def simulate(
    costs: Costs,
    load: Load,
    *,
    alpha: float = 0.0,
    alpha_from: Mapping[int, float] | None = None,
    speculate: bool = True,
    max_sequences: int = EngineConfig.max_sequences,
    capacity: float = float("inf"),
    chunk: int = 512,
    num_requests: int = 400,
    seed: int = 0,
    num_draft_tokens: int | None = None,
    trace: Seq[Arrival] | None = None,
    warm_up: float = WARM_UP,
    latency_s: float = 0.0,
) -> Outcome:
    """Runs until `num_requests` have finished, or all of `trace`, whose mean is then the load.

    `alpha_from`: acceptance from so many tokens of an output on, where it is known to change along
    the text (0 must be there); `alpha` is then its mean, which the best K is chosen by.
    `capacity` is how many tokens the KV holds; `num_draft_tokens` None: the best K of the moment;
    latencies of the `warm_up` share of requests that finish first are left out; `latency_s` passes
    between client and engine before a request can be admitted.
    """
    rng = random.Random(seed)
    if trace is None:
        trace = poisson(rng, load, 2 * num_requests + 1000)
    else:
        num_requests = len(trace)
    arrivals = deque(_Request(at, prompt, 0, out, out, prompt) for at, prompt, out in trace)
    waiting: deque[_Request] = deque()
    running: list[_Request] = []
    found = Outcome()
    now = 0.0
    alphas = alpha_from or {0: alpha}
    starts = sorted(alphas)

    @cache
    def k_at(num_sequences: int) -> int:
        if num_draft_tokens is not None:
            return num_draft_tokens
        if not (speculate and alpha):
            return 0
        context = num_sequences * (load.prompt_tokens + load.output_tokens / 2)
        return best_k(costs, alpha, num_sequences, context, load.reading_s(costs))

    while found.num_requests < num_requests:
        while arrivals and arrivals[0].arrived_s + latency_s <= now:
            waiting.append(arrivals.popleft())
        held = sum(r.context + r.output_left for r in running)
        while waiting and len(running) < max_sequences:
            need = waiting[0].context + waiting[0].output_left
            if running and held + need > capacity:
                break
            held += need
            running.append(waiting.popleft())
        if not running:
            now = arrivals[0].arrived_s + latency_s
            continue
        decoding = [r for r in running if not r.prompt_left]
        prefilling = [r for r in running if r.prompt_left]
        k = k_at(len(decoding)) if decoding else 0
        # An output's last token is never a draft.
        drafts = [min(k, r.output_left - 1) for r in decoding]
        num_tokens = len(decoding) + sum(drafts) + _read(prefilling, chunk)
        context = float(sum(r.context for r in decoding))
        seconds = costs.pass_s(num_tokens, context, len(running)) + costs.draft_s(len(decoding), k)
        if k and (unread := sum(r.unread for r in decoding)):
            seconds += costs.read_s(unread)
            for request in decoding:
                request.unread = 0
        now += seconds
        found.busy_s += seconds
        found.batch_sum += len(running) * seconds
        for request, num_drafts in zip(decoding, drafts, strict=True):
            num_output = request.num_output - request.output_left
            likely = alphas[starts[bisect_right(starts, num_output) - 1]]
            _emit(request, 1 + _accepted(rng, likely, num_drafts), now)
        for request in prefilling:
            if not request.prompt_left:  # a prompt's last chunk gives the first token
                _emit(request, 1, now)
        running = _finish(running, found, now, int(num_requests * warm_up))
        if len(waiting) > OVERRUN * max_sequences:
            found.is_stable = False
            break
    found.duration_s = now
    return found


def poisson(rng: random.Random, load: Load, num_requests: int) -> list[Arrival]:
    """Poisson arrivals; outputs vary as real ones do (exponential), prompts by a half."""
    found: list[Arrival] = []
    now = 0.0
    for _ in range(num_requests):
        now += rng.expovariate(load.rate)
        prompt = max(1, round(load.prompt_tokens * rng.uniform(0.5, 1.5)))
        output = max(1, round(rng.expovariate(1 / load.output_tokens)))
        found.append(Arrival(now, prompt, output))
    return found


def _read(running: Seq[_Request], chunk: int) -> int:
    """Reads up to `chunk` prompt tokens, oldest request first; returns how many."""
    left = chunk
    for request in running:
        if not left:
            break
        taken = min(left, request.prompt_left)
        request.prompt_left -= taken
        request.context += taken
        left -= taken
    return chunk - left


def _accepted(rng: random.Random, alpha: float, k: int) -> int:
    count = 0
    while count < k and rng.random() < alpha:
        count += 1
    return count


def _emit(request: _Request, num_tokens: int, now: float) -> None:
    if request.output_left == request.num_output:
        request.first_s = now
    num_tokens = min(num_tokens, request.output_left)
    request.output_left -= num_tokens
    request.context += num_tokens


def _finish(
    running: list[_Request], found: Outcome, now: float, num_warm_up: int
) -> list[_Request]:
    for request in running:
        if request.output_left == 0:
            found.num_requests += 1
            found.num_tokens += request.num_output
            if found.num_requests <= num_warm_up:
                continue
            found.ttft_s.append(request.first_s - request.arrived_s)
            if request.num_output > 1:
                found.tpot_s.append((now - request.first_s) / (request.num_output - 1))
    return [request for request in running if request.output_left]


def percentile(values: Seq[float], share: float) -> float:
    """The smallest value that `share` of all do not exceed; 0 of nothing."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0
