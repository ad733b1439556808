"""What HTTP costs over the engine: the same requests three ways through one and the same engine.

    python benchmarks/serve_overhead.py

bare     Engine.step in a loop, nobody listening
async    AsyncEngine: every step's events delivered to coroutines of this process
HTTP     server-sent events over a socket to a client in a process of its own

They take turns, round by round; overheads are medians of the ratios inside a round. K is fixed, so
that all ways take the same steps: with "auto", what the controller tries out would be compared. The
client runs on the same cores, so its processor time is given too.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

from serving import bodies
from stream_client import Answer, Load

from outrider.engine.build import EngineConfig, build
from outrider.engine.request import Speculation
from outrider.sampling import SamplingParams
from outrider.server.app import make_app
from outrider.server.config import ServerConfig
from outrider.server.lifecycle import State
from outrider.server.run import SWITCH_S, Server, bind
from outrider.server.service import Served, Service

SETTLING_S = 8.0  # the idle server has memory provided meanwhile
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
    return body["prompt"], {"params": params, "speculation": WISHES[wish][1]}


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


async def measure(num_streams: int, rounds: int, max_tokens: int) -> list[dict[str, Any]]:
    # All ways get the same prompts: none may profit from what another one left behind.
    config = EngineConfig(num_draft_tokens=3, prefix_caching=False)
    service = Service(ServerConfig(port=0), lambda: build(config))
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
    found = []
    try:
        for ways.wish in WISHES:
            found.append(await _compare(ways, num_streams, rounds, max_tokens))
    finally:
        client.terminate()
        await client.wait()
        server.stop()
        await serving
    return found


async def _compare(ways: Ways, num_streams: int, rounds: int, max_tokens: int) -> dict[str, Any]:
    contestants = [ways.bare, ways.in_process, ways.over_http]
    rates: list[list[float]] = []
    client_share = []
    for round_ in range(-1, rounds):
        found = {}
        for i in range(len(contestants)):
            way = contestants[(round_ + i) % len(contestants)]
            asked = bodies(num_streams, round_, max_tokens)
            gc.collect()
            found[way.__name__], cpu_share = await way(asked)
            if cpu_share:
                client_share.append(cpu_share)
        if round_ >= 0:
            rates.append([found[way.__name__] for way in contestants])
    bare, in_process, http = (median(rate) for rate in zip(*rates, strict=True))
    return {
        "speculation": ways.wish,
        "streams": num_streams,
        "tokens": max_tokens,
        "engine tokens/s": round(bare, 1),
        "AsyncEngine tokens/s": round(in_process, 1),
        "HTTP tokens/s": round(http, 1),
        "HTTP over engine": f"{median([b / h for b, _, h in rates]) - 1:.1%}",
        "HTTP over AsyncEngine": f"{median([a / h for _, a, h in rates]) - 1:.1%}",
        "client's share of a core": f"{median(client_share):.1%}",
    }


def rows(num_streams: int, rounds: int, max_tokens: int) -> list[dict[str, Any]]:
    """A row with speculation and one without."""
    sys.setswitchinterval(SWITCH_S)  # as `outrider serve` does
    return asyncio.run(measure(num_streams, rounds, max_tokens))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=192)
    asked = parser.parse_args()
    for row in rows(asked.streams, asked.rounds, asked.max_tokens):
        print(json.dumps(row))


if __name__ == "__main__":
    main()
