"""vLLM's /tokenize, /detokenize and /tokenizer_info, and llama-server's where they differ."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import Field, model_validator
from starlette.responses import JSONResponse, Response

from outrider.server.answering import Answering
from outrider.server.asking import check_model, encode, prompt_text
from outrider.server.chat_schema import ConversationFields, Messages
from outrider.server.errors import ApiError
from outrider.server.schema import Body, Name, Text, TokenId
from outrider.server.service import Served


class TokenizeBody(ConversationFields):
    model: Name | None = None
    prompt: Text | None = None
    content: Text | None = None  # llama-server's name; its reply is shorter
    add_special: bool = False
    with_pieces: bool = False
    messages: Messages | None = None  # type: ignore[assignment]
    add_special_tokens: bool | None = None  # None: with a prompt; templates write their own
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _one(self) -> TokenizeBody:
        if sum(x is not None for x in (self.prompt, self.messages, self.content)) != 1:
            raise ValueError("give prompt, messages or content")
        return self


class DetokenizeBody(Body):
    model: Name | None = None
    tokens: Annotated[list[TokenId], Field(max_length=1 << 20)]


def router(answering: Answering) -> APIRouter:
    routes, service = APIRouter(), answering.service

    @routes.post("/tokenize", response_model=None)
    async def tokenize(body: TokenizeBody) -> Response:
        check_model(body.model, service.config)
        answering.check_ignored(body.ignored)
        served = service.served
        if body.content is not None:
            found = await encode(served, body.content, "content", special=body.add_special)
            pieces = [{"id": t, "piece": served.texts.text(t)} for t in found]
            return JSONResponse({"tokens": pieces if body.with_pieces else found})
        if body.messages is not None:
            text = await prompt_text(body.conversation(), served)
            tokens = await encode(served, text, "messages", special=bool(body.add_special_tokens))
        else:
            tokens = await asyncio.to_thread(
                served.tokenizer.encode,
                body.prompt or "",
                special=body.add_special_tokens is not False,
            )
        spelled = [served.tokenizer.token(t) for t in tokens] if body.return_token_strs else None
        return JSONResponse(
            {
                "count": len(tokens),
                "max_model_len": served.max_model_len,
                "tokens": tokens,
                "token_strs": spelled,
            }
        )

    @routes.post("/detokenize", response_model=None)
    async def detokenize(body: DetokenizeBody) -> Response:
        check_model(body.model, service.config)
        served = service.served
        num_tokens = served.core.target.spec.num_tokens
        if any(token >= num_tokens for token in body.tokens):
            raise ApiError(400, f"token ids must be below {num_tokens}", param="tokens")
        text = await asyncio.to_thread(served.texts.all, body.tokens)
        if body.model is not None:  # llama-server's clients name none
            return JSONResponse({"prompt": text})
        return JSONResponse({"prompt": text, "content": text})

    @routes.get("/tokenizer_info", response_model=None)
    async def tokenizer_info() -> Response:
        return JSONResponse(_facts(service.served))

    return routes


def _facts(served: Served) -> dict[str, Any]:
    """What a tokenizer_config.json would say."""
    names = ("bos_token", "eos_token", "unk_token", "pad_token", "add_bos_token")
    given = served.tokenizer.config
    special = served.tokenizer.special_ids
    return {
        "tokenizer_class": given.get("tokenizer_class") or "PreTrainedTokenizerFast",
        "model_max_length": served.max_model_len,
        "vocab_size": served.tokenizer.num_tokens,
        "chat_template": served.template.source if served.has_template else None,
        "added_tokens_decoder": {
            str(id): {"content": text, "special": id in special}
            for text, id in served.added_tokens.items()
        },
        **{name: _plain(given[name]) for name in names if name in given},
    }


def _plain(given: Any) -> Any:
    """A special token: its text, also where the file describes it as an object."""
    return given.get("content") if isinstance(given, dict) else given
