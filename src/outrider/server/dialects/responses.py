"""OpenAI's /v1/responses."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from outrider.engine.engine import Completion, Result
from outrider.server.answering import Answering
from outrider.server.asking import count_tokens
from outrider.server.dialects import conversations
from outrider.server.dialects.responses_input import (
    AllowedTools,
    Item,
    NamedTool,
    ResponsesBody,
    messages_of,
    stored_item,
)
from outrider.server.errors import ApiError, api_error
from outrider.server.generation import Delta, Generation
from outrider.server.reading import Call, Message
from outrider.server.reading.source import Part
from outrider.server.reply import Reply
from outrider.server.request import Conversation
from outrider.server.service import Service
from outrider.server.stored import Store, Stored, listed
from outrider.server.stream import SSE, event_frame

Keep = Callable[[dict[str, Any], list[dict[str, Any]]], None]
UNFINISHED = ("queued", "in_progress", "cancelled")
COMPLETE = ("completed", "incomplete")  # others have said nothing to go on from


class ResponsesWriter:
    media_type = SSE
    done = b""

    def __init__(self, body: ResponsesBody, reply: Reply, keep: Keep) -> None:
        """`keep` gets the response at its end, with the conversation up to there."""
        self.id = f"resp_{secrets.token_hex(16)}"
        self._body, self._reply = body, reply
        self._keep = keep
        self._number = 0  # of the next event
        self._items: list[dict[str, Any]] = []  # complete ones, and the open one
        self._is_open = False
        self._finish: str | None = None
        self._message = Message()  # of the stream so far
        self._begun = False

    # --- whole -------------------------------------------------------------------------------

    def whole(self, results: list[Result]) -> dict[str, Any]:
        completion = results[0].completions[0]
        self._message = self._reply.message(completion)
        self._finish = completion.finish_reason
        self._items = self._output(self._message, completion)
        return self._ended()

    def _output(self, found: Message, completion: Completion) -> list[dict[str, Any]]:
        items = []
        if found.reasoning:
            items.append(self._reasoning_item() | _reasoned(found.reasoning))
        if found.text or not found.calls:
            part = _part(found.text)
            if completion.logprobs is not None:
                part["logprobs"] = self._reply.texts.chat(completion.logprobs)["content"]
            items.append(self._message_item() | {"status": self._status(), "content": [part]})
        items += [
            self._call_item(call.name) | {"status": "completed", "arguments": call.arguments}
            for call in found.calls
        ]
        return items

    def _status(self) -> str:
        return "incomplete" if self._finish == "length" else "completed"

    def _ended(self) -> dict[str, Any]:
        """The response at its end; it is stored now."""
        found = self._response(self._status(), self._items)
        assert isinstance(self._reply.request.prompt, Conversation)
        said: dict[str, Any] = {"role": "assistant", "content": self._message.text}
        if self._message.calls:
            said["tool_calls"] = [
                {
                    "id": item["call_id"],
                    "type": "function",
                    "function": {"name": item["name"], "arguments": item["arguments"]},
                }
                for item in self._items
                if item["type"] == "function_call"
            ]
        if self._message.reasoning:
            said["reasoning_content"] = self._message.reasoning
        past = self._reply.request.prompt.messages[bool(self._body.instructions) :]
        self._keep(found, [*past, said])
        return found

    def unfinished(self, status: str, error: ApiError | None = None) -> dict[str, Any]:
        """The response while it waits, or where it stopped."""
        found = self._response(status, self._items)
        if error is not None:
            found["error"] = {"code": error.code or error.kind, "message": error.message}
        return found

    def _response(self, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        body, params = self._body, self._reply.generation.ask.params
        choice: Any = body.tool_choice
        if isinstance(choice, NamedTool):
            choice = {"type": "function", "name": choice.called}
        elif isinstance(choice, AllowedTools):
            named = [{"type": "function", "name": tool.called} for tool in choice.tools]
            choice = {"type": "allowed_tools", "mode": choice.mode, "tools": named}
        form = None if body.text is None else body.text.format
        shown = {"type": "text"} if form is None else form.model_dump(by_alias=True)
        effort = None if body.reasoning is None else body.reasoning.effort
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._reply.created,
            "status": status,
            "background": bool(body.background),
            "conversation": None if body.conversation_id is None else {"id": body.conversation_id},
            "error": None,
            "incomplete_details": cut,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": None,
            "metadata": body.metadata or {},
            "model": self._reply.model,
            "output": output,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": effort, "summary": None},
            "service_tier": "default",
            "store": body.store is not False,
            "temperature": params.temperature,
            "text": {"format": shown},
            "tool_choice": choice or "auto",
            "tools": [tool.model_dump() for tool in body.tools or ()],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": params.top_p,
            "truncation": "disabled",
            "usage": None if status in UNFINISHED else self._usage(),
        }

    def _usage(self) -> dict[str, Any]:
        usage = self._reply.usage()
        return {
            "input_tokens": usage.num_prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.num_cached_tokens or 0},
            "output_tokens": usage.num_completion_tokens,
            "output_tokens_details": {"reasoning_tokens": usage.num_reasoning_tokens},
            "total_tokens": usage.num_prompt_tokens + usage.num_completion_tokens,
        }

    # --- items -------------------------------------------------------------------------------

    def _reasoning_item(self) -> dict[str, Any]:
        return {"id": f"rs_{secrets.token_hex(12)}", "type": "reasoning", "summary": []}

    def _message_item(self) -> dict[str, Any]:
        head = {"id": f"msg_{secrets.token_hex(12)}", "type": "message", "status": "in_progress"}
        return {**head, "role": "assistant", "content": []}

    def _call_item(self, name: str) -> dict[str, Any]:
        head = {"id": f"fc_{secrets.token_hex(12)}", "type": "function_call"}
        more = {"status": "in_progress", "arguments": "", "call_id": self._reply.call_id()}
        return {**head, **more, "name": name}

    # --- streams -----------------------------------------------------------------------------

    def delta(self, delta: Delta) -> Sequence[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        if not self._begun:
            self._begun = True
            for kind in ("created", "in_progress"):
                found.append(
                    self._event(f"response.{kind}", response=self._response("in_progress", []))
                )
        logprobs = delta.logprobs
        for part in self._reply.parts(delta):
            scored = self._reply.texts.chat(logprobs)["content"] if logprobs else []
            logprobs = []
            found += self._part(part, scored)
        if delta.finish_reason is not None:
            self._finish = delta.finish_reason
        return found

    def _part(self, part: Part, scored: list[Any]) -> list[dict[str, Any]]:
        message = self._message
        if part.kind == "call":
            message.calls.append(Call(part.text))
            return self._open(self._call_item(part.text))
        if not part.text:
            return []
        if part.kind == "arguments":
            message.calls[-1].arguments += part.text
            self._items[-1]["arguments"] += part.text
            return [self._inner("response.function_call_arguments.delta", delta=part.text)]
        found = []
        if part.kind == "reasoning":
            message.reasoning += part.text
            if not self._is("reasoning"):
                found = self._open(self._reasoning_item() | _reasoned(""))
                found.append(self._content("added"))
            self._items[-1]["content"][0]["text"] += part.text
            kind = "response.reasoning_text.delta"
            return [*found, self._inner(kind, content_index=0, delta=part.text)]
        message.text += part.text
        if not self._is("message"):
            found = self._open(self._message_item() | {"content": [_part("")]})
            found.append(self._content("added"))
        self._items[-1]["content"][0]["text"] += part.text
        self._items[-1]["content"][0]["logprobs"] += scored
        kind = "response.output_text.delta"
        return [*found, self._inner(kind, content_index=0, delta=part.text, logprobs=scored)]

    def _is(self, kind: str) -> bool:
        return self._is_open and bool(self._items[-1]["type"] == kind)

    def _open(self, item: dict[str, Any]) -> list[dict[str, Any]]:
        found = self._close()
        self._items.append(item)
        self._is_open = True
        shown = dict(item)
        if "content" in shown:
            shown["content"] = []
        added = self._event(
            "response.output_item.added", output_index=len(self._items) - 1, item=shown
        )
        return [*found, added]

    def _close(self) -> list[dict[str, Any]]:
        if not self._is_open:
            return []
        self._is_open = False
        item = self._items[-1]
        if item["type"] == "function_call":
            item["status"] = "completed"
            kind = "response.function_call_arguments.done"
            found = [self._inner(kind, arguments=item["arguments"], name=item["name"])]
        else:
            (part,) = item["content"]
            more: dict[str, Any] = {"content_index": 0, "text": part["text"]}
            if item["type"] == "message":
                item["status"] = self._status()
                more["logprobs"] = part["logprobs"]
            kind = "output_text" if item["type"] == "message" else "reasoning_text"
            found = [self._inner(f"response.{kind}.done", **more), self._content("done")]
        done = self._event(
            "response.output_item.done", output_index=len(self._items) - 1, item=dict(item)
        )
        return [*found, done]

    def _content(self, kind: str) -> dict[str, Any]:
        part = dict(self._items[-1]["content"][0])
        if kind == "added":
            part["text"] = ""
        return self._inner(f"response.content_part.{kind}", content_index=0, part=part)

    def _inner(self, kind: str, **more: Any) -> dict[str, Any]:
        """An event within the open item."""
        at = {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}
        return self._event(kind, **at, **more)

    def _event(self, kind: str, **more: Any) -> dict[str, Any]:
        number = self._number
        self._number += 1
        return {"type": kind, "sequence_number": number, **more}

    def end(self) -> Sequence[dict[str, Any]]:
        found = []
        if not self._items:
            found += self._open(self._message_item() | {"content": [_part("")]})
            found.append(self._content("added"))
        found += self._close()
        response = self._ended()
        return [*found, self._event(f"response.{response['status']}", response=response)]

    def failure(self, error: ApiError) -> dict[str, Any]:
        return self._event("response.failed", response=self.unfinished("failed", error))

    def frame(self, payload: dict[str, Any], *, padded: bool) -> bytes:
        return event_frame(payload, padded=padded)


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _reasoned(text: str) -> dict[str, Any]:
    return {"content": [{"type": "reasoning_text", "text": text}], "status": "completed"}


class Turn:
    """Where a request goes on from, and where its response is kept."""

    def __init__(self, body: ResponsesBody, salt: str, store: Store, talks: Store) -> None:
        self._body, self._salt, self._store, self._talks = body, salt, store, talks
        self._input = [stored_item(item) for item in body.items]
        self._talk = None
        self.past: list[dict[str, Any]] = []
        if body.previous_response_id is not None:
            entry = store.get(body.previous_response_id, salt)
            if entry.reply["status"] not in COMPLETE:
                raise ApiError(400, "the response is not complete", param="previous_response_id")
            self.past = entry.messages
        elif body.conversation_id is not None:
            self._talk = talks.get(body.conversation_id, salt)
            self.past = messages_of([Item.model_validate(item) for item in self._talk.items])

    def keep(self, reply: dict[str, Any], messages: list[dict[str, Any]]) -> None:
        if self._body.store is not False:
            self._store.put(Stored(reply, self._salt, messages, self._input))
        if reply["status"] in COMPLETE and self._talk is not None and self._talks.holds(self._talk):
            self._talk.items += [*self._input, *reply["output"]]
            self._talks.put(self._talk)


class _Background:
    """The responses that no request waits for."""

    def __init__(self) -> None:
        self._running: dict[str, asyncio.Task[None]] = {}

    def begin(self, generation: Generation, writer: ResponsesWriter, keep: Keep) -> dict[str, Any]:
        """Starts it; returns the response as it is now. ApiError if there is no room."""
        with ExitStack() as entered:
            entered.enter_context(generation)
            queued = writer.unfinished("queued")
            keep(queued, [])
            running = entered.pop_all()

        async def work() -> None:
            try:
                with running:
                    writer.whole(await generation.all())
            except asyncio.CancelledError:
                keep(writer.unfinished("cancelled"), [])
            except Exception as error:
                keep(writer.unfinished("failed", api_error(error)), [])
            finally:
                del self._running[writer.id]

        self._running[writer.id] = asyncio.create_task(work())
        return queued

    async def stop(self, id: str) -> None:
        task = self._running.get(id)
        if task is not None:
            task.cancel()
            await asyncio.wait([task])


def router(answering: Answering) -> APIRouter:
    routes, service = APIRouter(), answering.service
    store, talks = Store(), Store("conversation", "conversation")
    background = _Background()

    @routes.post("/v1/responses", response_model=None)
    async def create(body: ResponsesBody, http: HttpRequest) -> Response:
        turn = Turn(body, service.salt(http.state.key, None), store, talks)
        request = body.request(turn.past)

        def make(reply: Reply) -> ResponsesWriter:
            return ResponsesWriter(body, reply, turn.keep)

        if not body.background:
            return await answering.answer(request, http, make, body.ignored)
        generation, writer = await answering.begin(request, http, make, body.ignored)
        return JSONResponse(background.begin(generation, writer, turn.keep))

    @routes.post("/v1/responses/input_tokens", response_model=None)
    async def input_tokens(body: ResponsesBody, http: HttpRequest) -> Response:
        turn = Turn(body, service.salt(http.state.key, None), store, talks)
        found = await count_tokens(body.request(turn.past), service.served)
        return JSONResponse({"object": "response.input_tokens", "input_tokens": found})

    _add_kept(routes, service, store, background)
    routes.include_router(conversations.router(service, talks))
    return routes


def _add_kept(routes: APIRouter, service: Service, store: Store, background: _Background) -> None:
    """The routes of a response that is kept."""

    def found(id: str, http: HttpRequest) -> Stored:
        return store.get(id, service.salt(http.state.key, None))

    @routes.get("/v1/responses/{id}", response_model=None)
    async def read(id: str, http: HttpRequest) -> Response:
        return JSONResponse(found(id, http).reply)

    @routes.get("/v1/responses/{id}/input_items", response_model=None)
    async def read_input(id: str, http: HttpRequest) -> Response:
        return JSONResponse(listed(found(id, http).items))

    @routes.delete("/v1/responses/{id}", response_model=None)
    async def delete(id: str, http: HttpRequest) -> Response:
        found(id, http)
        await background.stop(id)
        found(id, http)
        store.drop(id)
        return JSONResponse({"id": id, "object": "response", "deleted": True})

    @routes.post("/v1/responses/{id}/cancel", response_model=None)
    async def cancel(id: str, http: HttpRequest) -> Response:
        if not found(id, http).reply["background"]:
            raise ApiError(400, "Cannot cancel a synchronous response.")
        await background.stop(id)
        return JSONResponse(found(id, http).reply)
