"""One replica as discrete events: requests arrive at random, and passes batch those present.

The unit of time is a pass. Between two passes arrived requests are admitted; a pass carries a
chunk of the oldest unread prompt and, for every sequence that decodes, its root and K drafts. K is
the best for the batch of that moment, as an adaptive server's would be. A drafter reads a prompt
after the first token is out.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Mapping
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
    ready_s: float  # when the engine sees it
    arrived_s: float
    prompt_left: int
    context: int
    output_left: int
    num_output: int
    unread: int  # tokens of the prompt that its drafter has not seen
    first_s: float = 0.0

    @property
    def need(self) -> int:
        """Tokens of KV that it holds at its end."""
        return self.context + self.output_left

    def emit(self, num_tokens: int, now: float) -> None:
        if self.output_left == self.num_output:
            self.first_s = now
        num_tokens = min(num_tokens, self.output_left)
        self.output_left -= num_tokens
        self.context += num_tokens


def simulate(
    costs: Costs,
    load: Load,
    *,
    alpha: float = 0.0,
    alpha_from: Mapping[int, float] | None = None,
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

    `alpha` is the acceptance of a draft; 0 is plain decoding. `alpha_from`: acceptance from so many
    tokens of an output on, if it is known to change along the text (0 must be there); `alpha` is
    then its mean, from which the best K is chosen. `capacity` is how many tokens the KV holds;
    `num_draft_tokens` None: the best K of the moment; latencies of the `warm_up` share of requests
    that finish first are left out; `latency_s` passes between client and engine before a request
    can be admitted.
    """
    rng = random.Random(seed)
    if trace is None:
        trace = poisson(rng, load, 2 * num_requests + 1000)
    else:
        num_requests = len(trace)

    @cache
    def k_at(num_sequences: int) -> int:
        if num_draft_tokens is not None or not alpha:
            return num_draft_tokens or 0
        context = num_sequences * (load.prompt_tokens + load.output_tokens / 2)
        return best_k(costs, alpha, num_sequences, context, load.reading_s(costs))

    replica = _Replica(costs, k_at, alpha_from or {0: alpha}, chunk, rng)
    arrivals = deque(
        _Request(at + latency_s, at, prompt, 0, out, out, prompt) for at, prompt, out in trace
    )
    waiting: deque[_Request] = deque()
    found = Outcome()
    while found.num_requests < num_requests:
        while arrivals and arrivals[0].ready_s <= replica.now:
            waiting.append(arrivals.popleft())
        replica.admit(waiting, max_sequences, capacity)
        if not replica.running:
            replica.now = arrivals[0].ready_s
            continue
        seconds = replica.step()
        found.busy_s += seconds
        found.batch_sum += len(replica.running) * seconds
        replica.finish(found, int(num_requests * warm_up))
        if len(waiting) > OVERRUN * max_sequences:
            found.is_stable = False
            break
    found.duration_s = replica.now
    return found


@dataclass(slots=True)
class _Replica:
    """The requests of a replica between two passes, and its clock."""

    costs: Costs
    k_at: Callable[[int], int]  # drafts per step, by the number of sequences that decode
    alphas: Mapping[int, float]  # acceptance from so many tokens of an output on
    chunk: int
    rng: random.Random
    now: float = 0.0
    running: list[_Request] = field(default_factory=list)

    def admit(self, waiting: deque[_Request], max_sequences: int, capacity: float) -> None:
        """Starts waiting requests in their order, as long as there is room."""
        held = sum(request.need for request in self.running)
        while waiting and len(self.running) < max_sequences:
            if self.running and held + waiting[0].need > capacity:
                break
            held += waiting[0].need
            self.running.append(waiting.popleft())

    def step(self) -> float:
        """One pass and its drafts; returns the seconds they take."""
        decoding = [request for request in self.running if not request.prompt_left]
        prefilling = [request for request in self.running if request.prompt_left]
        k = self.k_at(len(decoding)) if decoding else 0
        # An output's last token is never a draft.
        drafts = [min(k, request.output_left - 1) for request in decoding]
        num_tokens = len(decoding) + sum(drafts) + _read(prefilling, self.chunk)
        context = float(sum(request.context for request in decoding))
        seconds = self.costs.pass_s(num_tokens, context, len(self.running))
        seconds += self.costs.draft_s(len(decoding), k)
        if k and (unread := sum(request.unread for request in decoding)):
            seconds += self.costs.read_s(unread)
            for request in decoding:
                request.unread = 0
        self.now += seconds
        for request, num_drafts in zip(decoding, drafts, strict=True):
            request.emit(1 + self._accepted(request, num_drafts), self.now)
        for request in prefilling:
            if not request.prompt_left:  # a prompt's last chunk gives the first token
                request.emit(1, self.now)
        return seconds

    def _accepted(self, request: _Request, num_drafts: int) -> int:
        num_output = request.num_output - request.output_left
        alpha = self.alphas[max(start for start in self.alphas if start <= num_output)]
        count = 0
        while count < num_drafts and self.rng.random() < alpha:
            count += 1
        return count

    def finish(self, found: Outcome, num_warm_up: int) -> None:
        """Counts the finished requests in `found` and removes them."""
        for request in self.running:
            if request.output_left == 0:
                found.num_requests += 1
                found.num_tokens += request.num_output
                if found.num_requests <= num_warm_up:
                    continue
                found.ttft_s.append(request.first_s - request.arrived_s)
                if request.num_output > 1:
                    found.tpot_s.append((self.now - request.first_s) / (request.num_output - 1))
        self.running = [request for request in self.running if request.output_left]


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


def percentile(values: Seq[float], share: float) -> float:
    """The smallest value that `share` of all do not exceed; 0 of nothing."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0
