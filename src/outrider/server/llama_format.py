"""What llama-server says about a completion and about itself, for its routes and for `verbose`."""

from __future__ import annotations

from typing import Any

from outrider.server.metrics import Metrics
from outrider.server.reply import Reply


def facts(
    reply: Reply, index: int, text: str, tokens: list[int], finish: str | None
) -> dict[str, Any]:
    """A finished choice of the prompt `index`, with its whole text and all its tokens."""
    ask, usage = reply.generation.ask, reply.usage()
    word = reply.stop_text(tokens) if finish == "stop" else None
    prompt = ask.prompts[index // ask.params.n]
    return {
        "index": index,
        "content": text,
        "tokens": tokens,
        "id_slot": index,
        "stop": True,
        "model": reply.model,
        "tokens_predicted": len(tokens),
        "tokens_evaluated": len(prompt),
        "tokens_cached": usage.num_cached_tokens or 0,
        "generation_settings": settings(reply),
        "prompt": reply.texts.all(prompt),
        "has_new_line": "\n" in text,
        "truncated": False,
        "stop_type": "limit" if finish == "length" else "eos" if word is None else "word",
        "stopping_word": word or "",
        "timings": reply.timings(),
    }


def settings(reply: Reply) -> dict[str, Any]:
    """The parameters that a reply was sampled with."""
    params = reply.generation.ask.params
    bias: list[dict[str, Any]] = [
        {"token": token, "bias": value} for token, value in params.logit_bias.items()
    ]
    if params.ignore_eos:  # null is minus infinity
        bias += [{"token": token, "bias": None} for token in reply.texts.eos_ids]
    return {
        "temperature": params.temperature,
        "top_k": params.top_k,
        "top_p": params.top_p,
        "min_p": params.min_p,
        "repeat_penalty": params.repetition_penalty,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "seed": params.seed,
        "n_predict": params.max_tokens,
        "n_probs": params.logprobs or 0,
        "ignore_eos": params.ignore_eos,
        "logit_bias": bias,
        "stop": list(params.stop),
        "stream": reply.request.stream,
    }


def metrics_text(metrics: Metrics) -> bytes:
    """The metrics under llama-server's names, in Prometheus' text format.

    Written by hand: prometheus_client ends the name of every counter with `_total`.
    """
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
        "n_tokens_max": (metrics.num_longest, "Most tokens of a request."),
        "spec_decode_num_drafts_total": (metrics.num_drafts, "Drafts."),
        "spec_decode_num_draft_tokens_total": (metrics.num_draft_tokens, "Drafted tokens."),
        "spec_decode_num_accepted_tokens_total": (metrics.num_accepted_tokens, "Accepted ones."),
    }
    busy = metrics.num_sequence_steps / max(num_steps, 1)
    gauges = {
        "prompt_tokens_seconds": (_rate(num_read, prompt_s), "Mean prompt speed."),
        "predicted_tokens_seconds": (_rate(num_decoded, decode_s), "Mean speed after the first."),
        "requests_processing": (metrics.num_running, "Sequences that run."),
        "requests_deferred": (metrics.num_waiting, "Sequences that wait."),
        "n_busy_slots_per_decode": (busy, "Mean number of sequences in a step."),
    }
    return b"".join(
        f"# HELP llamacpp:{name} {text}\n# TYPE llamacpp:{name} {kind}\n"
        f"llamacpp:{name} {value:.10g}\n".encode()
        for kind, family in (("counter", counters), ("gauge", gauges))
        for name, (value, text) in family.items()
    )


def _rate(count: float, seconds: float) -> float:
    return count / seconds if seconds else 0.0
