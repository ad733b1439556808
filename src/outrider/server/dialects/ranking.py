"""Routes that compare texts: /rerank, as Cohere, vLLM and llama-server have it; vLLM's /score;
and those that ask how probable tokens are after a text.

The score of two texts is the cosine of two embeddings. A model that was trained to rank does it
better.
"""

from __future__ import annotations

import secrets
import time
from typing import Annotated, Any

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from pydantic import Field, model_validator
from starlette.responses import JSONResponse, Response

from outrider.server.answering import Answering
from outrider.server.asking import check_model
from outrider.server.embedding import MAX_INPUTS, embed, similarity
from outrider.server.labels import (
    GenerativeBody,
    GenerativeWriter,
    LabelsBody,
    LabelsWriter,
    scored,
)
from outrider.server.schema import INT32, Name, Text, TolerantBody

Texts = Annotated[list[Text], Field(min_length=1, max_length=MAX_INPUTS - 1)]


class RerankBody(TolerantBody):
    model: Name | None = None
    query: Text
    documents: Texts | None = None
    texts: Texts | None = None  # the name in Hugging Face's server; its reply is a list
    top_n: Annotated[int, Field(ge=1, le=INT32)] | None = None
    return_documents: bool | None = None
    return_text: bool = False

    @model_validator(mode="after")
    def _one(self) -> RerankBody:
        if (self.documents is None) == (self.texts is None):
            raise ValueError("give documents or texts")
        return self


class ScoreBody(TolerantBody):
    model: Name | None = None
    text_1: Text | Texts
    text_2: Text | Texts

    def pairs(self) -> list[tuple[str, str]]:
        one = [self.text_1] if isinstance(self.text_1, str) else self.text_1
        other = [self.text_2] if isinstance(self.text_2, str) else self.text_2
        if len(one) not in (1, len(other)):
            raise ValueError("text_1 has one text, or as many as text_2")
        return list(zip(one * (len(other) // len(one)), other, strict=True))

    @model_validator(mode="after")
    def _paired(self) -> ScoreBody:
        self.pairs()
        return self


def router(answering: Answering) -> APIRouter:
    routes, service = APIRouter(), answering.service

    @routes.post("/v1/rerank", response_model=None)
    @routes.post("/rerank", response_model=None, include_in_schema=False)
    @routes.post("/v2/rerank", response_model=None, include_in_schema=False)
    @routes.post("/reranking", response_model=None, include_in_schema=False)
    async def rerank(body: RerankBody) -> Response:
        check_model(body.model, service.config)
        answering.check_ignored(body.ignored)
        documents = body.documents or body.texts or []
        found = await embed(service, [body.query, *documents])
        query, *others = found.vectors
        scores = [similarity(query, other) for other in others]
        best = sorted(range(len(scores)), key=lambda i: -scores[i])[: body.top_n]
        if body.texts is not None:
            shown: list[dict[str, Any]] = [{"index": i, "score": scores[i]} for i in best]
            if body.return_text:
                shown = [one | {"text": documents[i]} for one, i in zip(shown, best, strict=True)]
            return JSONResponse(shown)
        results: list[dict[str, Any]] = []
        for i in best:
            results.append({"index": i, "relevance_score": scores[i]})
            if body.return_documents is not False:
                results[-1]["document"] = {"text": documents[i]}
        return JSONResponse(_head(found.num_tokens, "rerank") | {"results": results})

    @routes.post("/v1/score", response_model=None)
    @routes.post("/score", response_model=None, include_in_schema=False)
    async def score(body: ScoreBody | LabelsBody, http: HttpRequest) -> Response:
        if isinstance(body, LabelsBody):
            return await _labelled(answering, body, http)
        check_model(body.model, service.config)
        answering.check_ignored(body.ignored)
        pairs = body.pairs()
        texts = list(dict.fromkeys(text for pair in pairs for text in pair))
        found = await embed(service, texts)
        vectors = dict(zip(texts, found.vectors, strict=True))
        data = [
            {"index": i, "object": "score", "score": similarity(vectors[one], vectors[other])}
            for i, (one, other) in enumerate(pairs)
        ]
        return JSONResponse(_head(found.num_tokens, "score") | {"data": data})

    def _head(num_tokens: int, kind: str) -> dict[str, Any]:
        return {
            "id": f"{kind}-{secrets.token_hex(12)}",
            "object": "list",
            "created": int(time.time()),
            "model": service.config.model_name,
            "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
        }

    _add_generative(routes, answering)
    return routes


async def _labelled(answering: Answering, body: LabelsBody, http: HttpRequest) -> Response:
    service = answering.service
    if not body.each:
        return JSONResponse(scored([], service.config.model_name, 0))
    request = await body.request(service.served)
    return await answering.answer(
        request, http, lambda reply: LabelsWriter(body, reply), body.ignored
    )


def _add_generative(routes: APIRouter, answering: Answering) -> None:
    @routes.post("/generative_scoring", response_model=None)
    async def generative(body: GenerativeBody, http: HttpRequest) -> Response:
        request = await body.request(answering.service.served)
        return await answering.answer(
            request, http, lambda reply: GenerativeWriter(body, reply), body.ignored
        )
