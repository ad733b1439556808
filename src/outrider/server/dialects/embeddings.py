"""OpenAI's /v1/embeddings."""

from __future__ import annotations

import base64
import struct
from typing import Annotated, Any, Literal

from fastapi import APIRouter
from pydantic import Field, field_validator
from starlette.responses import JSONResponse, Response

from outrider.server.answering import Answering
from outrider.server.asking import check_model
from outrider.server.embedding import embed
from outrider.server.schema import Name, Text, TokenId, TolerantBody


class EmbeddingsBody(TolerantBody):
    model: Name | None = None
    input: Annotated[
        Text | list[TokenId] | list[Text] | list[list[TokenId]],
        Field(description="a text, token ids, or a list of either"),
    ]
    encoding_format: Literal["float", "base64"] | None = None
    pooling: Literal["mean", "last"] = "mean"

    @field_validator("input", mode="before")
    @classmethod
    def _some(cls, given: object) -> object:
        if isinstance(given, list) and not given:
            raise ValueError("give at least one input")
        return given

    @property
    def inputs(self) -> list[str | list[int]]:
        given: Any = self.input
        is_one = isinstance(given, str) or isinstance(given[0], int)
        return [given] if is_one else list(given)


def router(answering: Answering) -> APIRouter:
    routes, service = APIRouter(), answering.service

    @routes.post("/v1/embeddings", response_model=None)
    async def embeddings(body: EmbeddingsBody) -> Response:
        check_model(body.model, service.config)
        answering.check_ignored(body.ignored)
        found = await embed(service, body.inputs, body.pooling)
        packed = body.encoding_format == "base64"
        return JSONResponse(
            {
                "object": "list",
                "data": [
                    {
                        "object": "embedding",
                        "index": i,
                        "embedding": _packed(vector) if packed else vector,
                    }
                    for i, vector in enumerate(found.vectors)
                ],
                "model": service.config.model_name,
                "usage": {"prompt_tokens": found.num_tokens, "total_tokens": found.num_tokens},
            }
        )

    return routes


def _packed(vector: list[float]) -> str:
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
