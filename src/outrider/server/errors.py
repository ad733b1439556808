"""Turns exceptions into replies: a status, and OpenAI's error object.

A reply explains errors of the client. It does not explain failures of the server, because a path,
an address or a traceback helps only attackers; the details go to the log.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from outrider.errors import ConfigError, Overloaded, RequestError

logger = logging.getLogger(__name__)

MAX_MESSAGE_CHARS = 400
RETRY_AFTER_S = 2


class ClientLeft(Exception):
    """The client has closed the connection."""


class ApiError(Exception):
    """An error reply. The client receives `message` as it is, in one short line."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = _short(message)
        self.kind = kind
        self.param = param if param is None else _short(param)
        self.code = code
        self.retry_after_s = retry_after_s

    def body(self) -> dict[str, Any]:
        return {
            "error": {
                "message": self.message,
                "type": self.kind,
                "param": self.param,
                "code": self.code,
            }
        }

    def headers(self) -> dict[str, str]:
        return {} if self.retry_after_s is None else {"retry-after": str(self.retry_after_s)}


def overloaded(message: str, code: str = "overloaded") -> ApiError:
    return ApiError(
        503, message, kind="service_unavailable", code=code, retry_after_s=RETRY_AFTER_S
    )


def api_error(error: BaseException) -> ApiError:
    """The error reply for an exception. Unexpected exceptions are logged in full."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestError):
        return ApiError(400, str(error), param=error.param, code=error.code)
    if isinstance(error, ConfigError):  # an unknown name, a lossy pair
        return ApiError(400, str(error), param="speculation")
    if isinstance(error, Overloaded):
        return overloaded(str(error))
    logger.error("request failed", exc_info=error)
    return ApiError(500, "the server failed to complete this request", kind="server_error")


def validation_error(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """The reply for the first of pydantic's errors, with the field as the client wrote it."""
    first = errors[0]
    if first.get("type") == "json_invalid":
        return ApiError(400, "the body is not valid JSON", code="invalid_json")
    where = [str(part) for part in first.get("loc", ()) if part != "body"]
    message = str(first.get("msg", "invalid value")).removeprefix("Value error, ")
    if first.get("type") == "extra_forbidden":
        message = "unknown parameter"
    param = where[0] if where else None
    # Other parts are tags of unions and internal names: only numbers and plain names help.
    path = ".".join(part for part in where if part.replace("_", "").isalnum())
    return ApiError(400, f"{path or 'body'}: {message}", param=param)


def _short(message: str) -> str:
    line = " ".join(message.split())
    line = "".join(char if char.isprintable() else "?" for char in line)
    return line if len(line) <= MAX_MESSAGE_CHARS else line[:MAX_MESSAGE_CHARS] + " ..."
