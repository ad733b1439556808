"""What OpenAI's completions and chat completions have in common: head, usage, chunks."""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from outrider import __version__
from outrider.engine.engine import Completion, Result
from outrider.server.errors import ApiError
from outrider.server.generation import Delta
from outrider.server.llama_format import facts
from outrider.server.reply import Reply
from outrider.server.schema import GenerationBody, StreamOptions
from outrider.server.stream import DONE, frame

FINGERPRINT = f"b{__version__}-outrider"  # of the program that answers


class OpenAIWriter(ABC):
    """Subclasses write choices."""

    name: str  # of the whole reply
    chunk_name: str
    prefix: str  # of ids
    media_type = "text/event-stream"
    done = DONE

    def __init__(self, body: GenerationBody, reply: Reply) -> None:
        self._reply = reply
        self._timings = bool(body.timings_per_token)
        self._verbose = bool(body.verbose)
        self._scores_prompt = body.prompt_logprobs is not None
        self._ids = bool(body.return_token_ids)
        self._texts = reply.texts.by_id() if body.return_tokens_as_token_ids else reply.texts
        self._shown: set[int] = set()  # streamed choices whose prompt's ids were sent
        self._streamed: defaultdict[int, list[int]] = defaultdict(list)  # tokens of choices
        self._options = body.stream_options or StreamOptions()
        self.id = f"{self.prefix}-{secrets.token_hex(12)}"
        self._head = {
            "id": self.id,
            "created": reply.created,
            "model": reply.model,
        }

    @abstractmethod
    def choice(self, index: int, completion: Completion, result: Result) -> dict[str, Any]:
        """A choice of a whole reply."""

    @abstractmethod
    def choices(self, delta: Delta) -> list[dict[str, Any]]:
        """The choices of chunks, one each."""

    def whole(self, results: list[Result]) -> dict[str, Any]:
        found = [(result, completion) for result in results for completion in result.completions]
        choices = [
            self.choice(index, completion, result)
            | self._stopped(completion.finish_reason, completion.tokens)
            | self._raw(result, completion.tokens)
            for index, (result, completion) in enumerate(found)
        ]
        return {
            "object": self.name,
            **self._head,
            "choices": choices,
            "usage": self._usage(),
            "system_fingerprint": FINGERPRINT,
            **self._more(),
        }

    def _raw(self, result: Result, tokens: list[int]) -> dict[str, Any]:
        """Token ids and scores of the prompt, if the request wants them."""
        scores = None
        if self._scores_prompt:
            num_tokens = len(result.prompt_tokens)
            scores = self._texts.prompt_scores(result.prompt_logprobs, num_tokens)
        return {
            "token_ids": tokens if self._ids else None,
            "prompt_token_ids": result.prompt_tokens if self._ids else None,
            "prompt_logprobs": scores,
        }

    def _stopped(self, reason: str | None, tokens: list[int]) -> dict[str, Any]:
        """What ended a choice, under vLLM's name and under SGLang's, which also names the end
        of the text."""
        found = self._reply.stopped_by(reason, tokens)
        named = isinstance(found, str) or found in self._reply.generation.ask.params.stop_ids
        return {"stop_reason": found if named else None, "matched_stop": found}

    def delta(self, delta: Delta) -> Sequence[dict[str, Any]]:
        found = []
        choices = self.choices(delta)
        if self._reply.generation.ask.params.stop:
            self._streamed[delta.index] += delta.tokens
        if delta.finish_reason is not None:
            tokens = self._streamed.pop(delta.index, delta.tokens)
            choices[-1] |= self._stopped(delta.finish_reason, tokens)
        if self._ids and choices:
            choices[-1]["token_ids"] = delta.tokens
            if delta.index not in self._shown:
                self._shown.add(delta.index)
                ask = self._reply.generation.ask
                choices[0]["prompt_token_ids"] = ask.prompts[delta.index // ask.params.n]
        for choice in choices:
            chunk = self._chunk([choice])
            options = self._options
            if options.continuous_usage_stats and options.include_usage is not False:
                chunk["usage"] = usage = self._usage()
                if "role" in choice.get("delta", ()):  # before the first token
                    usage |= {"completion_tokens": 0, "total_tokens": usage["prompt_tokens"]}
            elif options.include_usage:
                chunk["usage"] = None
            found.append(chunk)
        return found

    def end(self) -> Sequence[dict[str, Any]]:
        """A chunk without choices, with the usage and figures of a stream."""
        more: dict[str, Any] = {"usage": self._usage()} if self._options.include_usage else {}
        more |= self._more()
        return [self._chunk([]) | more] if more else []

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "object": self.chunk_name,
            **self._head,
            "choices": choices,
            "system_fingerprint": FINGERPRINT,
        }

    def _more(self) -> dict[str, Any]:
        found = self._reply.figures()
        if self._timings:
            found["timings"] = self._reply.timings()
        if self._verbose:
            result = next(result for result in self._reply.generation.results if result)
            first = result.completions[0]
            found["__verbose"] = facts(
                self._reply, 0, first.text, first.tokens, first.finish_reason
            )
        return found

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
        details: dict[str, Any] = {}
        if found.num_reasoning_tokens:
            details["reasoning_tokens"] = found.num_reasoning_tokens
        if found.num_predicted_accepted is not None:
            details["accepted_prediction_tokens"] = found.num_predicted_accepted
            details["rejected_prediction_tokens"] = found.num_predicted_rejected
        if details:
            usage["completion_tokens_details"] = details
        return usage
