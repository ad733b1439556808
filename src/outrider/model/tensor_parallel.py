"""One model in several processes: each holds a share of the heads and of the inner layer.

Queries, keys, values, gates and ups are split by rows, the products after them by columns, so that
a layer needs two sums over all processes. The rows of the output head are split if they divide
evenly, and rank 0 concatenates the logits. Rank 0 is the process with the engine: it sends commands
to the other ranks and makes every decision (drafts, draws, commits) alone.

Communication is torch.distributed: gloo on CPUs, NCCL between GPUs. The order of the sums differs
from that of one process, so tokens are the same up to near-ties.

Shape legend: T tokens of the pass, R rows with logits, V vocabulary, H hidden.
"""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from outrider.contracts import IntArray, StepBatch, StepOutput
from outrider.errors import ConfigError, EngineError
from outrider.model.checkpoints import open_checkpoint
from outrider.model.families import DecoderConfig, read_decoder_config
from outrider.model.gguf.files import model_name
from outrider.model.tensors import Tensors
from outrider.model.torch_decoder import TorchDecoder
from outrider.model.weights import count_tokens, read_config, read_eos_ids

_BY_ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
_BY_COLUMNS = ("o_proj", "down_proj")
_FOREVER = timedelta(days=3650)  # a server may wait long for its next request
_MAX_RANKS = 64


def check_split(config: DecoderConfig, size: int) -> None:
    """Raises ConfigError if the model cannot be split evenly."""
    if not 1 <= size <= _MAX_RANKS:
        raise ConfigError(f"tensor_parallel_size must be between 1 and {_MAX_RANKS}, not {size}")
    if not config.is_llama:
        raise ConfigError(
            f"tensor_parallel_size above 1 needs a Llama-shaped model, not {config.family}"
        )
    if config.num_kv_heads % size or config.intermediate_size % size:
        raise ConfigError(
            f"tensor_parallel_size {size} does not divide this model's {config.num_kv_heads} "
            f"key/value heads and inner size {config.intermediate_size}; choose one that does"
        )


class _Share:
    """The tensors of one rank: shares of the split products, whole tensors otherwise."""

    def __init__(self, whole: Tensors, rank: int, size: int) -> None:
        self._whole = whole
        self._rank = rank
        self._size = size

    def tensor(self, name: str, shape: Sequence[int]) -> torch.Tensor:
        wanted = list(shape)
        if any(part in name for part in _BY_ROWS):
            return self._cut(name, wanted, 0)
        if any(part in name for part in _BY_COLUMNS):
            if len(wanted) == 2:
                return self._cut(name, wanted, 1)
            bias = self._whole.tensor(name, wanted)
            return bias if self._rank == 0 else torch.zeros_like(bias)  # once in the sum
        return self._whole.tensor(name, wanted)

    def _cut(self, name: str, wanted: list[int], dim: int) -> torch.Tensor:
        count = wanted[dim]
        wanted[dim] = count * self._size
        return self._whole.tensor(name, wanted).narrow(dim, self._rank * count, count)


class _RankDecoder(TorchDecoder):
    """The compact decoder over the share of one rank."""

    rank: int
    size: int

    @classmethod
    def load_share(
        cls, folder: Path, rank: int, size: int, device: str, dtype: torch.dtype | None
    ) -> _RankDecoder:
        raw = read_config(folder)
        whole = read_decoder_config(raw)
        config = replace(
            whole,
            num_heads=whole.num_heads // size,
            num_kv_heads=whole.num_kv_heads // size,
            intermediate_size=whole.intermediate_size // size,
        )
        model = cls.read(
            _Share(open_checkpoint(folder), rank, size),
            config,
            name=model_name(folder),
            num_tokens=count_tokens(folder, whole.vocab_size),
            eos_ids=read_eos_ids(folder, raw),
            device=torch.device(device),
            dtype=dtype,
        )
        model.rank, model.size = rank, size
        if whole.vocab_size % size == 0:
            count = whole.vocab_size // size
            model.head_VH = model.head_VH[rank * count : (rank + 1) * count].clone()
        return model

    def _add_product(
        self,
        x_TH: torch.Tensor,
        a: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        norm_H: torch.Tensor | None = None,
    ) -> None:
        part = a @ weight if bias is None else torch.addmm(bias, a, weight)
        dist.all_reduce(part)
        x_TH += part

    def _logits(self, x_RH: torch.Tensor) -> torch.Tensor:
        mine = F.linear(x_RH, self.head_VH).float().contiguous()
        if self.head_VH.shape[0] == self.spec.vocab_size:
            return mine
        parts = [torch.empty_like(mine) for _ in range(self.size)] if self.rank == 0 else None
        dist.gather(mine, parts)
        return mine if parts is None else torch.cat(parts, dim=-1)


class TensorParallelModel:
    """`contracts.Model`: rank 0 of a group of processes, which it starts and ends."""

    def __init__(
        self, folder: Path, size: int, *, device: str = "cpu", dtype: torch.dtype | None = None
    ) -> None:
        if dist.is_initialized():
            raise ConfigError("a process can hold one tensor-parallel model; close the first one")
        check_split(read_decoder_config(read_config(folder)), size)
        kind = torch.device(device).type
        if kind == "cuda" and torch.cuda.device_count() < size:
            raise ConfigError(
                f"tensor_parallel_size {size} needs as many GPUs; here are "
                f"{torch.cuda.device_count()}"
            )
        self._meeting = tempfile.TemporaryDirectory(prefix="outrider-ranks-")
        meeting = str(Path(self._meeting.name) / "meeting")
        kept = "" if dtype is None else str(dtype).removeprefix("torch.")
        self.workers = [
            subprocess.Popen(
                [sys.executable, "-m", __name__, meeting, f"{rank}", f"{size}", folder, kind, kept],
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # only rank 0 handles Ctrl-C
            )
            for rank in range(1, size)
        ]
        atexit.register(self.close)
        try:
            _join(meeting, 0, size, kind)
            self._model = _RankDecoder.load_share(folder, 0, size, _device(kind, 0), dtype)
            _send("ready")
        except BaseException:
            self._end()
            raise
        share = self._model.spec
        self.spec = replace(share, num_parameters=_count(self._model, size))
        self.size = size

    def allocate(self, num_blocks: int, block_size: int) -> None:
        self._together("allocate", num_blocks, block_size)

    def forward(self, batch: StepBatch) -> StepOutput:
        output: StepOutput = self._together("forward", replace(batch, draws=None))
        return output

    def copy_slots(self, source: IntArray, target: IntArray) -> None:
        self._together("copy_slots", source, target)

    def close(self) -> None:
        """Ends the other processes; the model cannot compute after that. Can be called twice."""
        atexit.unregister(self.close)
        if self.workers and dist.is_initialized():
            with suppress(RuntimeError):  # it has ended already
                _send("stop")
        self._end()

    def _together(self, name: str, *arguments: object) -> Any:
        """Calls a method on every rank. If it fails on one rank, the others wait for its numbers
        forever, so the group ends."""
        if not self.workers:
            raise EngineError("the tensor-parallel processes have ended; load the model again")
        try:
            _send(name, *arguments)
            return getattr(self._model, name)(*arguments)
        except Exception as error:
            for worker in self.workers:
                worker.kill()
            self._end()
            raise EngineError(f"a tensor-parallel process failed: {error}") from error

    def _end(self) -> None:
        for worker in self.workers:
            try:
                worker.wait(timeout=5)
            except subprocess.TimeoutExpired:
                worker.kill()
                worker.wait()
        self.workers = []
        if dist.is_initialized():
            dist.destroy_process_group()
        self._meeting.cleanup()


def _send(*command: object) -> None:
    """From rank 0 to all others: the name of a method and its arguments, or "ready" or "stop"."""
    dist.broadcast_object_list([command], src=0)


def _count(model: TorchDecoder, size: int) -> int:
    """The parameters of the whole model, from one share: split tensors count `size` times."""
    config = model.config
    cut = config.hidden_size * config.head_dim * (2 * config.num_heads + 2 * config.num_kv_heads)
    cut += 3 * config.hidden_size * config.intermediate_size
    if config.qkv_bias:
        cut += config.head_dim * (config.num_heads + 2 * config.num_kv_heads)
    if config.mlp_bias:
        cut += 2 * config.intermediate_size
    return model.spec.num_parameters + (size - 1) * config.num_layers * cut


def _device(kind: str, rank: int) -> str:
    return f"cuda:{rank}" if kind == "cuda" else kind


def _join(meeting: str, rank: int, size: int, kind: str) -> None:
    if kind == "cuda":
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(max(1, torch.get_num_threads() // size))
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo",
        init_method=f"file://{meeting}",
        rank=rank,
        world_size=size,
        timeout=_FOREVER,
    )


def _work(meeting: str, rank: int, size: int, folder: Path, kind: str, dtype: str) -> None:
    """Runs the commands of rank 0 until it sends "stop" or ends."""
    _join(meeting, rank, size, kind)
    kept = getattr(torch, dtype) if dtype else None
    model = _RankDecoder.load_share(folder, rank, size, _device(kind, rank), kept)
    while True:
        command: list[Any] = [None]
        try:
            dist.broadcast_object_list(command, src=0)
        except RuntimeError:  # rank 0 has ended and reports the reason itself
            return
        name, *arguments = command[0]
        if name == "stop":
            break
        if name != "ready":
            getattr(model, name)(*arguments)
    dist.destroy_process_group()


if __name__ == "__main__":
    _meeting, _rank, _size, _folder, _kind, _dtype = sys.argv[1:]
    _work(_meeting, int(_rank), int(_size), Path(_folder), _kind, _dtype)
