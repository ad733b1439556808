"""A peer in its own Python environment: a small script there, connected by JSON lines."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from outrider.bench.contenders import Job, Run
from outrider.bench.measure import Tell
from outrider.bench.peers.base import Way, jobs_by_workload, peer_rows, time_way
from outrider.bench.report import Row
from outrider.bench.settings import Settings
from outrider.bench.workloads import Workload
from outrider.engine.engine import Engine
from outrider.errors import ConfigError

MARK = "@@"  # our lines start with this; such programs print other lines, too


class ProcessPeer:
    def __init__(
        self, name: str, python: Path, script: Path, ways: Callable[[], Sequence[Way]]
    ) -> None:
        if not python.exists():
            raise ConfigError(f"{python}: no such interpreter for {name}")
        self.name = name
        self._python = python
        self._script = script
        self._ways = ways

    def rows(
        self, engine: Engine, workloads: Sequence[Workload], settings: Settings, tell: Tell
    ) -> list[Row]:
        work = jobs_by_workload(engine, workloads, settings)
        found = {}
        for way in self._ways():
            tell(f"{self.name}, {way.name}")
            with self._worker(way.options) as worker:
                found[way.name] = time_way(worker.decode, work, settings)
        return peer_rows(self.name, engine, work, found)

    @contextmanager
    def _worker(self, options: dict[str, Any]) -> Iterator[Worker]:
        process = subprocess.Popen(
            [str(self._python), str(self._script), json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "PYTHONPATH": ""},
        )
        try:
            yield Worker(self.name, process)
        finally:
            if process.stdin is not None:
                process.stdin.close()
            try:
                process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if process.stdout is not None:
                process.stdout.close()


class Worker:
    def __init__(self, name: str, process: subprocess.Popen[str]) -> None:
        self._name = name
        self._process = process
        self._answer()  # it is ready

    def decode(self, job: Job) -> Run:
        assert self._process.stdin is not None
        order = {
            "prompt": job.prompt,
            "max_tokens": job.params.max_tokens,
            "temperature": job.params.temperature,
            "seed": job.params.seed,
            "ends": list(job.ends),
        }
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        answer = self._answer()
        tokens = answer["tokens"]
        return Run([tokens], answer["seconds"], len(tokens) - 1)

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(MARK):
                return json.loads(line[len(MARK) :])
        raise ConfigError(f"{self._name} ended before it was ready: is it installed there?")
