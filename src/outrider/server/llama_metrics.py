"""The metrics under llama-server's names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

if TYPE_CHECKING:
    from outrider.server.metrics import Metrics


def llama_metrics(metrics: Metrics) -> Iterator[Metric]:
    prompt_s = metrics.total("request_prefill_time_seconds")
    decode_s = metrics.total("request_decode_time_seconds")
    num_read = metrics.num_prompt_tokens - metrics.num_cached_tokens
    num_steps = metrics.count("iteration_tokens_total") + metrics.num_embedded
    num_decoded = metrics.total("request_generation_tokens")
    num_decoded -= metrics.count("request_generation_tokens")  # first tokens come with the prompt
    counters = {
        "prompt_tokens_total": (num_read, "Prompt tokens computed."),
        "prompt_tokens_cached_total": (metrics.num_cached_tokens, "Prompt tokens not computed."),
        "prompt_seconds_total": (prompt_s, "Time for prompts."),
        "tokens_predicted_total": (metrics.num_generation_tokens, "Tokens generated."),
        "tokens_predicted_seconds_total": (decode_s, "Time for tokens after the first."),
        "n_decode_total": (num_steps, "Steps of the engine, and embeddings."),
        "spec_decode_num_drafts_total": (metrics.num_drafts, "Drafts."),
        "spec_decode_num_draft_tokens_total": (metrics.num_draft_tokens, "Drafted tokens."),
        "spec_decode_num_accepted_tokens_total": (metrics.num_accepted_tokens, "Accepted ones."),
    }
    busy = metrics.num_sequence_steps / max(num_steps, 1)
    gauges = {
        "n_tokens_max": (metrics.num_longest, "Most tokens of a request."),
        "prompt_tokens_seconds": (_rate(num_read, prompt_s), "Mean prompt speed."),
        "predicted_tokens_seconds": (_rate(num_decoded, decode_s), "Mean speed after the first."),
        "requests_processing": (metrics.num_running, "Sequences that run."),
        "requests_deferred": (metrics.num_waiting, "Sequences that wait."),
        "n_busy_slots_per_decode": (busy, "Mean number of sequences in a step."),
    }
    for name, (value, text) in counters.items():
        yield CounterMetricFamily(f"llamacpp:{name}", text, float(value))
    for name, (value, text) in gauges.items():
        yield GaugeMetricFamily(f"llamacpp:{name}", text, float(value))


def _rate(count: float, seconds: float) -> float:
    return count / seconds if seconds else 0.0
