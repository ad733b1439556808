"""Prometheus metrics under vLLM's names, so that dashboards and load generators for vLLM work, and
under llama-server's.

The counters are plain integers on the server's event loop and become Prometheus types only when
/metrics is read: a step costs an addition per counter, without a lock.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from outrider.engine.engine import RequestTimes
from outrider.events import StepEvent, StepReport
from outrider.server.llama_metrics import llama_metrics

if TYPE_CHECKING:
    from outrider.engine.engine import Engine
    from outrider.learn.learner import Learner

_SHORT_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
_LONG_S = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640)
_TOKENS = tuple(float(1 << i) for i in range(18))

_HISTOGRAMS = {
    "time_to_first_token_seconds": ("Time to the first token.", _SHORT_S + _LONG_S[9:]),
    "inter_token_latency_seconds": ("Time per token after the first.", _SHORT_S),
    "e2e_request_latency_seconds": ("Arrival to last token.", _LONG_S),
    "request_queue_time_seconds": ("Waiting for a place in the batch.", _SHORT_S + _LONG_S[9:]),
    "request_prefill_time_seconds": ("First run to first token.", _SHORT_S + _LONG_S[9:]),
    "request_decode_time_seconds": ("First to last token.", _LONG_S),
    "request_inference_time_seconds": ("First run to last token.", _LONG_S),
    "iteration_tokens_total": ("Confirmed tokens of a step, all sequences.", _TOKENS),
    "request_params_n": ("Completions that a request asks for.", (1.0, 2.0, 5.0, 10.0, 20.0)),
    "request_params_max_tokens": ("Most tokens that a request asks for.", _TOKENS),
    "request_prompt_tokens": ("Tokens of a prompt.", _TOKENS),
    "request_generation_tokens": ("Tokens of a completion.", _TOKENS),
}


class _Histogram:
    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float, count: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += count
        self.total += value * count

    def buckets(self) -> list[tuple[str, float]]:
        names = [*(str(float(bound)) for bound in self.bounds), "+Inf"]
        return list(zip(names, map(float, accumulate(self.counts)), strict=True))


class Metrics:
    """All metrics of one server. Call it on the event loop only."""

    def __init__(self, model_name: str) -> None:
        self._labels = {"model_name": model_name}
        self._engine: Engine | None = None
        self.learner: Learner | None = None
        self._histograms = {name: _Histogram(bounds) for name, (_, bounds) in _HISTOGRAMS.items()}
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.num_generation_tokens = 0
        self.finished: Counter[str] = Counter()
        self.num_drafts = 0
        self.num_draft_tokens = 0
        self.num_accepted_tokens = 0
        self.accepted_at: list[int] = []  # by position
        self.num_embedded = 0  # texts
        self.num_longest = 0  # tokens of the longest request, with its prompt
        self.num_sequence_steps = 0  # sequences that got tokens, summed over all steps
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def watch(self, engine: Engine) -> None:
        """Sets the engine whose queue and KV the gauges show."""
        self._engine = engine
        engine.observers.append(self._count_iteration)

    def _count_iteration(self, report: StepReport) -> None:
        """Called by the engine's thread: nothing else touches these figures but to read them."""
        num_tokens = sum([len(event.tokens) for event in report.events])
        self.num_sequence_steps += len(report.events)
        self._histograms["iteration_tokens_total"].add(num_tokens)

    def count_asked(self, n: int, max_tokens: int) -> None:
        """Counts the parameters of a request."""
        self._histograms["request_params_n"].add(n)
        self._histograms["request_params_max_tokens"].add(max_tokens)

    def count_pace(self, seconds: float, num_tokens: int) -> None:
        """Counts `num_tokens` that a sequence got `seconds` after its previous tokens."""
        if num_tokens:
            self._histograms["inter_token_latency_seconds"].add(seconds / num_tokens, num_tokens)

    def count_steps(self, events: list[StepEvent]) -> int:
        """Counts steps of one sequence; returns the number of their tokens."""
        num_tokens = sum([len(event.tokens) for event in events])
        self.num_generation_tokens += num_tokens
        for event in events:
            if event.draft_tokens:
                num_accepted = len(event.path)
                self.num_drafts += 1
                self.num_draft_tokens += len(event.draft_tokens)
                self.num_accepted_tokens += num_accepted
                while len(self.accepted_at) < num_accepted:
                    self.accepted_at.append(0)
                for position in range(num_accepted):
                    self.accepted_at[position] += 1
        return num_tokens

    def count_request(
        self, times: RequestTimes, num_prompt_tokens: int, num_cached: int, num_outputs: list[int]
    ) -> None:
        """Counts a finished request."""
        self.num_prompt_tokens += num_prompt_tokens
        self.num_cached_tokens += num_cached
        observe = self._histograms
        observe["request_prompt_tokens"].add(num_prompt_tokens)
        for num_tokens in num_outputs:
            self.num_longest = max(self.num_longest, num_prompt_tokens + num_tokens)
            observe["request_generation_tokens"].add(num_tokens)
        admitted, first, last = times.admitted_s, times.first_token_s, times.last_token_s
        if admitted is None or first is None or last is None:
            return
        observe["time_to_first_token_seconds"].add(first - times.arrived_s)
        observe["e2e_request_latency_seconds"].add(last - times.arrived_s)
        observe["request_queue_time_seconds"].add(admitted - times.arrived_s)
        observe["request_prefill_time_seconds"].add(first - admitted)
        observe["request_decode_time_seconds"].add(last - first)
        observe["request_inference_time_seconds"].add(last - admitted)

    def count_embedded(self, num_tokens: int) -> None:
        """Counts a text that was embedded: a prompt without a completion."""
        self.num_prompt_tokens += num_tokens
        self.num_embedded += 1

    def total(self, name: str) -> float:
        """The sum of what a histogram has counted."""
        return self._histograms[name].total

    def count(self, name: str) -> int:
        """How many values a histogram has counted."""
        return sum(self._histograms[name].counts)

    @property
    def num_running(self) -> int:
        return len(self._engine.scheduler.running) if self._engine else 0

    @property
    def num_waiting(self) -> int:
        return len(self._engine.scheduler.waiting) if self._engine else 0

    def count_finished(self, reasons: Iterable[str]) -> None:
        self.finished.update(reasons)

    def text(self) -> bytes:
        """The text of /metrics."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """All metrics as Prometheus types; the interface of a Prometheus collector."""
        yield from self._gauges()
        counters = {
            "prompt_tokens": self.num_prompt_tokens,
            "generation_tokens": self.num_generation_tokens,
            "prompt_tokens_cached": self.num_cached_tokens,
            "prefix_cache_queries": self.num_prompt_tokens,
            "prefix_cache_hits": self.num_cached_tokens,
            "spec_decode_num_drafts": self.num_drafts,
            "spec_decode_num_draft_tokens": self.num_draft_tokens,
            "spec_decode_num_accepted_tokens": self.num_accepted_tokens,
            "num_preemptions": self._engine.scheduler.num_preemptions if self._engine else 0,
        }
        for name, value in counters.items():
            yield self._counter(name, {(): float(value)})
        yield self._counter(
            "spec_decode_num_accepted_tokens_per_pos",
            {(str(i),): float(count) for i, count in enumerate(self.accepted_at)},
            "position",
        )
        reasons = {"stop", "length", "abort", "error", *self.finished}
        yield self._counter(
            "request_success",
            {(reason,): float(self.finished[reason]) for reason in sorted(reasons)},
            "finished_reason",
        )
        yield self._executor_faults()
        yield from self._learning()
        for name, histogram in self._histograms.items():
            family = HistogramMetricFamily(
                f"vllm:{name}", _HISTOGRAMS[name][0], labels=list(self._labels)
            )
            labels = list(self._labels.values())
            family.add_metric(labels, histogram.buckets(), sum_value=histogram.total)
            yield family
        yield from llama_metrics(self)

    def _counter(
        self, name: str, values: dict[tuple[str, ...], float], *labels: str
    ) -> CounterMetricFamily:
        family = CounterMetricFamily(
            f"vllm:{name}", name.replace("_", " "), labels=[*self._labels, *labels]
        )
        for label_values, value in values.items():
            family.add_metric([*self._labels.values(), *label_values], value)
        return family

    def _executor_faults(self) -> Metric:
        family = CounterMetricFamily(
            "outrider_executor_faults",
            "Calls of a fast executor that failed; the python executor ran their steps",
            labels=[*self._labels, "executor"],
        )
        executors = self._engine.executors if self._engine is not None else None
        for executor in executors.fast if executors is not None else ():
            labels = [*self._labels.values(), executor.name]
            family.add_metric(labels, float(executors.faults[executor.name] if executors else 0))
        return family

    def _learning(self) -> Iterator[Metric]:
        """What `--learn` has done; without it, nothing."""
        learner = self.learner
        labels = list(self._labels)
        values = list(self._labels.values())
        positions = CounterMetricFamily(
            "outrider_learn_positions",
            "Tokens of answers seen for learning, by what became of their drafts",
            labels=[*labels, "outcome"],
        )
        outcomes = ("accepted", "rejected", "undrafted")
        for outcome in outcomes:
            count = 0 if learner is None else learner.positions[outcome]
            positions.add_metric([*values, outcome], float(count))
        yield positions
        counts = {
            "trainings": ("Trainings of the drafting head", "num_trainings"),
            "swaps": ("Changes to newly trained weights", "num_swaps"),
            "rollbacks": ("Changes back to earlier weights", "num_rollbacks"),
        }
        for name, (text, attribute) in counts.items():
            family = CounterMetricFamily(f"outrider_learn_{name}", text, labels=labels)
            family.add_metric(values, float(getattr(learner, attribute, 0)))
            yield family
        kept = GaugeMetricFamily(
            "outrider_learn_kept_tokens", "Token ids in memory for learning", labels=labels
        )
        kept.add_metric(values, float(0 if learner is None else learner.num_kept_tokens))
        yield kept

    def _gauges(self) -> Iterator[Metric]:
        engine = self._engine
        values = {
            "num_requests_running": self.num_running,
            "num_requests_waiting": self.num_waiting,
            "kv_cache_usage_perc": engine.kv.usage if engine else 0.0,
        }
        for name, value in values.items():
            family = GaugeMetricFamily(
                f"vllm:{name}", name.replace("_", " "), labels=list(self._labels)
            )
            family.add_metric(list(self._labels.values()), float(value))
            yield family
        waiting = GaugeMetricFamily(
            "vllm:num_requests_waiting_by_reason",
            "Requests in the queue. They all wait for a place in the batch.",
            labels=[*self._labels, "reason"],
        )
        waiting.add_metric([*self._labels.values(), "capacity"], values["num_requests_waiting"])
        yield waiting
        yield self._cache_config()

    def _cache_config(self) -> Metric:
        kv = None if self._engine is None else self._engine.kv
        num_tokens = 0 if kv is None else kv.num_blocks * kv.block_size
        longest = 0 if self._engine is None else self._engine.scheduler.max_positions
        found = {
            "kv_cache_size_tokens": num_tokens,
            "kv_cache_max_concurrency": num_tokens / longest if longest else 0,
            "block_size": 0 if kv is None else kv.block_size,
            "enable_prefix_caching": kv is not None and kv.prefix_caching,
            "num_gpu_blocks": 0 if kv is None else kv.num_blocks,
        }
        labels = self._labels | {name: str(value) for name, value in found.items()}
        family = GaugeMetricFamily(
            "vllm:cache_config_info", "The KV cache, as labels.", labels=list(labels)
        )
        family.add_metric(list(labels.values()), 1.0)
        return family
