"""What the benchmarks of a random 8B model on a GPU share: its models, clocks and result file."""

from __future__ import annotations

import json
import statistics
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import report
import torch
from gpu_cycle import Cycle
from gpu_engine import say
from gpu_pair import LLAMA_1B, LLAMA_8B, RandomTensors, make

from outrider.contracts import StepBatch
from outrider.cuda.tiles import Shape, Tiles
from outrider.cuda.triton_ops import TritonOps
from outrider.model.cuda_decoder import CudaDecoder

DEVICE = torch.device("cuda")
FULL_LAYERS, EPSILON, SHARPNESS, NUM_DRAFTS = 3, 0.05, 4.0, 4


def timed(run: Callable[[], object], count: int = 20, rounds: int = 5) -> float:
    """Milliseconds of one run: the median of several rounds, each `count` runs in a row."""
    run()
    torch.cuda.synchronize()
    times: list[float] = []
    for _ in range(rounds):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        for _ in range(count):
            run()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) / count)
    return statistics.median(times)


def graph_of(run: Callable[[], object]) -> Callable[[], None]:
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    replay: Callable[[], None] = graph.replay
    return replay


class Bench:
    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder
        self.tables: dict[str, list[dict[str, Any]]] = {}
        self.failed: dict[str, str] = {}
        self.tensors = RandomTensors(
            DEVICE, full_layers=FULL_LAYERS, epsilon=EPSILON, sharpness=SHARPNESS
        )
        self.tiles: dict[Shape, Tiles] = {}
        self.options: dict[str, Any] = {}
        self._models: dict[str, CudaDecoder] = {}

    def model(self, name: str) -> CudaDecoder:
        """By size, with ", int8" after it for weights of 8 bits."""
        if name not in self._models:
            if name.startswith("1B"):
                made = make(RandomTensors(DEVICE, seed=1), LLAMA_1B, DEVICE)
            else:
                layers = 32 if name.startswith("8B") else FULL_LAYERS
                made = make(self.tensors, LLAMA_8B, DEVICE, num_hidden_layers=layers)
            self._models[name] = made.round_weights() if name.endswith("int8") else made
            say("made", name, f"{torch.cuda.memory_allocated() / 1e9:.1f} GB on the device")
        return self._models[name]

    def prepare(self, model: CudaDecoder) -> None:
        """After an `allocate`: the best tiles and options that were found."""
        if isinstance(model.ops, TritonOps):
            model.ops.tiles.update(self.tiles)
            for name, value in self.options.items():
                setattr(model.ops, name, value)

    def cycle(self, draft: str | None, num_drafts: int, **more: Any) -> Cycle:
        cycle = Cycle(
            self.model("8B"), self.model(draft) if draft else None, num_drafts=num_drafts, **more
        )
        for model in (cycle.target, cycle.draft):
            if model is not None:
                self.prepare(model)
        return cycle

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        say("section", name)
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            self.failed[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
        self.write()

    def write(self) -> None:
        tables = {heading: rows for heading, rows in self.tables.items() if rows}
        if not tables:
            return
        notes = (
            f"Random weights in the shape of an 8B Llama, bfloat16, {torch.cuda.get_device_name()}."
            f" Layers from {FULL_LAYERS} on add {EPSILON} of what they would, the head is"
            f" {SHARPNESS:g} times as sharp: the first {FULL_LAYERS} layers are the draft model."
            " Times are medians of device events; `tokens_per_s` is a generation by the clock."
        )
        if self.failed:
            notes += f" Failed: {json.dumps(self.failed)}."
        report.write(self.name, "Decoding on a GPU", tables, notes, self.folder)


def layout(context: int, width: int, page: int = 16) -> StepBatch:
    pages = -(-(context + width) // page)
    return StepBatch(
        tokens_T=np.arange(5, 5 + width, dtype=np.int32),
        positions_T=np.arange(context, context + width, dtype=np.int32),
        starts_S1=np.array([0, width], np.int32),
        context_S=np.array([context], np.int32),
        tables_SW=np.arange(pages, dtype=np.int32)[None],
        logit_rows_R=np.arange(width, dtype=np.int32),
    )


def prompt(length: int, seed: int = 0) -> list[int]:
    random = np.random.default_rng(seed)
    tokens: list[int] = random.integers(0, 128256, length).tolist()
    return tokens
