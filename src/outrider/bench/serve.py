"""Load on any OpenAI-compatible server: concurrent streams, and the times of their tokens.

On our own server every load runs twice, the second time with speculation off for each request, and
the texts are compared.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from statistics import median
from time import perf_counter
from typing import Any
from urllib.parse import urlsplit

from outrider.bench.measure import Tell
from outrider.bench.report import Result, Row
from outrider.bench.statistics import estimate
from outrider.bench.workloads import Prompt, Workload
from outrider.engine.lane import fresh_salt
from outrider.errors import ConfigError

TIMEOUT_S = 300.0
COLUMNS = (
    "workload",
    "clients",
    "contender",
    "tokens_per_s",
    "speedup",
    "ttft_s",
    "tpot_s",
    "ttft_p95_s",
    "num_requests",
    "identical",
)
NOTES = (
    "`tokens per s`: of all clients together. `ttft`: from sending a request to its first text; "
    "`tpot`: the rest of its time over the rest of its tokens; medians over requests."
)


@dataclass(frozen=True, slots=True)
class Answer:
    """One stream from the client's side."""

    text: str
    num_tokens: int
    ttft_s: float
    total_s: float

    @property
    def tpot_s(self) -> float:
        return (self.total_s - self.ttft_s) / max(1, self.num_tokens - 1)


class Server:
    """A base address; every request makes a connection of its own."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"{url!r} is no address of a server: pass http://HOST:PORT")
        self.url = url
        self._kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        self._host, self._port = parts.hostname, parts.port
        self._path = parts.path.rstrip("/").removesuffix("/v1")

    def get(self, path: str) -> Any:
        connection = self._kind(self._host, self._port, timeout=TIMEOUT_S)
        try:
            connection.request("GET", f"{self._path}{path}")
            return json.loads(connection.getresponse().read())
        except (OSError, HTTPException, ValueError) as error:
            raise ConfigError(
                f"no OpenAI-compatible server answers at {self.url}: {error}"
            ) from None
        finally:
            connection.close()

    def complete(self, body: dict[str, Any]) -> Answer:
        """Streams one completion; raises ConfigError if the server refuses it."""
        connection = self._kind(self._host, self._port, timeout=TIMEOUT_S)
        started = perf_counter()
        try:
            connection.request(
                "POST",
                f"{self._path}/v1/completions",
                json.dumps(body),
                {"Content-Type": "application/json"},
            )
            response = connection.getresponse()
            if response.status != 200:
                said = response.read(300).decode(errors="replace")
                raise ConfigError(f"{self.url} refused a request ({response.status}): {said}")
            return _read_stream(response, started)
        except (OSError, HTTPException) as error:
            raise ConfigError(f"{self.url} broke off: {error}") from None
        finally:
            connection.close()


def _read_stream(lines: Any, started: float) -> Answer:
    pieces: list[str] = []
    first = last = 0.0
    num_tokens = 0
    for line in lines:
        if not line.startswith(b"data: ") or line.strip() == b"data: [DONE]":
            continue
        record = json.loads(line[6:])
        for choice in record.get("choices", ()):
            if choice.get("text"):
                last = perf_counter()
                first = first or last
                pieces.append(choice["text"])
        num_tokens = (record.get("usage") or {}).get("completion_tokens", num_tokens)
    return Answer("".join(pieces), num_tokens or len(pieces), first - started, last - started)


def bench_server(
    url: str,
    workload: Workload,
    clients: Sequence[int],
    max_tokens: int,
    model: str | None,
    title: str | None,
    tell: Tell = lambda what: None,
) -> Result:
    server = Server(url)
    models = server.get("/v1/models")["data"]
    name = model or models[0]["id"]
    is_ours = any(entry.get("owned_by") == "outrider" for entry in models)
    ways: dict[str, dict[str, Any]] = {"the server": {}}
    if is_ours:
        ways["plain"] = {"speculation": {"off": True}}
    rows: list[Row] = []
    for count in clients:
        texts: dict[str, list[str]] = {}
        found: dict[str, Row] = {}
        for way, extra in reversed(ways.items()):
            tell(f"{way}, {count} clients")
            load(server, workload.prompts[:count], count, _body(name, max_tokens) | extra)
            seconds, answers = load(
                server, workload.prompts, count, _body(name, max_tokens) | extra
            )
            texts[way] = [answer.text for answer in answers]
            found[way] = _row(answers, seconds) | {
                "workload": workload.name,
                "clients": count,
                "contender": way,
            }
        if "plain" in found:
            mine, plain = found["the server"], found["plain"]
            mine["speedup"] = mine["tokens_per_s"] / plain["tokens_per_s"]
            same = sum(a == b for a, b in zip(texts["the server"], texts["plain"], strict=True))
            mine["identical"] = f"{same}/{len(texts['plain'])}"
        rows += found.values()
    about = {"server": url, "model": name, "tokens per output": max_tokens}
    return Result("serve", title or f"Serving {name}", rows, COLUMNS, NOTES, about)


def _body(model: str, max_tokens: int) -> dict[str, Any]:
    return {
        "model": model,
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def load(
    server: Server, prompts: Sequence[Prompt], clients: int, body: dict[str, Any]
) -> tuple[float, list[Answer]]:
    """All prompts, `clients` at a time; the seconds from the first to the last, and the answers.

    No prompt runs twice under one salt, neither in a load nor in two: no request finds its own
    prompt or output of before.
    """
    ready = threading.Event()
    salt = fresh_salt()
    texts = [prompt.text for prompt in prompts]

    def ask(numbered: tuple[int, Prompt]) -> Answer:
        number, prompt = numbered
        ready.wait()
        own = {"prompt": prompt.text, "temperature": prompt.temperature, "seed": number}
        own["cache_salt"] = f"{salt} {texts[:number].count(prompt.text)}"
        return server.complete(body | own)

    with ThreadPoolExecutor(clients) as pool:
        pending = [pool.submit(ask, numbered) for numbered in enumerate(prompts)]
        started = perf_counter()
        ready.set()
        answers = [one.result() for one in pending]
    return perf_counter() - started, answers


def _row(answers: list[Answer], seconds: float) -> Row:
    waits = sorted(answer.ttft_s for answer in answers)
    return {
        "tokens_per_s": sum(answer.num_tokens for answer in answers) / seconds,
        **estimate(waits).to_dict("ttft_s"),
        "ttft_p95_s": waits[int(0.95 * (len(waits) - 1))],
        "tpot_s": median(answer.tpot_s for answer in answers),
        "num_requests": len(answers),
    }
