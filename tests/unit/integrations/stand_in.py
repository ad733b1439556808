"""A program that looks like `vllm serve` to its parent: loads a moment, serves, can be killed.

Behaviour is chosen by the prompt: "slow" streams until STAND_IN_GO_ON names a file, "die" ends the
process in the middle of the stream, "cut" closes the connection. STAND_IN_FAILS makes it fail while
loading.
"""

from __future__ import annotations

import json
import os
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        self._answer(200, {"path": self.path})

    def do_POST(self) -> None:
        size = int(self.headers.get("content-length", 0))
        body = json.loads(self.rfile.read(size))
        if self.path == "/tokenize":
            self._answer(200, {"tokens": [ord(char) for char in body["prompt"]]})
        elif body.get("stream"):
            self._stream(body)
        elif body.get("logprobs"):
            top = [{"a": -0.7, "b": -0.7}] * 16
            scored = {"tokens": ["a"] * 16, "token_logprobs": [-0.7] * 16, "top_logprobs": top}
            self._answer(200, {"choices": [{"logprobs": scored}]})
        else:
            self._answer(200, {"got": body, "pid": os.getpid()})

    def _answer(self, status: int, record: dict[str, Any]) -> None:
        content = json.dumps(record).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _stream(self, body: dict[str, Any]) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/event-stream; charset=utf-8")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        for i in range(3):
            self._chunk(b'data: {"i": %d}\n\n' % i)
        while body["prompt"] == "slow" and not os.path.exists(os.environ["STAND_IN_GO_ON"]):
            self._chunk(b'data: {"i": 3}\n\n')
            time.sleep(0.02)
        if body["prompt"] == "die":
            self._chunk(b'data: {"i": ')  # half an event
            os._exit(9)
        if body["prompt"] == "cut":
            self.close_connection = True
            return
        self._chunk(b"data: [DONE]\n\n")
        self.wfile.write(b"0\r\n\r\n")

    def _chunk(self, content: bytes) -> None:
        self.wfile.write(b"%x\r\n%b\r\n" % (len(content), content))
        self.wfile.flush()


def main() -> None:
    if os.environ.get("STAND_IN_FAILS"):
        print("INFO starting")
        print("(EngineCore pid=1) ValueError: no such model")
        sys.exit(1)
    port = int(sys.argv[sys.argv.index("--port") + 1])
    ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()


if __name__ == "__main__":
    main()
