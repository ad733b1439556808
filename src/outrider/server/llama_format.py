"""What llama-server says about a completion, for its routes and for `verbose`."""

from __future__ import annotations

from typing import Any

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
