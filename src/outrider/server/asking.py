"""Turns a body into a request to the engine: tokens, sampling parameters, speculation."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

from outrider.config import SamplingParams, Speculation
from outrider.errors import RequestError, UnknownName
from outrider.options import http_values
from outrider.registry import PREDICTION
from outrider.server.errors import ApiError
from outrider.server.generation import Ask
from outrider.server.grammars import Wanted
from outrider.server.schema import ChatBody, CompletionBody, GenerationBody, Message
from outrider.server.service import Served

INLINE_CHARS = (
    4096  # longer texts are tokenised in a thread, so that the loop can serve other clients
)
DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's


def check_model(asked: str | None, served: str) -> None:
    if asked is not None and asked != served:
        raise ApiError(
            404,
            f"the model {asked!r} is not served here; /v1/models lists what is",
            kind="not_found_error",
            param="model",
            code="model_not_found",
        )


async def completion_ask(body: CompletionBody, served: Served, salt: str) -> tuple[Ask, list[str]]:
    """The request, and the texts of its prompts for an echo."""
    given: list[Any]
    prompt = body.prompt
    given = [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else list(prompt)
    prompts = [
        await _encode(served, one, "prompt") if isinstance(one, str) else list(one) for one in given
    ]
    for tokens in prompts:
        served.core.check_prompt(tokens)
    texts = (
        [
            one if isinstance(one, str) else served.tokenizer.decode(one, skip_special=False)
            for one in given
        ]
        if body.echo
        else []
    )
    params = _params(
        body,
        body.max_tokens if body.max_tokens is not None else DEFAULT_COMPLETION_TOKENS,
        logprobs=body.logprobs,
        prompt_logprobs=body.logprobs if body.echo else None,
    )
    ask = Ask(
        prompts=prompts,
        params=params,
        speculation=_speculation(body, served, False),
        salt=salt,
        grammar=await served.grammars.compile(wanted_grammar(body)),
    )
    return ask, texts


async def chat_ask(body: ChatBody, served: Served, salt: str) -> Ask:
    prompt = await chat_prompt(
        body.messages,
        served,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
    )
    served.core.check_prompt(prompt, "messages")
    prediction: list[int] = []
    if body.prediction is not None:
        prediction = await _encode(served, body.prediction.text, "prediction", special=False)
    limit = body.max_completion_tokens or body.max_tokens or served.max_model_len - len(prompt)
    params = _params(body, limit, logprobs=(body.top_logprobs or 0) if body.logprobs else None)
    return Ask(
        prompts=[prompt],
        params=params,
        speculation=_speculation(body, served, bool(prediction)),
        prediction=prediction,
        salt=salt,
        grammar=await served.grammars.compile(wanted_grammar(body)),
    )


async def chat_prompt(messages: Sequence[Message], served: Served, **options: bool) -> list[int]:
    """The tokens of the messages in the model's chat template."""
    plain = [
        {"role": m.role, "content": m.text} | ({} if m.name is None else {"name": m.name})
        for m in messages
    ]
    text = await asyncio.to_thread(served.template.render, plain, **options)
    return await _encode(served, text, "messages", special=False)


async def _encode(served: Served, text: str, param: str, *, special: bool = True) -> list[int]:
    if len(text) <= INLINE_CHARS:
        return served.tokenizer.encode(text, special=special)
    # Too long even if every token were the longest of the vocabulary: not worth tokenising.
    if len(text) > served.max_model_len * served.texts.longest:
        raise served.core.prompt_too_long(f"more than {served.max_model_len}", param)
    return await asyncio.to_thread(served.tokenizer.encode, text, special=special)


def _params(
    body: GenerationBody,
    max_tokens: int,
    *,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
) -> SamplingParams:
    given = http_values(SamplingParams, body)
    given["max_tokens"] = max(max_tokens, 1)
    if given.get("min_tokens", 0) > given["max_tokens"]:
        raise RequestError("min_tokens must not exceed max_tokens", "min_tokens")
    given["top_k"] = max(given.get("top_k", 0), 0)  # -1, too, means all
    stop = given.get("stop", ())
    given["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
    given["stop_ids"] = tuple(given.get("stop_ids", ()))
    given["logit_bias"] = {int(token): x for token, x in given.get("logit_bias", {}).items()}
    return SamplingParams(**given, logprobs=logprobs, prompt_logprobs=prompt_logprobs)


def wanted_grammar(body: GenerationBody) -> Wanted | None:
    """The grammar of the output, if the request has one."""
    form, wish = body.response_format, body.structured_outputs
    if form is not None and form.type != "text":
        schema = form.json_schema.schema_ if form.json_schema is not None else {}
        return Wanted("json", json.dumps(schema))
    if wish is None:
        return None
    if wish.json_ is not None:
        return Wanted("json", wish.json_ if isinstance(wish.json_, str) else json.dumps(wish.json_))
    if wish.regex is not None:
        return Wanted("regex", wish.regex)
    if wish.choice is not None:
        return Wanted("choice", json.dumps(wish.choice))
    if wish.grammar is not None:
        return Wanted("lark", wish.grammar)
    return Wanted("json", "{}")


def _speculation(body: GenerationBody, served: Served, predicted: bool) -> Speculation:
    """The request's settings over the server's default; a prediction implies its proposer."""
    default, wish = served.core.default, body.speculation
    if wish is None:
        if predicted:
            return _predicting(served, default)
        return default
    if wish.off or wish.num_draft_tokens == 0:
        if wish.proposer is not None and wish.off:
            raise RequestError("speculation: off goes without a proposer", "speculation")
        return Speculation(proposer=None, verifier=wish.verifier or default.verifier)
    proposer = wish.proposer or (PREDICTION if predicted else default.proposer)
    if proposer is None:
        raise RequestError("this server does not speculate: name a proposer", "speculation")
    if proposer not in served.proposers:
        raise UnknownName("proposer", proposer[:64], served.proposers)
    if predicted and proposer != PREDICTION:
        raise RequestError(f"proposer {proposer!r} reads no prediction", "speculation")
    if proposer == PREDICTION and not predicted:
        raise RequestError(f"proposer {PREDICTION!r} needs a prediction", "speculation")
    if wish.verifier is not None and wish.verifier not in served.core.verifiers:
        raise UnknownName("verifier", wish.verifier[:64], served.core.verifiers)
    num_draft_tokens = wish.num_draft_tokens
    if num_draft_tokens is None:
        num_draft_tokens = default.num_draft_tokens or "auto"
    return Speculation(
        proposer=proposer,
        num_draft_tokens=num_draft_tokens,
        verifier=wish.verifier or default.verifier,
    )


def _predicting(served: Served, default: Speculation) -> Speculation:
    """Uses the prediction if the server offers that proposer; otherwise ignores it."""
    if PREDICTION not in served.proposers:
        return default
    return Speculation(
        proposer=PREDICTION,
        num_draft_tokens=default.num_draft_tokens or "auto",
        verifier=default.verifier,
    )
