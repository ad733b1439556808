"""OpenAI's /v1/conversations: what /v1/responses says in a conversation is kept under one id."""

from __future__ import annotations

import secrets
import time
from typing import Annotated, Any, Literal

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from pydantic import Field
from starlette.responses import JSONResponse, Response

from outrider.server.dialects.responses_input import Item, stored_item
from outrider.server.errors import ApiError
from outrider.server.limits import MAX_MESSAGES
from outrider.server.schema import TolerantBody
from outrider.server.service import Service
from outrider.server.stored import Store, Stored, listed

Items = Annotated[list[Item], Field(max_length=MAX_MESSAGES)]


class ConversationBody(TolerantBody):
    items: Items | None = None
    metadata: dict[str, Any] | None = None


class MetadataBody(TolerantBody):
    metadata: dict[str, Any] | None = None


class ItemsBody(TolerantBody):
    items: Items


def router(service: Service, store: Store) -> APIRouter:
    routes = APIRouter()

    def found(id: str, http: HttpRequest) -> Stored:
        return store.get(id, service.salt(http.state.key, None))

    @routes.post("/v1/conversations", response_model=None)
    async def create(http: HttpRequest, body: ConversationBody | None = None) -> Response:
        body = body or ConversationBody()
        reply = {
            "id": f"conv_{secrets.token_hex(24)}",
            "object": "conversation",
            "created_at": int(time.time()),
            "metadata": body.metadata or {},
        }
        items = [stored_item(item) for item in body.items or ()]
        store.put(Stored(reply, service.salt(http.state.key, None), [], items))
        return JSONResponse(reply)

    @routes.get("/v1/conversations/{id}", response_model=None)
    async def read(id: str, http: HttpRequest) -> Response:
        return JSONResponse(found(id, http).reply)

    @routes.post("/v1/conversations/{id}", response_model=None)
    async def update(id: str, body: MetadataBody, http: HttpRequest) -> Response:
        entry = found(id, http)
        entry.reply["metadata"] = body.metadata or {}
        store.put(entry)
        return JSONResponse(entry.reply)

    @routes.delete("/v1/conversations/{id}", response_model=None)
    async def delete(id: str, http: HttpRequest) -> Response:
        found(id, http)
        store.drop(id)
        return JSONResponse({"id": id, "object": "conversation.deleted", "deleted": True})

    @routes.post("/v1/conversations/{id}/items", response_model=None)
    async def add(id: str, body: ItemsBody, http: HttpRequest) -> Response:
        entry, items = found(id, http), [stored_item(item) for item in body.items]
        entry.items += items
        store.put(entry)
        return JSONResponse(listed(items))

    @routes.get("/v1/conversations/{id}/items", response_model=None)
    async def items(id: str, http: HttpRequest, order: Literal["asc", "desc"] = "desc") -> Response:
        all_items = found(id, http).items
        return JSONResponse(listed(all_items if order == "asc" else all_items[::-1]))

    @routes.get("/v1/conversations/{id}/items/{item_id}", response_model=None)
    async def item(id: str, item_id: str, http: HttpRequest) -> Response:
        return JSONResponse(_one(found(id, http), item_id))

    @routes.delete("/v1/conversations/{id}/items/{item_id}", response_model=None)
    async def remove(id: str, item_id: str, http: HttpRequest) -> Response:
        entry = found(id, http)
        entry.items.remove(_one(entry, item_id))
        store.put(entry)
        return JSONResponse(entry.reply)

    return routes


def _one(entry: Stored, id: str) -> dict[str, Any]:
    item = next((item for item in entry.items if item["id"] == id), None)
    if item is None:
        raise ApiError(404, f"Item with id {id!r} not found.", kind="not_found_error")
    return item
