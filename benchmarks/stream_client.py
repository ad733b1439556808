"""A streaming client that costs as little as it can: one thread, raw sockets, parsed at the end.

On a small machine the client takes the server's cores. As a program it is the other process of a
benchmark that serves: a line of JSON in ({"url", "bodies"}), a line out, until the input ends.
"""

from __future__ import annotations

import json
import selectors
import socket
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

TIMEOUT_S = 120.0  # without a byte from any stream
LAST_CHUNK = b"\r\n0\r\n\r\n"


@dataclass(slots=True)
class Answer:
    """One stream as its client saw it."""

    ttft_s: float  # from sending the request to the first text
    last_s: float  # from sending the request to the last piece of the body
    text: str
    num_tokens: int

    @property
    def tpot_s(self) -> float:
        """Time per token after the first."""
        return (self.last_s - self.ttft_s) / max(self.num_tokens - 1, 1)


@dataclass(slots=True)
class Load:
    """Several streams at once."""

    seconds: float  # from the first request to the last byte
    cpu_s: float  # that this client took in that time
    answers: list[Answer]

    @property
    def rate(self) -> float:
        """Tokens per second of all streams together."""
        return sum(answer.num_tokens for answer in self.answers) / self.seconds


class _Stream:
    """A request, over a connection that an earlier answer may have come by."""

    def __init__(self, address: tuple[str, int], request: bytes, kept: list[socket.socket]) -> None:
        self.started = time.perf_counter()
        self.socket = kept.pop() if kept else socket.create_connection(address)
        self.socket.sendall(request)
        self.pieces: list[bytes] = []
        self.first = self.last = 0.0

    def take(self) -> bool:
        """Reads what is there; False at the end."""
        piece = self.socket.recv(1 << 18)
        if not piece:
            raise RuntimeError("the server has hung up")
        self.pieces.append(piece)
        self.last = time.perf_counter()
        if not self.first and b"data: {" in piece:
            self.first = self.last
        return not b"".join(self.pieces[-2:]).endswith(LAST_CHUNK)

    def answer(self) -> Answer:
        received = b"".join(self.pieces)
        status, _, rest = received.partition(b"\r\n")
        if b" 200 " not in status:
            raise RuntimeError(f"the server says {received[:400]!r}")
        chunks = [
            json.loads(line[6:])
            for line in _unchunked(rest).split(b"\n")
            if line.startswith(b"data: {")
        ]
        text = "".join(chunk["choices"][0]["text"] for chunk in chunks if chunk["choices"])
        num_tokens = chunks[-1]["usage"]["completion_tokens"]
        return Answer(self.first - self.started, self.last - self.started, text, num_tokens)


def _unchunked(body: bytes) -> bytes:
    """The payload of a chunked body (headers before it stay as they are)."""
    head, _, body = body.partition(b"\r\n\r\n")
    if b"chunked" not in head.lower():
        return body
    found = []
    while body:
        size, _, body = body.partition(b"\r\n")
        found.append(body[: int(size, 16)])
        body = body[int(size, 16) + 2 :]
    return b"".join(found)


def ask_all(
    url: str,
    bodies: list[dict[str, Any]],
    at_once: int | None = None,
    kept: list[socket.socket] | None = None,
) -> Load:
    """Streams all completions, so many at once (None: all); who ends is followed by the next.

    Nothing is parsed before the last byte is there. `kept`: open connections, which are used first
    and left there again; without it they are closed.
    """
    connections = [] if kept is None else kept
    host, port = url.removeprefix("http://").split(":")
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}:{port}\r\n"
    head += "Content-Type: application/json\r\nContent-Length: "
    more = {"stream": True, "stream_options": {"include_usage": True}}
    contents = [json.dumps(body | more).encode() for body in bodies]
    requests = [f"{head}{len(content)}\r\n\r\n".encode() + content for content in contents]
    started, cpu = time.perf_counter(), time.process_time()
    streams: list[_Stream] = []
    with selectors.DefaultSelector() as selector:

        def begin(before: _Stream | None = None) -> None:
            if before is not None:
                selector.unregister(before.socket)
                connections.append(before.socket)
            if len(streams) < len(requests):
                streams.append(_Stream((host, int(port)), requests[len(streams)], connections))
                selector.register(streams[-1].socket, selectors.EVENT_READ, streams[-1])

        for _ in range(at_once or len(requests)):
            begin()
        while selector.get_map():
            ready = selector.select(TIMEOUT_S)
            if not ready:
                raise RuntimeError(f"{url} has been silent for {TIMEOUT_S:.0f} s")
            for key, _ in ready:
                if not key.data.take():
                    begin(key.data)
    seconds = max(stream.last for stream in streams) - started
    cpu_s = time.process_time() - cpu
    if kept is None:
        for connection in connections:
            connection.close()
    return Load(seconds, cpu_s, [stream.answer() for stream in streams])


def main() -> None:
    kept: list[socket.socket] = []
    for line in sys.stdin:
        asked = json.loads(line)
        load = ask_all(asked["url"], asked["bodies"], kept=kept)
        print(json.dumps(asdict(load)), flush=True)


if __name__ == "__main__":
    main()
