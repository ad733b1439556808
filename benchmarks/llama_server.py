#!/usr/bin/env python3
"""llama-server's command line, answered by `outrider serve`: for llama.cpp's own server tests.

    cd llama.cpp/tools/server/tests
    LLAMA_SERVER_BIN_PATH=.../benchmarks/llama_server.py python -m pytest unit/test_completion.py

`python3` must be one that has Outrider; the tests may run in another environment. SmolLM2
(`smollm2`) answers under the names that the tests ask for. Options without a counterpart are left
out. A start without `--offline`, with which the suite downloads its models, only answers /health.
"""

from __future__ import annotations

import os
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer

FLAGS = {
    *("--offline", "--cont-batching", "--embedding", "--reranking", "--metrics", "--kv-unified"),
    *("--swa-full", "--slots", "--no-slots", "--verbose", "--context-shift", "--no-ui", "--jinja"),
    *("--no-jinja", "--no-models-autoload", "--no-mmproj", "--no-cache-idle-slots"),
    *("--ui-mcp-proxy", "--backend_sampling"),
}
LONGEST = 2048  # the model has 8192; the tests need little


class Health(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()


def options(arguments: list[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    rest = iter(arguments)
    for name in rest:
        found[name] = "" if name in FLAGS else next(rest)
    return found


def translated(given: dict[str, str]) -> list[str]:
    """The arguments of `outrider serve`."""
    slots = int(given.get("--parallel", 4))
    length = int(given.get("--ctx-size", 4096)) // (1 if "--kv-unified" in given else slots)
    sampling = {"temperature": given["--temp"], "seed": given["--seed"], "top_k": 40, "min_p": 0.05}
    if int(given.get("--n-predict", -1)) > 0:
        sampling["max_tokens"] = given["--n-predict"]
    found = ["serve", "smollm2", "--any-model-name", "--no-generation-defaults"]
    found += ["--host", given["--host"], "--port", given["--port"]]
    found += ["--max-num-seqs", str(slots), "--max-model-len", str(min(length, LONGEST))]
    for name, value in sampling.items():
        found += ["--sampling", f"{name}={value}"]
    first, *others = given.get("--alias", "model").split(",")
    found += ["--served-model-name", first]
    for alias in others:
        found += ["--model-alias", alias]
    for origin in given.get("--cors-origins", "*").split(","):
        found += ["--cors-origin", origin]
    if "--chat-template-file" in given:
        found += ["--chat-template", given["--chat-template-file"]]
    if given.get("--reasoning-format") == "none":
        found += ["--reasoning-parser", "none"]
    return found


def main() -> None:
    given = options(sys.argv[1:])
    if "--offline" not in given:
        HTTPServer((given["--host"], int(given["--port"])), Health).serve_forever()
    if "--api-key" in given:
        os.environ["OUTRIDER_API_KEY"] = given["--api-key"]
    os.execv(sys.executable, [sys.executable, "-m", "outrider", *translated(given)])


if __name__ == "__main__":
    main()
