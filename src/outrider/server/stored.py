"""The last responses and conversations, for requests that go on from them."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from outrider.server.errors import ApiError
from outrider.server.schema import dumped

MAX_STORED = 256  # entries of a store
MAX_STORED_CHARS = 32 << 20  # of them all


@dataclass(slots=True)
class Stored:
    """A response or a conversation: what is shown of it, and what was said."""

    reply: dict[str, Any]
    salt: str
    messages: list[dict[str, Any]]  # of a response: the conversation up to its end
    items: list[dict[str, Any]]  # of a response: its input; of a conversation: all
    num_chars: int = 0


class Store:
    """The entries that were used last. Each client sees its own."""

    def __init__(self, kind: str = "response", param: str = "previous_response_id") -> None:
        self._kind, self._param = kind, param
        self._kept: OrderedDict[str, Stored] = OrderedDict()
        self._num_chars = 0

    def get(self, id: str, salt: str) -> Stored:
        found = self._kept.get(id)
        if found is None or found.salt != salt:
            raise ApiError(
                404,
                f"{self._kind.capitalize()} with id {id!r} not found. "
                f"The last {MAX_STORED} are kept",
                kind="not_found_error",
                param=self._param,
                code=f"{self._kind}_not_found",
            )
        self._kept.move_to_end(id)
        return found

    def put(self, entry: Stored) -> None:
        """Also for an entry that is there and has changed."""
        id = entry.reply["id"]
        if id in self._kept:
            self.drop(id)
        parts = (entry.reply, entry.messages, entry.items)
        entry.num_chars = sum(len(dumped(part)) for part in parts)
        self._kept[id] = entry
        self._num_chars += entry.num_chars
        while len(self._kept) > MAX_STORED or self._num_chars > MAX_STORED_CHARS:
            self.drop(next(iter(self._kept)))

    def holds(self, entry: Stored) -> bool:
        return self._kept.get(entry.reply["id"]) is entry

    def drop(self, id: str) -> None:
        self._num_chars -= self._kept.pop(id).num_chars


def listed(items: list[dict[str, Any]]) -> dict[str, Any]:
    """Items as a page of OpenAI's lists: all in one."""
    return {
        "object": "list",
        "data": items,
        "first_id": items[0]["id"] if items else None,
        "last_id": items[-1]["id"] if items else None,
        "has_more": False,
    }
