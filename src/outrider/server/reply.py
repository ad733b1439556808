"""The bodies of replies: choices, chunks, usage and speculation figures in OpenAI's format.

Completions and chat completions are two dialects; the rest of a reply is the same for both.
"""

from __future__ import annotations

import time
from typing import Any, Protocol

from outrider.engine.engine import Completion, Result
from outrider.events import TokenLogprob
from outrider.server.generation import Ask, Delta, Drafting, Generation
from outrider.server.texts import TokenTexts
from outrider.statistics import SpeculationStats


class Dialect(Protocol):
    """The format of a choice on one route, whole or in parts."""

    name: str  # of the whole reply
    chunk_name: str

    def choice(self, index: int, completion: Completion, result: Result) -> dict[str, Any]: ...

    def delta(self, delta: Delta, *, first: bool) -> dict[str, Any]: ...


class ChatDialect:
    name = "chat.completion"
    chunk_name = "chat.completion.chunk"

    def __init__(self, texts: TokenTexts, *, logprobs: bool) -> None:
        self._texts = texts
        self._logprobs = logprobs

    def choice(self, index: int, completion: Completion, result: Result) -> dict[str, Any]:
        return {
            "index": index,
            "message": {"role": "assistant", "content": completion.text, "refusal": None},
            "logprobs": self._scored(completion.logprobs or []),
            "finish_reason": completion.finish_reason,
        }

    def delta(self, delta: Delta, *, first: bool) -> dict[str, Any]:
        gained: dict[str, Any] = {"content": delta.text}
        return {
            "index": delta.index,
            "delta": {"role": "assistant", **gained} if first else gained,
            "logprobs": self._scored(delta.logprobs),
            "finish_reason": delta.finish_reason,
        }

    def _scored(self, logprobs: list[TokenLogprob]) -> dict[str, Any] | None:
        return self._texts.chat(logprobs) if self._logprobs else None


class CompletionDialect:
    """`echo` puts the prompt before its completion, and its log-probabilities before theirs."""

    name = "text_completion"
    chunk_name = "text_completion"

    def __init__(
        self, texts: TokenTexts, ask: Ask, *, echo: list[str] | None, echo_only: bool
    ) -> None:
        """`echo` are the texts of the prompts; `echo_only` leaves out the generated text."""
        self._texts = texts
        self._ask = ask
        self._echo = echo
        self._echo_only = echo_only
        self._offsets: dict[int, int] = {}  # of the next token of each streamed choice

    def choice(self, index: int, completion: Completion, result: Result) -> dict[str, Any]:
        logprobs, tokens = completion.logprobs or [], completion.tokens
        text, reason = completion.text, completion.finish_reason
        if self._echo_only:
            logprobs, tokens, text, reason = [], [], "", "length"
        return self._worded(index, text, tokens, logprobs, result.prompt_logprobs, reason, True)

    def delta(self, delta: Delta, *, first: bool) -> dict[str, Any]:
        return self._worded(
            delta.index,
            delta.text,
            delta.tokens,
            delta.logprobs,
            delta.prompt_logprobs,
            delta.finish_reason,
            first,
        )

    def _worded(
        self,
        index: int,
        text: str,
        tokens: list[int],
        logprobs: list[TokenLogprob],
        prompt_logprobs: list[TokenLogprob] | None,
        finish_reason: str | None,
        first: bool,
    ) -> dict[str, Any]:
        scored: list[TokenLogprob | None] = [*logprobs]
        if self._echo is not None and first:
            prompt = self._ask.prompts[index // self._ask.params.n]
            text = self._echo[index // self._ask.params.n] + text
            tokens = [*prompt, *tokens]
            # The first token has no score. Later samples share the scores of the prompt.
            before: list[TokenLogprob | None] = [None] * len(prompt)
            before[1:] = prompt_logprobs or before[1:]
            scored = [*before, *scored]
        legacy = None
        if self._ask.params.logprobs is not None:
            offset = self._offsets.get(index, 0)
            legacy = self._texts.legacy(scored, tokens, offset)
            self._offsets[index] = offset + sum(map(len, legacy["tokens"]))
        return {"index": index, "text": text, "logprobs": legacy, "finish_reason": finish_reason}


class Reply:
    """The reply to a request in one dialect, whole or in chunks."""

    def __init__(
        self,
        dialect: Dialect,
        generation: Generation,
        *,
        id: str,
        model: str,
        metrics: str | None,
        predicted: bool,
    ) -> None:
        self._dialect = dialect
        self._generation = generation
        self._head = {"id": id, "created": int(time.time()), "model": model}
        self._metrics = metrics
        self._predicted = predicted
        self._begun: set[int] = set()

    def whole(self, results: list[Result]) -> dict[str, Any]:
        n = self._generation.ask.params.n
        choices = [
            self._dialect.choice(i * n + j, completion, result)
            for i, result in enumerate(results)
            for j, completion in enumerate(result.completions)
        ]
        return {
            "object": self._dialect.name,
            **self._head,
            "choices": choices,
            "usage": self.usage(),
            "system_fingerprint": None,
            **self.figures(),
        }

    def chunk(self, delta: Delta) -> dict[str, Any]:
        first = delta.index not in self._begun
        self._begun.add(delta.index)
        choice = self._dialect.delta(delta, first=first)
        return {"object": self._dialect.chunk_name, **self._head, "choices": [choice]}

    def last_chunk(self, *, usage: bool) -> dict[str, Any]:
        """A chunk without choices, with the usage and figures of a stream."""
        head = {"object": self._dialect.chunk_name, **self._head, "choices": []}
        return head | ({"usage": self.usage()} if usage else {}) | self.figures()

    def usage(self) -> dict[str, Any]:
        """The number of tokens so far; with details once all results have arrived."""
        generation = self._generation
        num_prompt = sum(map(len, generation.ask.prompts))
        num_completion = generation.num_completion_tokens
        usage: dict[str, Any] = {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_completion,
            "total_tokens": num_prompt + num_completion,
        }
        results = [result for result in generation.results if result is not None]
        if len(results) == len(generation.results):
            cached = sum(result.num_cached_tokens for result in results)
            usage["prompt_tokens_details"] = {"cached_tokens": cached}
            if self._predicted and generation.drafting is not None:
                usage["completion_tokens_details"] = _predicted(generation.drafting)
        return usage

    def figures(self) -> dict[str, Any]:
        """The speculation figures of this request, if requested, under vLLM's names."""
        if self._metrics is None:
            return {}
        stats = SpeculationStats()
        for result in self._generation.results:
            if result is not None:
                stats.merge(result.stats)
        found: dict[str, Any] = {
            "mean_acceptance_length": 1 + stats.num_accepted / max(stats.num_proposals, 1),
            "draft_acceptance_rate": stats.acceptance_rate,
            "acceptance_histogram": list(stats.accepted_lengths),
            "num_spec_steps": stats.num_proposals,
            "num_accepted_draft_tokens": stats.num_accepted,
            "num_draft_tokens": stats.num_drafted,
            "num_spec_tokens": max(len(stats.accepted_lengths) - 1, 0),
        }
        drafting = self._generation.drafting
        if self._metrics == "detailed" and drafting is not None:
            found["per_step_drafted"] = drafting.drafted
            found["per_step_accepted"] = drafting.accepted
        return {"metrics": {"speculative_decoding": found}}


def _predicted(drafting: Drafting) -> dict[str, int]:
    accepted = drafting.num_predicted_accepted
    return {
        "accepted_prediction_tokens": accepted,
        "rejected_prediction_tokens": drafting.num_predicted - accepted,
    }
