"""The last responses, for requests that go on from them."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from outrider.server.errors import ApiError
from outrider.server.schema import dumped

MAX_STORED = 256  # responses
MAX_STORED_CHARS = 32 << 20  # of their conversations


@dataclass(slots=True)
class Stored:
    reply: dict[str, Any]
    messages: list[dict[str, Any]]  # the conversation with the reply
    salt: str
    num_chars: int


class Store:
    """The last responses, for `previous_response_id`. Each client sees its own."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, Stored] = OrderedDict()
        self._num_chars = 0

    def get(self, id: str, salt: str) -> Stored:
        found = self._kept.get(id)
        if found is None or found.salt != salt:
            raise ApiError(
                404,
                f"there is no response {id!r}; the last {MAX_STORED} are kept",
                kind="not_found_error",
                param="previous_response_id",
                code="response_not_found",
            )
        self._kept.move_to_end(id)
        return found

    def put(self, reply: dict[str, Any], messages: list[dict[str, Any]], salt: str) -> None:
        num_chars = len(dumped(messages))
        self._kept[reply["id"]] = Stored(reply, messages, salt, num_chars)
        self._num_chars += num_chars
        while len(self._kept) > MAX_STORED or self._num_chars > MAX_STORED_CHARS:
            self.drop(next(iter(self._kept)))

    def drop(self, id: str) -> None:
        self._num_chars -= self._kept.pop(id).num_chars
