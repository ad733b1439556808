"""OpenAI's /v1/embeddings, with vLLM's additions."""

from __future__ import annotations

import base64
import secrets
import struct
import time
from typing import Annotated, Any, Literal

from fastapi import APIRouter
from pydantic import Field, field_validator, model_validator
from starlette.responses import JSONResponse, Response

from outrider.errors import RequestError
from outrider.server.answering import Answering
from outrider.server.asking import check_model
from outrider.server.chat_schema import ConversationFields, Messages
from outrider.server.embedding import embed
from outrider.server.request import Conversation
from outrider.server.schema import INT32, Name, Text, TokenId


class EmbeddingsBody(ConversationFields):
    model: Name | None = None
    messages: Messages | None = None  # type: ignore[assignment]
    input: Annotated[
        Text | list[TokenId | Text | list[TokenId | Text]] | None,
        Field(description="a text, tokens and texts in a row, or a list of either"),
    ] = None
    encoding_format: Literal["float", "base64"] | None = None
    embed_dtype: Literal["float32", "float16"] = "float32"  # of base64
    endianness: Literal["native", "little", "big"] = "native"
    pooling: Literal["mean", "last"] = "mean"
    use_activation: bool = True  # vLLM's name: vectors of length 1
    add_special_tokens: bool = True
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=INT32)] | None = None

    @field_validator("input", mode="before")
    @classmethod
    def _some(cls, given: object) -> object:
        if isinstance(given, list) and not given:
            raise ValueError("give at least one input")
        return given

    @model_validator(mode="after")
    def _one(self) -> EmbeddingsBody:
        if (self.input is None) == (self.messages is None):
            raise ValueError("give input or messages")
        if self.truncate_prompt_tokens == 0:
            raise ValueError("truncate_prompt_tokens must not be 0")
        return self

    @property
    def inputs(self) -> list[str | list[int | str] | Conversation]:
        if self.messages is not None:
            talk = self.conversation()
            talk.add_generation_prompt = bool(self.add_generation_prompt)
            return [talk]
        given: Any = self.input
        if not isinstance(given, str) and any(isinstance(part, int) for part in given):
            if any(isinstance(part, list) for part in given):
                raise RequestError("give tokens in a row, or a list of inputs", "input")
            return [given]  # a row
        return [given] if isinstance(given, str) else list(given)

    def shown(self, vector: list[float]) -> list[float] | str:
        if self.encoding_format != "base64":
            return vector
        order = {"native": "=", "little": "<", "big": ">"}[self.endianness]
        kind = {"float32": "f", "float16": "e"}[self.embed_dtype]
        return base64.b64encode(struct.pack(f"{order}{len(vector)}{kind}", *vector)).decode()


def router(answering: Answering) -> APIRouter:
    routes, service = APIRouter(), answering.service

    @routes.post("/v1/embeddings", response_model=None)
    async def embeddings(body: EmbeddingsBody) -> Response:
        check_model(body.model, service.config)
        answering.check_ignored(body.ignored)
        found = await embed(
            service,
            body.inputs,
            body.pooling,
            normalised=body.use_activation,
            special=body.add_special_tokens,
            limit=body.truncate_prompt_tokens,
        )
        return JSONResponse(
            {
                "id": f"embd-{secrets.token_hex(12)}",
                "object": "list",
                "created": int(time.time()),
                "data": [
                    {"object": "embedding", "index": i, "embedding": body.shown(vector)}
                    for i, vector in enumerate(found.vectors)
                ],
                "model": service.config.model_name,
                "usage": {"prompt_tokens": found.num_tokens, "total_tokens": found.num_tokens},
            }
        )

    return routes
