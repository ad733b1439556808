"""The server that `plan_check.py` measures, and its client."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import cached_property
from http.client import HTTPConnection, HTTPException
from pathlib import Path

from outrider import LLM
from outrider.integrations.vllm.child import free_port
from outrider.plan.simulate import Arrival

ROOT = Path(__file__).parents[1]
K = 3
STREAMS = (1, 2, 4, 8, 16)
PROMPT_TOKENS, CALIBRATING_TOKENS = 64, 64
TEMPERATURE = 0.8


@dataclass(frozen=True)
class Stream:
    """One answer as its client saw it, read only when all is over: the server needs the cores."""

    sent_s: float
    lines: list[tuple[float, bytes]]

    @cached_property
    def counts(self) -> list[tuple[float, int]]:
        """When how many tokens were there."""
        events = [(at, json.loads(line[6:])) for at, line in self.lines if line[:7] == b"data: {"]
        return [(at, e["usage"]["completion_tokens"]) for at, e in events if e["choices"]]

    @property
    def num_tokens(self) -> int:
        return self.counts[-1][1]

    @property
    def ttft_s(self) -> float:
        return self.counts[0][0] - self.sent_s

    @property
    def rest_s(self) -> float:
        """From the first token to the last."""
        return self.counts[-1][0] - self.counts[0][0]

    @property
    def tpot_s(self) -> float:
        return self.rest_s / max(1, self.num_tokens - 1)

    def rate(self, start_s: float, end_s: float) -> float | None:
        """Tokens per second from news to news: in between, some are held back."""
        inside = [(at, n) for at, n in self.counts if start_s <= at <= end_s]
        if len(inside) < 2:
            return None
        (first_s, before), (last_s, after) = inside[0], inside[-1]
        return (after - before) / (last_s - first_s)


class Client:
    """The server under test and prompts of any length for it."""

    def __init__(self, port: int) -> None:
        self.port = port
        texts = (ROOT / "src/outrider/bench/texts/long.jsonl").read_text()
        self._tokens = LLM("bundled", num_draft_tokens=0).engine.tokenizer.encode(texts)
        self._next = 0

    def ask(self, num_prompt: int, num_output: int, k: int) -> Stream:
        """A stream over a piece of text that was not used before."""
        self._next += 1
        at = 61 * self._next % (len(self._tokens) - num_prompt)
        body = {
            "model": "bundled",
            "prompt": self._tokens[at : at + num_prompt],
            "max_tokens": num_output,
            "temperature": TEMPERATURE,
            "seed": self._next,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            "speculation": {"num_draft_tokens": k},
        }
        headers = {"Content-Type": "application/json"}
        with closing(HTTPConnection("127.0.0.1", self.port, timeout=60)) as connection:
            sent_s = time.perf_counter()
            connection.request("POST", "/v1/completions", json.dumps(body), headers)
            response = connection.getresponse()
            if response.status != 200:
                raise HTTPException(response.read(300))
            return Stream(sent_s, [(time.perf_counter(), line) for line in response])

    def at_once(self, count: int, num_output: int, k: int) -> list[Stream]:
        with ThreadPoolExecutor(count) as pool:
            asked = [pool.submit(self.ask, PROMPT_TOKENS, num_output, k) for _ in range(count)]
            return [one.result() for one in asked]

    def beside_a_stream(self, count: int) -> list[float]:
        """Waits of requests for one token after one, while the server decodes."""
        with ThreadPoolExecutor(1) as pool:
            other = pool.submit(self.ask, PROMPT_TOKENS, CALIBRATING_TOKENS, 0)
            time.sleep(0.08)  # its prompt is read
            waits = [self.ask(1, 1, 0).ttft_s for _ in range(count)]
            other.result()
        return waits

    def replay(self, trace: list[Arrival], k: int) -> tuple[float, list[Stream]]:
        """Requests at the trace's times; the seconds until the last has ended."""
        started = time.perf_counter()
        with ThreadPoolExecutor(128) as pool:
            asked = []
            for arrival in trace:
                time.sleep(max(0.0, started + arrival.at_s - time.perf_counter()))
                asked.append(pool.submit(self.ask, arrival.prompt_tokens, arrival.output_tokens, k))
            answers = [one.result() for one in asked]
        return time.perf_counter() - started, answers


@contextmanager
def serving() -> Iterator[Client]:
    port = free_port()
    args = ["serve", "bundled", "--draft-model", "bundled:draft", "-k", str(K), "--port", str(port)]
    args += ["--max-num-seqs", str(max(STREAMS)), "--no-prefix-caching", "--log-level", "warning"]
    args += ["--threads", "1"]
    process = subprocess.Popen([sys.executable, "-m", "outrider", *args])
    try:
        client = Client(port)
        for _ in range(240):
            if process.poll() is not None:
                raise SystemExit("the server did not start")
            try:
                client.ask(8, 8, 0)
                break
            except (OSError, HTTPException):  # still loading
                time.sleep(0.25)
        yield client
    finally:
        process.terminate()
        process.wait(60)
