"""Turns a request into what the engine needs: tokens, parameters, speculation, a grammar."""

from __future__ import annotations

import asyncio
import json
from typing import Any, NamedTuple

from outrider.config import SamplingParams, Speculation
from outrider.errors import RequestError, UnknownName
from outrider.registry import PREDICTION
from outrider.server import conversation
from outrider.server.errors import ApiError
from outrider.server.generation import Ask
from outrider.server.grammars import Wanted
from outrider.server.reading import HARMONY, Manner
from outrider.server.reading.formats import ReasoningForm
from outrider.server.reading.grammar import grammar_after_reasoning, grammar_of_calls
from outrider.server.request import Conversation, Request, Truncation, Wish
from outrider.server.service import Served
from outrider.server_config import ServerConfig

INLINE_CHARS = (
    4096  # longer texts are tokenised in a thread, so that the loop can serve other clients
)


class _Form(NamedTuple):
    """How the output is read, and the grammar that it must satisfy."""

    manner: Manner | None
    wanted: Wanted | None
    loose: Wanted | None = None  # instead, if `wanted` cannot be compiled
    param: str = "response_format"


def check_model(asked: str | None, config: ServerConfig) -> None:
    names = (None, config.model_name, *config.model_aliases)
    if asked not in names and not config.any_model_name:
        raise ApiError(
            404,
            f"the model {asked!r} is not served here; /v1/models lists what is",
            kind="not_found_error",
            param="model",
            code="model_not_found",
        )


async def ask_of(request: Request, served: Served, salt: str) -> Ask:
    """Raises RequestError or ApiError for what cannot be done."""
    prediction: list[int] = []
    form = _Form(None, request.wanted)
    texts = [await prompt_text(talk, served) for talk in _talks(request)]
    prompts = _cut(await _tokens(request, texts, served), request.truncation, served)
    for tokens in prompts:
        served.core.check_prompt(tokens, "messages" if texts else "prompt")
    if texts:
        form = _form(request, _talks(request)[0], texts[0], served)
        if request.prediction is not None:
            prediction = await encode(served, request.prediction, "prediction", special=False)
    return Ask(
        prompts=prompts,
        params=_params(request, served, max(map(len, prompts)), form.manner),
        speculation=_speculation(request.speculation, served, bool(prediction)),
        prediction=prediction,
        salt=salt,
        is_isolated=request.cache_salt is not None,
        grammar=await _grammar(form, served),
        manner=form.manner,
    )


async def count_tokens(request: Request, served: Served) -> int:
    """The number of tokens of its prompts."""
    texts = [await prompt_text(talk, served) for talk in _talks(request)]
    return sum(map(len, await _tokens(request, texts, served)))


def _talks(request: Request) -> list[Conversation]:
    """The conversations of a request; none: its prompts are texts or tokens."""
    given = [request.prompt] if isinstance(request.prompt, Conversation) else request.prompt
    return [one for one in given if isinstance(one, Conversation)]


async def _tokens(request: Request, texts: list[str], served: Served) -> list[list[int]]:
    """Of each prompt. `texts`: of the conversations."""
    if texts:
        return [await encode(served, text, "messages", special=False) for text in texts]
    assert not isinstance(request.prompt, Conversation)
    return [
        await encode(served, one, "prompt") if isinstance(one, str) else list(one)
        for one in request.prompt
        if not isinstance(one, Conversation)
    ]


async def prompt_text(wanted: Conversation, served: Served) -> str:
    """The conversation in the model's chat template."""
    return await asyncio.to_thread(conversation.render, served.template, wanted, served.forms.tools)


async def encode(served: Served, text: str, param: str, *, special: bool = True) -> list[int]:
    if len(text) <= INLINE_CHARS:
        return served.tokenizer.encode(text, special=special)
    # Too long even if every token were the longest of the vocabulary: not worth tokenising.
    if len(text) > served.max_model_len * served.texts.longest:
        raise served.core.prompt_too_long(f"more than {served.max_model_len}", param)
    return await asyncio.to_thread(served.tokenizer.encode, text, special=special)


def _cut(prompts: list[list[int]], wish: Truncation | None, served: Served) -> list[list[int]]:
    if wish is None:
        return prompts
    check_truncation(wish.limit, served)
    limit = wish.limit if wish.limit > 0 else served.max_model_len - 1
    return [tokens[-limit:] if wish.keeps_end else tokens[:limit] for tokens in prompts]


def check_truncation(limit: int, served: Served) -> None:
    if limit > served.max_model_len:
        raise RequestError(
            "truncate_prompt_tokens value is greater than max_model_len. "
            "Please request a smaller truncation size.",
            "truncate_prompt_tokens",
        )


# --- sampling -----------------------------------------------------------------------------------


def _params(
    request: Request, served: Served, num_prompt_tokens: int, manner: Manner | None
) -> SamplingParams:
    given = {**served.defaults, **request.sampling}
    limit = request.max_tokens
    if limit is None:
        rest = max(served.max_model_len - num_prompt_tokens, 1)
        limit = min(served.defaults.get("max_tokens", rest), rest)
    if given.get("min_tokens", 0) > limit:
        raise RequestError("min_tokens must not exceed max_tokens", "min_tokens")
    if manner is not None and served.forms.are_special:
        given["skip_special_tokens"] = False  # the marks that the reader looks for
    num_tokens = served.core.target.spec.num_tokens
    if any(token >= num_tokens for token in given.get("logprob_ids", ())):
        raise RequestError(f"token ids must be below {num_tokens}", "logprob_token_ids")
    if request.allowed_ids is not None:
        given["banned_ids"] = tuple(set(range(num_tokens)) - set(request.allowed_ids))
        if len(given["banned_ids"]) == num_tokens:
            raise RequestError(f"token ids must be below {num_tokens}", "allowed_token_ids")
    return SamplingParams(**given | {"max_tokens": limit})


# --- form ---------------------------------------------------------------------------------------


def _form(request: Request, talk: Conversation, prompt: str, served: Served) -> _Form:
    forms = served.forms
    reasoning, opened = _reasoning(forms.reasoning if talk.split_reasoning else None, prompt, talk)
    calls = bool(talk.tools) and talk.choice.kind != "none"
    if not calls and reasoning is None and forms.tools.name != HARMONY:
        return _Form(None, request.wanted)
    manner = Manner(
        reasoning=reasoning,
        opened=opened,
        tools=forms.tools if calls or forms.tools.name == HARMONY else None,
        schemas={tool.name: tool.parameters for tool in talk.tools} if calls else {},
        parallel=talk.parallel and talk.choice.name is None,
    )
    schema = _schema(request.wanted)
    must = calls and talk.choice.kind == "required"
    if must and request.wanted is not None:
        raise RequestError("a forced tool call goes without response_format", "response_format")
    strict = any(tool.strict for tool in talk.tools)
    if calls and (must or strict or schema is not None or not talk.parallel):
        tools = [tool for tool in talk.tools if talk.choice.name in (None, tool.name)]
        rigid, loose = (
            _lark(
                lambda free=free: grammar_of_calls(
                    forms.tools,
                    tools,
                    must=must,
                    several=manner.parallel,
                    loose=free,
                    reasoning=reasoning,
                    opened=opened,
                    otherwise=schema,
                    added=served.added_tokens,
                )
            )
            for free in (False, True)
        )
        return _Form(manner, rigid, None if strict else loose, "tools")
    if schema is not None and reasoning is not None:
        wanted = _lark(
            lambda: grammar_after_reasoning(schema, reasoning, opened, served.added_tokens)
        )
        return _Form(manner, wanted)
    return _Form(manner, request.wanted)


def _lark(write: Any) -> Wanted:
    try:
        return Wanted("lark", write())
    except RecursionError:
        raise RequestError("the schema is nested too deeply", "tools") from None


def _schema(wanted: Wanted | None) -> dict[str, Any] | None:
    """The schema, if the output must be JSON."""
    if wanted is None or wanted.kind != "json":
        return None
    try:
        found = json.loads(wanted.source)
    except ValueError as error:
        raise RequestError(f"the schema is not JSON: {error}", "response_format") from error
    if not isinstance(found, dict):
        raise RequestError("the schema must be a JSON object", "response_format")
    return found or {"type": "object"}


def _reasoning(
    form: ReasoningForm | None, prompt: str, talk: Conversation
) -> tuple[ReasoningForm | None, bool]:
    """The form of the reasoning that will come, if any, and whether the prompt has begun it."""
    if form is None:
        return None, False
    end = prompt.rstrip()
    if end.endswith(form.opening):
        return form, True
    if end.endswith(form.closing):
        return None, False
    if talk.continue_final_message:
        opened = prompt.rfind(form.opening) > prompt.rfind(form.closing)
        return (form, True) if opened else (None, False)
    return form, False


async def _grammar(form: _Form, served: Served) -> Any:
    try:
        return await served.grammars.compile(form.wanted)
    except RequestError as error:
        if form.loose is not None:
            return await served.grammars.compile(form.loose)
        raise RequestError(str(error), form.param) from error


# --- speculation --------------------------------------------------------------------------------


def _speculation(wish: Wish | None, served: Served, predicted: bool) -> Speculation:
    """The request's settings over the server's default; a prediction implies its proposer."""
    default = served.core.default
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
