"""The native CPU engine: loads the shared library and calls its C interface.

The library is compiled when the package is built, or by `python -m outrider.native.build`, never
on import. If it is missing, `available()` is False and models run in torch. Calls release the
interpreter lock, and all models share one pool of threads.

Shape legend: R rows, V vocabulary, S sequences.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Sequence
from ctypes import (
    POINTER,
    Structure,
    c_char_p,
    c_double,
    c_float,
    c_int32,
    c_int64,
    c_uint64,
    c_void_p,
)
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch

from outrider.errors import ConfigError, EngineError, ModelError
from outrider.native.structures import Cycles, Experts, Mixer, Parts, StopRules, Stored

__all__ = [
    "Cycles",
    "Experts",
    "Mixer",
    "Parts",
    "StopRules",
    "Stored",
    "available",
    "best_guesses",
    "gumbel",
    "isa",
    "num_threads",
    "read_bandwidth",
    "sample_rows",
    "set_threads",
    "uniforms",
    "why_unavailable",
]

HERE = Path(__file__).parent
OK, INVALID, MEMORY, ROPE_SHORT, CHANGED = range(5)
STATES_HAS, STATES_REPLAYED, STATES_POISON, STATES_FORGET = range(4)
# Types of tensor data, see outrider.h.
STORED_KINDS = {"F32": 0, "BF16": 1, "F16": 4}
PACKED, TURNED, IN_FILE, TIED = 64, 256, 512, -1


class Config(Structure):
    _fields_ = [
        *(
            (name, c_int32)
            for name in (
                "hidden",
                "layers",
                "heads",
                "kv_heads",
                "head_dim",
                "intermediate",
                "vocab",
                "num_tokens",
                "rotary_dim",
                "weight_type",
                "rounds",
                "qk_norm",
                "kind",
                "feature_width",
                "head_rows",
                "markov_rank",
                "variant",
                "kv_bytes",
            )
        ),
        ("eps", c_float),
        ("attention_scale", c_float),
        ("types", c_void_p),
        ("widths", c_void_p),
        ("stays", c_void_p),
        ("parts", Parts),
        ("experts", Experts),
        ("mixer", Mixer),
    ]


class Step(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("taps", "tap_out", "logits", "features", "begun")),
        *(
            (name, c_int32)
            for name in (
                "num_tokens",
                "num_seqs",
                "table_width",
                "num_rows",
                "has_parents",
                "num_taps",
                "exit_layer",
                "start_layer",
                "threads",
            )
        ),
    ]


class Draft(Structure):
    _fields_ = [
        ("out", c_void_p),
        ("out_width", c_int32),
        ("mask_token", c_int32),
        ("states", c_void_p),
        ("stop_rules", StopRules),
        *((name, c_void_p) for name in ("levels", "drawn", "counts")),
    ]


class Tree(Structure):
    _fields_ = [
        *(
            (name, c_void_p)
            for name in ("tokens", "parents", "counts", "fed_tokens", "fed_parents", "fed_counts")
        ),
        *((name, c_int32) for name in ("out_width", "passes", "width", "children")),
    ]


class Sample(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("logits", "out", "scores")),
        *((name, c_int32) for name in ("num_rows", "vocab", "num_tokens", "threads", "children")),
    ]


_SIGNATURES: dict[str, tuple[Any, list[Any] | None]] = {
    "outrider_error": (c_char_p, []),
    "outrider_isa": (c_char_p, []),
    "outrider_cores": (c_int32, []),
    "outrider_struct_sizes": (c_uint64, []),
    "outrider_new": (c_void_p, [POINTER(Config)]),
    "outrider_free": (None, [c_void_p]),
    "outrider_set_tensor": (
        c_int32,
        [c_void_p, c_int32, c_int32, c_void_p, c_int32, c_int64, c_int64, c_int32],
    ),
    "outrider_set_expert": (
        c_int32,
        [c_void_p, c_int32, c_int32, c_int32, c_void_p, c_int32, c_int64, c_int64, c_int32],
    ),
    "outrider_set_layer": (c_int32, [c_void_p, *[c_int32] * 5]),
    "outrider_set_rope": (c_int32, [c_void_p, c_int32, c_void_p, c_void_p, c_int32]),
    "outrider_set_ids": (c_int32, [c_void_p, c_void_p, c_int32]),
    "outrider_pack": (c_int32, [c_void_p, c_int32]),
    "outrider_ready": (c_int32, [c_void_p]),
    "outrider_allocate": (c_int32, [c_void_p, c_int32, c_int32]),
    "outrider_populate": (c_int64, [c_void_p, c_int64, c_int64]),
    "outrider_states": (c_int64, [c_void_p, c_int32, c_int32]),
    "outrider_weight_bytes": (c_int64, [c_void_p]),
    # Called once per step: bytes and argument blocks are passed without conversion.
    "outrider_step": (c_int32, None),
    "outrider_step_and_draw": (c_int32, None),
    "outrider_draft": (c_int32, None),
    "outrider_grow": (c_int32, None),
    "outrider_run_cycles": (c_int32, None),
    "outrider_copy_slots": (c_int32, [c_void_p, c_void_p, c_void_p, c_int32]),
    "outrider_sample": (c_int32, None),
    "outrider_read": (c_float, [c_void_p, c_int64, c_int32]),
    "outrider_suffix_new": (
        c_void_p,
        [c_char_p, c_int32, c_double, c_int32, c_char_p, c_int32],
    ),
    "outrider_suffix_begin": (c_int32, [c_void_p]),
    "outrider_suffix_others": (c_int32, [c_void_p, c_void_p, c_int32]),
    "outrider_ngram_new": (
        c_void_p,
        [c_char_p, c_int32, c_int32, c_int32, c_char_p, c_int32],
    ),
    "outrider_lookup_free": (None, [c_void_p]),
    "outrider_lookup_size": (c_int64, None),
    "outrider_lookup_extend": (c_int32, [c_void_p, c_char_p, c_int32]),
    "outrider_lookup_draft": (c_int32, None),
    "outrider_noise": (c_int32, [c_uint64, c_int32, c_void_p, c_void_p]),
}


@lru_cache(maxsize=1)
def _load() -> tuple[ctypes.CDLL | None, str]:
    """The library, or None and the reason why it is missing."""
    path = Path(os.environ.get("OUTRIDER_NATIVE_LIBRARY") or HERE / "_outrider.so")
    if not path.is_file():
        return None, (
            f"{path.name} has not been compiled; run `python -m outrider.native.build`"
            " on a machine with a C++ compiler"
        )
    try:
        lib = ctypes.CDLL(str(path))
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(lib, name)
            function.restype = result
            if arguments is not None:
                function.argtypes = arguments
    except (OSError, AttributeError) as error:
        return None, f"{path.name} does not load ({error}); run `python -m outrider.native.build`"
    structs = (Config, Step, Draft, Tree, Sample, Cycles)
    sizes = sum(ctypes.sizeof(struct) << 10 * i for i, struct in enumerate(structs))
    if lib.outrider_struct_sizes() != sizes:
        return None, f"{path.name} is out of date; run `python -m outrider.native.build`"
    return lib, ""


def library() -> ctypes.CDLL:
    """The loaded library; raises `ModelError` if there is none."""
    lib, reason = _load()
    if lib is None:
        raise ModelError(f"the native engine is not available: {reason}")
    return lib


def available() -> bool:
    """Whether the library is compiled and loads."""
    return _load()[0] is not None


def why_unavailable() -> str:
    """The reason in one line; empty if the library is available."""
    return _load()[1]


def isa() -> str:
    """The kernels in use, such as avx512, avx2, i8mm or portable. OUTRIDER_ISA forces one."""
    name = library().outrider_isa()
    if name is None:
        raise ConfigError(error_message())
    return str(name.decode())


def error_message() -> str:
    """The message of this thread's last failed call."""
    return str(library().outrider_error().decode())


def check(code: int) -> None:
    """Raises for the return code of a call that was given a batch."""
    if code == OK:
        return
    if code == MEMORY:
        raise EngineError(error_message())
    if code == CHANGED:
        raise ModelError(error_message())
    raise ValueError(error_message())


_threads: int | None = None


def set_threads(count: int | None) -> None:
    """Sets the number of threads of a step; None: all cores that this process may use."""
    global _threads
    if count is not None and not 1 <= count <= 256:
        raise ConfigError(f"threads must be between 1 and 256, not {count}")
    _threads = count


def num_threads() -> int:
    return _threads if _threads is not None else _cores()


@lru_cache(maxsize=1)
def _cores() -> int:
    return int(library().outrider_cores())


def joined(arrays: Sequence[npt.NDArray[Any]], dtypes: Sequence[np.dtype[Any]]) -> bytes:
    """Concatenates the bytes of arrays, each in its dtype; converts only if necessary.

    Copying a few hundred bytes once takes a fifth of the time of asking NumPy for the addresses.
    """
    for array, dtype in zip(arrays, dtypes, strict=True):
        if array.dtype is not dtype:
            break
    else:
        try:
            return b"".join(cast("Sequence[memoryview]", arrays))
        except BufferError:  # not contiguous
            pass
    return b"".join(a.astype(d).tobytes() for a, d in zip(arrays, dtypes, strict=True))


_SAMPLE_DTYPES = tuple(
    np.dtype(t) for t in (np.uint64, np.float32, np.int32, np.float32, np.float32)
)


class _SampleBlock(threading.local):
    """The argument block and the result buffer of a thread."""

    def __init__(self) -> None:
        self.block = Sample(scores=None, children=0)
        self.argument = ctypes.byref(self.block)
        self.reserve(64)

    def reserve(self, num_rows: int) -> None:
        self.size = num_rows
        self.out = (c_int32 * num_rows)()
        self.block.out = ctypes.addressof(self.out)


_sample_block = _SampleBlock()


def _joined_rows(num_rows: int, *arrays: npt.NDArray[Any]) -> bytes:
    """The parameters of a sampling call, one value per row in each array."""
    for array in arrays:
        if array.size != num_rows:
            raise ValueError(f"{array.size} parameters for {num_rows} rows")
    return joined(arrays, _SAMPLE_DTYPES)


def sample_rows(
    logits_RV: torch.Tensor,
    temperature_R: npt.NDArray[np.float32],
    top_k_R: npt.NDArray[np.int32],
    top_p_R: npt.NDArray[np.float32],
    min_p_R: npt.NDArray[np.float32],
    keys_R: npt.NDArray[np.uint64],
    num_tokens: int | None = None,
) -> list[int]:
    """One token per row of float32 CPU logits: temperature, top-k, top-p, min-p, Gumbel argmax.

    `keys_R` are draw keys. Temperature 0 is the argmax, the lowest index on ties. Ids from
    `num_tokens` on are never drawn; a row with a NaN gives -1. Nothing is mutated.
    """
    lib = library()
    num_rows, vocab = logits_RV.shape
    if logits_RV.dtype != torch.float32 or not logits_RV.is_contiguous():
        logits_RV = logits_RV.float().contiguous()
    parameters = _joined_rows(num_rows, keys_R, temperature_R, top_k_R, top_p_R, min_p_R)
    local = _sample_block
    if num_rows > local.size:
        local.reserve(num_rows)
    block = local.block
    block.logits = logits_RV.data_ptr()
    block.num_rows = num_rows
    block.vocab = vocab
    block.num_tokens = vocab if num_tokens is None else num_tokens
    block.threads = num_threads()
    check(lib.outrider_sample(parameters, local.argument))
    tokens: list[int] = local.out[:num_rows]
    return tokens


def best_guesses(
    logits_RV: torch.Tensor,
    temperature_R: npt.NDArray[np.float32],
    top_k_R: npt.NDArray[np.int32],
    top_p_R: npt.NDArray[np.float32],
    min_p_R: npt.NDArray[np.float32],
    keys_R: npt.NDArray[np.uint64],
    count: int,
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
    """Tokens and scores, [R, count]: the largest of logits + T * noise, as log probabilities.

    -1 and -inf if the filters keep fewer. For ranking only: the noise is exact to about 1e-5.
    """
    num_rows, vocab = logits_RV.shape
    logits_RV = logits_RV.float().contiguous()
    tokens_RC = np.empty((num_rows, count), np.int32)
    scores_RC = np.empty((num_rows, count), np.float32)
    parameters = _joined_rows(num_rows, keys_R, temperature_R, top_k_R, top_p_R, min_p_R)
    block = Sample(
        logits_RV.data_ptr(),
        tokens_RC.ctypes.data,
        scores_RC.ctypes.data,
        num_rows,
        vocab,
        vocab,
        num_threads(),
        count,
    )
    check(library().outrider_sample(parameters, ctypes.byref(block)))
    return tokens_RC, scores_RC


def read_bandwidth(data: npt.NDArray[np.float32], repeats: int = 1) -> float:
    """The bytes per second at which all threads together read `data`: the best of `repeats`."""
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        library().outrider_read(data.ctypes.data, data.size, num_threads())
        seconds.append(time.perf_counter() - started)
    return data.nbytes / min(seconds)


def uniforms(key: int, size: int) -> npt.NDArray[np.float32]:
    """u(0..size-1) of a draw key, as `outrider.noise` defines it."""
    out = np.empty(size, np.float32)
    library().outrider_noise(key, size, out.ctypes.data, None)
    return out


def gumbel(key: int, size: int) -> npt.NDArray[np.float32]:
    """gumbel(0..size-1) of a draw key."""
    out = np.empty(size, np.float32)
    library().outrider_noise(key, size, None, out.ctypes.data)
    return out
