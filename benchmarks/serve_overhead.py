"""What HTTP costs over the engine: the same requests three ways through one and the same engine.

    python benchmarks/serve_overhead.py [--write]

bare     Engine.step in a loop, without clients
async    AsyncEngine: every step's events delivered to coroutines of this process
HTTP     server-sent events over a socket to a client in a process of its own

They take turns, round by round; overheads are medians of the ratios inside a round, over several
servers one after the other: what one of them shows is off as a whole, by where its memory happens
to lie. K is fixed, so that all ways take the same steps: with "auto", what the controller tries out
would be compared. The client runs on the same cores, so its processor time is given too.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import multiprocessing
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import report
import uvloop
from serving import bodies
from stream_client import Answer, Load

from outrider.engine.build import EngineConfig, build
from outrider.engine.request import Speculation
from outrider.sampling import SamplingParams
from outrider.server.app import make_app
from outrider.server.run import Server, bind, freeze_garbage, tune_interpreter
from outrider.server.service import Served, Service, State
from outrider.server_config import ServerConfig

SETTLING_S = 8.0  # the idle server has memory provided meanwhile
NUM_SERVERS = 4
LENGTHS = (192, 512)  # of completions
CLIENT = Path(__file__).with_name("stream_client.py")
WISHES: dict[str, tuple[dict[str, Any], Speculation]] = {  # over HTTP, and for the engine
    "off": ({"off": True}, Speculation(proposer=None)),
    "K = 3": (
        {"proposer": "draft-model", "num_draft_tokens": 3},
        Speculation(proposer="draft-model", num_draft_tokens=3),
    ),
}


def _asked(body: dict[str, Any], wish: str) -> tuple[str, dict[str, Any]]:
    params = SamplingParams(
        max_tokens=body["max_tokens"], temperature=body["temperature"], ignore_eos=True
    )
    wanted = {"params": params, "speculation": WISHES[wish][1], "salt": body["cache_salt"]}
    return body["prompt"], wanted


class Ways:
    def __init__(self, served: Served, url: str, client: asyncio.subprocess.Process) -> None:
        self._served, self._url, self._client = served, url, client
        self.wish = "off"

    async def bare(self, bodies: list[dict[str, Any]]) -> tuple[float, float]:
        core = self._served.core

        def run() -> float:
            started = time.perf_counter()
            ids = []
            for body in bodies:
                prompt, request = _asked(body, self.wish)
                ids.append(core.add(prompt, **request))
            for _ in core.run(ids):
                pass
            num_tokens = sum(len(core.collect(i).tokens) for i in ids)
            return num_tokens / (time.perf_counter() - started)

        # The engine's own thread sleeps until it gets a command: this one may drive it meanwhile,
        # once the last clients' farewells have been heard.
        await asyncio.sleep(0.1)
        return await asyncio.to_thread(run), 0.0

    async def in_process(self, bodies: list[dict[str, Any]]) -> tuple[float, float]:
        async def one(body: dict[str, Any]) -> int:
            prompt, request = _asked(body, self.wish)
            num_tokens = 0
            async for event in self._served.engine.stream(prompt, **request):
                num_tokens += len(event.tokens)
            return num_tokens

        started = time.perf_counter()
        num_tokens = sum(await asyncio.gather(*map(one, bodies)))
        return num_tokens / (time.perf_counter() - started), 0.0

    async def over_http(self, bodies: list[dict[str, Any]]) -> tuple[float, float]:
        bodies = [body | {"speculation": WISHES[self.wish][0]} for body in bodies]
        assert self._client.stdin is not None
        assert self._client.stdout is not None
        self._client.stdin.write(json.dumps({"url": self._url, "bodies": bodies}).encode() + b"\n")
        found = json.loads(await self._client.stdout.readline())
        load = Load(**found | {"answers": [Answer(**answer) for answer in found["answers"]]})
        return load.rate, load.cpu_s / load.seconds


@dataclass
class Found:
    """What one way of speculation came to, round by round."""

    rates: list[list[float]] = field(default_factory=list)  # bare, in process, over HTTP
    client_shares: list[float] = field(default_factory=list)

    def add(self, more: Found) -> None:
        self.rates += more.rates
        self.client_shares += more.client_shares

    def row(self, wish: str, num_streams: int, max_tokens: int) -> dict[str, Any]:
        bare, in_process, http = (median(rate) for rate in zip(*self.rates, strict=True))
        return {
            "speculation": wish,
            "streams": num_streams,
            "tokens": max_tokens,
            "rounds": len(self.rates),
            "engine tokens/s": round(bare, 1),
            "AsyncEngine tokens/s": round(in_process, 1),
            "HTTP tokens/s": round(http, 1),
            "HTTP over engine": f"{median([b / h for b, _, h in self.rates]) - 1:.1%}",
            "HTTP over AsyncEngine": f"{median([a / h for _, a, h in self.rates]) - 1:.1%}",
            "client's share of a core": f"{median(self.client_shares):.1%}",
        }


async def measure(num_streams: int, rounds: int, max_tokens: int) -> dict[str, Found]:
    """What a new server shows."""
    # All ways get the same prompts, which no cache may keep for the next way.
    config = EngineConfig(num_draft_tokens=3, prefix_caching=False)
    service = Service(ServerConfig(port=0), lambda: build(config))
    service.on_ready = freeze_garbage  # as `outrider serve` does
    listener = bind(service.config)
    server = Server(service, make_app(service))
    serving = asyncio.create_task(server.serve([listener]))
    client = await asyncio.create_subprocess_exec(
        sys.executable,
        str(CLIENT),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=1 << 24,
    )
    while service.state is State.LOADING:
        await asyncio.sleep(0.05)
    await asyncio.sleep(SETTLING_S)
    ways = Ways(service.served, f"http://127.0.0.1:{listener.getsockname()[1]}", client)
    try:
        found = {}
        for ways.wish in WISHES:
            found[ways.wish] = await _compare(ways, num_streams, rounds, max_tokens)
        return found
    finally:
        client.terminate()
        await client.wait()
        server.stop()
        await serving


async def _compare(ways: Ways, num_streams: int, rounds: int, max_tokens: int) -> Found:
    found = Found()
    contestants = [ways.bare, ways.in_process, ways.over_http]
    for round_ in range(-1, rounds):
        rates = {}
        for i in range(len(contestants)):
            way = contestants[(round_ + i) % len(contestants)]
            asked = bodies(num_streams, round_, max_tokens)
            gc.collect()
            rates[way.__name__], cpu_share = await way(asked)
            if cpu_share:
                found.client_shares.append(cpu_share)
        if round_ >= 0:
            found.rates.append([rates[way.__name__] for way in contestants])
    return found


def rows(num_streams: int, rounds: int, max_tokens: int) -> list[dict[str, Any]]:
    """A row with speculation and one without, of so many rounds with each of the servers."""
    found = {wish: Found() for wish in WISHES}
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn, max_tasks_per_child=1) as processes:
        for _ in range(NUM_SERVERS):
            shown = processes.submit(one_server, num_streams, rounds, max_tokens).result()
            for wish, more in shown.items():
                found[wish].add(more)
    return [one.row(wish, num_streams, max_tokens) for wish, one in found.items()]


def one_server(num_streams: int, rounds: int, max_tokens: int) -> dict[str, Found]:
    """In a process of its own, as `outrider serve` is: on its loop, and tuned like it."""
    tune_interpreter()
    return uvloop.run(measure(num_streams, rounds, max_tokens))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=10, help="with each server")
    parser.add_argument("--max-tokens", type=int, nargs="+", default=list(LENGTHS))
    parser.add_argument("--write", action="store_true", help="write results/serve-overhead")
    asked = parser.parse_args()
    found = [row for n in asked.max_tokens for row in rows(asked.streams, asked.rounds, n)]
    for row in found:
        print(json.dumps(row))
    if asked.write:
        notes = (
            "The same requests through the same engine, bfloat16, all at once, by Engine.step, by "
            "AsyncEngine in the server's process, and by HTTP to another process on the same "
            f"cores. Medians over all rounds of {NUM_SERVERS} servers."
        )
        report.write("serve-overhead", "What HTTP costs", {"HTTP over the engine": found}, notes)


if __name__ == "__main__":
    main()
