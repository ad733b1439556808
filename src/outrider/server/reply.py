"""A reply before it has a dialect: what was generated, as numbers, texts, reasoning and calls."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from outrider.engine.engine import Completion, Result
from outrider.engine.stops import StopScanner
from outrider.server.errors import ApiError
from outrider.server.generation import Delta, Generation
from outrider.server.reading import Message, Reader, read_whole
from outrider.server.reading.source import Part
from outrider.server.request import Request
from outrider.server.texts import TokenTexts
from outrider.statistics import SpeculationStats

TOOL_CALLS = "tool_calls"


class Usage(NamedTuple):
    num_prompt_tokens: int
    num_completion_tokens: int
    num_cached_tokens: int | None  # of the prompt; None: not known yet
    num_predicted_accepted: int | None  # of the request's prediction; None: it had none
    num_predicted_rejected: int | None
    num_reasoning_tokens: int = 0  # of the completion


class Writer(Protocol):
    """A reply in one dialect, whole or as a stream of payloads."""

    id: str  # of the reply, for the log
    media_type: str  # of the stream
    done: bytes  # ends the stream

    def whole(self, results: list[Result]) -> dict[str, Any]: ...

    def delta(self, delta: Delta) -> Sequence[Any]:
        """The payloads for new tokens of a choice."""
        ...

    def end(self) -> Sequence[Any]:
        """The payloads after the last tokens."""
        ...

    def failure(self, error: ApiError) -> Any:
        """The payload for an error within the stream."""
        ...

    def frame(self, payload: Any, *, padded: bool) -> bytes: ...


class Reply:
    """What writers need."""

    def __init__(
        self,
        generation: Generation,
        request: Request,
        texts: TokenTexts,
        *,
        model: str,
        paced: bool = False,
    ) -> None:
        self.generation = generation
        self.request = request
        self.texts = texts
        self.model = model
        self.created = int(time.time())
        self.paced = paced  # every delta must become a frame
        self._readers: dict[int, Reader] = {}
        self._reasoned: list[str] = []  # the reasoning of all choices so far

    @property
    def id_length(self) -> int:
        """Of the ids of calls; 0: any."""
        manner = self.generation.ask.manner
        return manner.tools.id_length if manner is not None and manner.tools is not None else 0

    def call_id(self, prefix: str = "call_") -> str:
        if self.id_length:
            return secrets.token_hex(self.id_length)[: self.id_length]
        return prefix + secrets.token_hex(12)

    def message(self, completion: Completion) -> Message:
        """A whole choice."""
        found = read_whole(self.generation.ask.manner, completion.text)
        self._reasoned.append(found.reasoning)
        return found

    def parts(self, delta: Delta) -> list[Part]:
        """What is new in a choice of a stream."""
        manner = self.generation.ask.manner
        if manner is None:
            return [Part("text", delta.text)]
        reader = self._readers.get(delta.index)
        if reader is None:
            reader = self._readers[delta.index] = Reader(manner)
        found = reader.feed(delta.text)
        if delta.finish_reason is not None:
            found += reader.end()
        self._reasoned += [part.text for part in found if part.kind == "reasoning"]
        return found

    def finish_reason(self, reason: str | None, num_calls: int) -> str | None:
        return TOOL_CALLS if reason == "stop" and num_calls else reason

    def streamed_finish(self, delta: Delta) -> str | None:
        """The reason why a choice of a stream ended."""
        reader = self._readers.get(delta.index)
        return self.finish_reason(delta.finish_reason, 0 if reader is None else reader.num_calls)

    def stop_text(self, tokens: Sequence[int]) -> str | None:
        """The stop string that ended a choice of these tokens, if one did."""
        stops = self.generation.ask.params.stop
        return StopScanner(stops).feed(self.texts.plain(tokens))[1] if stops else None

    def stopped_by(self, reason: str | None, tokens: Sequence[int]) -> str | int | None:
        """The stop string or the token that ended a choice of these tokens, if one did."""
        if reason != "stop":
            return None
        text = self.stop_text(tokens)
        return text if text is not None or not tokens else tokens[-1]

    def usage(self) -> Usage:
        """The number of tokens so far."""
        generation = self.generation
        results = [result for result in generation.results if result is not None]
        cached = accepted = rejected = None
        num_reasoning = 0
        if len(results) == len(generation.results):
            cached = sum(result.num_cached_tokens for result in results)
            if any(self._reasoned):
                num_reasoning = self.texts.count("".join(self._reasoned))
            drafting = generation.drafting
            if generation.ask.prediction and drafting is not None:
                accepted = drafting.num_predicted_accepted
                rejected = drafting.num_predicted - accepted
        return Usage(
            sum(map(len, generation.ask.prompts)),
            generation.num_completion_tokens,
            cached,
            accepted,
            rejected,
            num_reasoning,
        )

    def timings(self) -> dict[str, Any]:
        """Under llama-server's names."""
        usage = self.usage()
        prompt_s, decode_s = self.seconds()
        num_new = usage.num_prompt_tokens - (usage.num_cached_tokens or 0)
        num_generated = usage.num_completion_tokens
        num_decoded = max(num_generated - self.generation.ask.num_choices, 0)  # after the first
        results = [result for result in self.generation.results if result is not None]
        return {
            "cache_n": usage.num_cached_tokens or 0,
            "prompt_n": num_new,
            "prompt_ms": prompt_s * 1e3,
            "prompt_per_token_ms": prompt_s * 1e3 / max(num_new, 1),
            "prompt_per_second": num_new / max(prompt_s, 1e-9),
            "predicted_n": num_generated,
            "predicted_ms": decode_s * 1e3,
            "predicted_per_token_ms": decode_s * 1e3 / max(num_decoded, 1),
            "predicted_per_second": num_decoded / decode_s if decode_s else 0.0,
            "draft_n": sum(result.stats.num_drafted for result in results),
            "draft_n_accepted": sum(result.stats.num_accepted for result in results),
        }

    def seconds(self) -> tuple[float, float]:
        """For the prompt and for the completion of the first finished request."""
        result = next((r for r in self.generation.results if r is not None), None)
        if result is None or result.times.first_token_s is None:
            return 0.0, 0.0
        times = result.times
        assert times.first_token_s is not None
        begun = times.arrived_s if times.admitted_s is None else times.admitted_s
        ended = times.first_token_s if times.last_token_s is None else times.last_token_s
        return times.first_token_s - begun, ended - times.first_token_s

    def figures(self) -> dict[str, Any]:
        """The speculation figures of this request, if requested, under vLLM's names."""
        if self.request.metrics is None:
            return {}
        stats = SpeculationStats()
        for result in self.generation.results:
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
        drafting = self.generation.drafting
        if self.request.metrics == "detailed" and drafting is not None:
            found["per_step_drafted"] = drafting.drafted
            found["per_step_accepted"] = drafting.accepted
        return {"metrics": {"speculative_decoding": found}}
