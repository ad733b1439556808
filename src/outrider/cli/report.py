"""A finished request in figures: one dim line for people, one JSON object for programs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outrider.engine.engine import Completion, Engine, Result
    from outrider.origins import Spelling

# Control characters in a model's text could control the terminal; newline and tab are harmless.
_CONTROLS = {c: "\ufffd" for c in [*range(32), *range(127, 160)] if chr(c) not in "\n\t"}


def printable(text: str) -> str:
    """Text that is safe to show on a terminal."""
    return text.translate(_CONTROLS)


def prompt_s(result: Result) -> float:
    """Seconds from the start to the first token: the pass that reads the prompt."""
    times = result.times
    return (times.first_token_s or 0.0) - (times.admitted_s or times.arrived_s)


def decoding_rate(result: Result) -> float | None:
    """Tokens per second after the first of each completion; None for outputs without more."""
    times = result.times
    seconds = (times.last_token_s or 0.0) - (times.first_token_s or 0.0)
    num_tokens = result.stats.num_tokens - len(result.completions)
    return num_tokens / seconds if num_tokens > 0 and seconds > 0 else None


def speed(num_tokens: int, rate: float | None, prompt: str) -> list[str]:
    """The prompt apart from the rest: a short output's time is mostly the prompt's."""
    rate_text = "too short for tok/s" if rate is None else f"{rate:.1f} tok/s after the prompt"
    return [*([prompt] if prompt else []), f"{num_tokens} tokens", rate_text]


def summary(result: Result, *, sampled: bool) -> str:
    """Tokens, speed and acceptance; the seed if the output was sampled."""
    stats = result.stats
    prompt = f"prompt of {len(result.prompt_tokens)} in {prompt_s(result):.2f} s"
    parts = speed(stats.num_tokens, decoding_rate(result), prompt)
    if stats.num_proposals:
        parts += [
            f"acceptance length {stats.acceptance_length:.2f}",
            f"{stats.tokens_per_pass:.2f} tokens per target pass",
        ]
    else:
        parts.append("nothing was drafted")
    if sampled:
        parts.append(f"seed {result.seed}")
    return " · ".join(parts)


def record(result: Result, engine: Engine, model: str, spell: Spelling) -> dict[str, Any]:
    """The JSON object of `outrider generate --json`; with n > 1 also all `completions`."""
    stats = result.stats
    first = result.completions[0]
    entry = {
        **_completion(first, spell),
        "model": model,
        "proposer": engine.default.proposer,
        "num_draft_tokens": engine.default.num_draft_tokens,
        "verifier": engine.default.verifier,
        "seed": result.seed,
        "num_prompt_tokens": len(result.prompt_tokens),
        "num_tokens": stats.num_tokens,
        "tokens_per_s": stats.tokens_per_s,
        "prompt_s": prompt_s(result),
        "decoding_tokens_per_s": decoding_rate(result),
        "acceptance_length": stats.acceptance_length,
        "acceptance_rate": stats.acceptance_rate,
        "tokens_per_pass": stats.tokens_per_pass,
        "conditional_acceptance": stats.conditional_acceptance,
        "unconditional_acceptance": stats.unconditional_acceptance,
        "num_passes": stats.num_steps,
        "num_drafted": stats.num_drafted,
        "num_accepted": stats.num_accepted,
        "time": {
            "draft_s": stats.draft_s,
            "verify_s": stats.verify_s,
            "other_s": stats.other_s,
        },
    }
    if len(result.completions) > 1:
        entry["completions"] = [_completion(c, spell) for c in result.completions]
    return entry


def _completion(completion: Completion, spell: Spelling) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "text": completion.text,
        "tokens": completion.tokens,
        "finish_reason": completion.finish_reason,
    }
    if completion.logprobs is not None:
        entry["logprobs"] = [
            {
                "token": one.token,
                "text": spell(one.token),
                "logprob": one.logprob,
                "top": [
                    {"token": token, "text": spell(token), "logprob": value}
                    for token, value in one.top.items()
                ],
            }
            for one in completion.logprobs
        ]
    return entry
