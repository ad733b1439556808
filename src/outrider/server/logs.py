"""Log lines of the server: JSON objects or readable lines, with the id of the request.

They never contain a key, and prompts only with `--log-prompts`.
"""

from __future__ import annotations

import json
import logging
from contextvars import ContextVar
from datetime import UTC, datetime

# The id of the current request; the guard sets it.
request_id: ContextVar[str] = ContextVar("request_id", default="")

_STANDARD = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}


def _extras(record: logging.LogRecord) -> dict[str, object]:
    found = {name: value for name, value in record.__dict__.items() if name not in _STANDARD}
    if request_id.get():
        found.setdefault("request_id", request_id.get())
    return found


class JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_extras(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class TextLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created).strftime("%Y-%m-%d %H:%M:%S")
        fields = " ".join(f"{name}={value}" for name, value in _extras(record).items())
        line = f"{time} {record.levelname.lower():7} {record.getMessage()} {fields}".rstrip()
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


def set_up(form: str, level: str) -> None:
    """Logs everything at `level` and above to stderr; of libraries, only warnings and errors."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines() if form == "json" else TextLines())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("outrider").setLevel(level.upper())
