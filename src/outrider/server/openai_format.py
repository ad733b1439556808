"""What OpenAI's completions and chat completions have in common: head, usage, chunks."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

from outrider.engine.engine import Completion, Result
from outrider.server.errors import ApiError
from outrider.server.generation import Delta
from outrider.server.reply import Reply
from outrider.server.schema import GenerationBody, StreamOptions
from outrider.server.stream import DONE, frame


class OpenAIWriter:
    """Subclasses write choices."""

    name: str  # of the whole reply
    chunk_name: str
    prefix: str  # of ids
    media_type = "text/event-stream"
    done = DONE

    def __init__(self, body: GenerationBody, reply: Reply) -> None:
        self._reply = reply
        self._timings = bool(body.timings_per_token)
        self._options = body.stream_options or StreamOptions()
        self.id = f"{self.prefix}-{secrets.token_hex(12)}"
        self._head = {
            "id": self.id,
            "created": reply.created,
            "model": reply.model,
        }

    def choice(self, index: int, completion: Completion, result: Result) -> dict[str, Any]:
        raise NotImplementedError

    def choices(self, delta: Delta) -> list[dict[str, Any]]:
        """The choices of chunks, one each."""
        raise NotImplementedError

    def whole(self, results: list[Result]) -> dict[str, Any]:
        n = self._reply.generation.ask.params.n
        choices = [
            self.choice(i * n + j, completion, result)
            for i, result in enumerate(results)
            for j, completion in enumerate(result.completions)
        ]
        return {
            "object": self.name,
            **self._head,
            "choices": choices,
            "usage": self._usage(),
            "system_fingerprint": None,
            **self._more(),
        }

    def delta(self, delta: Delta) -> Sequence[dict[str, Any]]:
        found = []
        for choice in self.choices(delta):
            chunk = {"object": self.chunk_name, **self._head, "choices": [choice]}
            options = self._options
            if options.continuous_usage_stats and options.include_usage is not False:
                chunk["usage"] = self._usage()
            elif options.include_usage:
                chunk["usage"] = None
            found.append(chunk)
        return found

    def end(self) -> Sequence[dict[str, Any]]:
        """A chunk without choices, with the usage and figures of a stream."""
        more: dict[str, Any] = {"usage": self._usage()} if self._options.include_usage else {}
        more |= self._more()
        head = {"object": self.chunk_name, **self._head, "choices": []}
        return [head | more] if more else []

    def _more(self) -> dict[str, Any]:
        found = self._reply.figures()
        return found | {"timings": self._reply.timings()} if self._timings else found

    def failure(self, error: ApiError) -> dict[str, Any]:
        return error.body()

    def frame(self, payload: dict[str, Any], *, padded: bool) -> bytes:
        return frame(payload, padded=padded)

    def _usage(self) -> dict[str, Any]:
        """With details once all results have arrived."""
        found = self._reply.usage()
        usage: dict[str, Any] = {
            "prompt_tokens": found.num_prompt_tokens,
            "completion_tokens": found.num_completion_tokens,
            "total_tokens": found.num_prompt_tokens + found.num_completion_tokens,
        }
        if found.num_cached_tokens is not None:
            usage["prompt_tokens_details"] = {"cached_tokens": found.num_cached_tokens}
        if found.num_predicted_accepted is not None:
            usage["completion_tokens_details"] = {
                "accepted_prediction_tokens": found.num_predicted_accepted,
                "rejected_prediction_tokens": found.num_predicted_rejected,
            }
        return usage
