"""The native CPU engine: loads the shared library and speaks its C interface.

The library is compiled when the package is built, or by `python -m outrider.native.build`; it is
never compiled on import. Where it is missing `available()` is False and torch does the work.
Calls release the interpreter lock, and all models share one pool of threads.

Shape legend: R rows, V vocabulary, S sequences.
"""

from __future__ import annotations

import ctypes
import os
from ctypes import POINTER, Structure, c_char_p, c_float, c_int32, c_int64, c_uint64, c_void_p
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from outrider.errors import ConfigError, EngineError, ModelError

__all__ = [
    "available",
    "gumbel",
    "isa",
    "num_threads",
    "sample_rows",
    "set_threads",
    "uniforms",
    "why_unavailable",
]

HERE = Path(__file__).parent
OK, INVALID, MEMORY, ROPE_SHORT = range(4)


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
                "qk_norm",
            )
        ),
        ("eps", c_float),
        ("attention_scale", c_float),
    ]


class Step(Structure):
    _fields_ = [
        *(
            (name, c_void_p)
            for name in (
                "tokens",
                "positions",
                "starts",
                "context",
                "tables",
                "logit_rows",
                "parents",
                "taps",
                "tap_out",
                "logits",
            )
        ),
        *(
            (name, c_int32)
            for name in (
                "num_tokens",
                "num_seqs",
                "table_width",
                "num_rows",
                "num_taps",
                "exit_layer",
                "threads",
            )
        ),
    ]


class Draft(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("num_tokens", "temperature", "key", "out")),
        ("out_width", c_int32),
    ]


class Sample(Structure):
    _fields_ = [
        *(
            (name, c_void_p)
            for name in (
                "logits",
                "temperature",
                "top_k",
                "top_p",
                "min_p",
                "key",
                "out",
            )
        ),
        *((name, c_int32) for name in ("num_rows", "vocab", "num_tokens", "threads")),
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
    "outrider_set_window": (c_int32, [c_void_p, c_int32, c_int32]),
    "outrider_set_rope": (c_int32, [c_void_p, c_void_p, c_void_p, c_int32]),
    "outrider_ready": (c_int32, [c_void_p]),
    "outrider_allocate": (c_int32, [c_void_p, c_int32, c_int32]),
    "outrider_weight_bytes": (c_int64, [c_void_p]),
    # Arguments that are built once per model and passed as they are.
    "outrider_step": (c_int32, None),
    "outrider_draft": (c_int32, None),
    "outrider_copy_slots": (c_int32, [c_void_p, c_void_p, c_void_p, c_int32]),
    "outrider_sample": (c_int32, [POINTER(Sample)]),
    "outrider_noise": (c_int32, [c_uint64, c_int32, c_void_p, c_void_p]),
}


@lru_cache(maxsize=1)
def _load() -> tuple[ctypes.CDLL | None, str]:
    """The library, or None and the reason."""
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
    sizes = sum(ctypes.sizeof(t) << 16 * i for i, t in enumerate((Config, Step, Draft, Sample)))
    if lib.outrider_struct_sizes() != sizes:
        return None, f"{path.name} is out of date; run `python -m outrider.native.build`"
    return lib, ""


def library() -> ctypes.CDLL:
    """The loaded library; `ModelError` where there is none."""
    lib, reason = _load()
    if lib is None:
        raise ModelError(f"the native engine is not available: {reason}")
    return lib


def available() -> bool:
    """Whether the library is compiled and loads."""
    return _load()[0] is not None


def why_unavailable() -> str:
    """Empty if it is available."""
    return _load()[1]


def isa() -> str:
    """The instruction set in use: avx512, avx2 or portable. OUTRIDER_ISA forces one."""
    name = library().outrider_isa()
    if name is None:
        raise ConfigError(error_message())
    return str(name.decode())


def error_message() -> str:
    """What the last failed call of this thread had to say."""
    return str(library().outrider_error().decode())


def check(code: int) -> None:
    """Raises for the return code of a call that was given a batch."""
    if code == OK:
        return
    if code == MEMORY:
        raise EngineError(error_message())
    raise ValueError(error_message())


_threads: int | None = None


def set_threads(count: int | None) -> None:
    """How many threads a step uses from now on; None: every core this process may use."""
    global _threads
    if count is not None and not 1 <= count <= 256:
        raise ConfigError(f"threads must be between 1 and 256, not {count}")
    _threads = count


def num_threads() -> int:
    return _threads if _threads is not None else int(library().outrider_cores())


def sample_rows(
    logits_RV: torch.Tensor,
    temperature_R: npt.NDArray[np.float32],
    top_k_R: npt.NDArray[np.int32] | None,
    top_p_R: npt.NDArray[np.float32] | None,
    min_p_R: npt.NDArray[np.float32] | None,
    keys_R: npt.NDArray[np.uint64],
    num_tokens: int | None = None,
) -> list[int]:
    """One token per row of float32 CPU logits: temperature, top-k, top-p, min-p, Gumbel argmax.

    `keys_R` are draw keys; temperature 0 is the argmax, lowest index on ties; ids from
    `num_tokens` on are never drawn. Nothing is mutated. Filters that are None are off.
    """
    lib = library()
    num_rows, vocab = logits_RV.shape
    if logits_RV.dtype != torch.float32 or not logits_RV.is_contiguous():
        logits_RV = logits_RV.float().contiguous()
    arrays = [
        _row_array(temperature_R, np.float32, num_rows),
        None if top_k_R is None else _row_array(top_k_R, np.int32, num_rows),
        None if top_p_R is None else _row_array(top_p_R, np.float32, num_rows),
        None if min_p_R is None else _row_array(min_p_R, np.float32, num_rows),
        _row_array(keys_R, np.uint64, num_rows),
        np.empty(num_rows, np.int32),
    ]
    out_R = arrays[-1]
    assert out_R is not None
    arguments = Sample(
        logits_RV.data_ptr(),
        *(None if a is None else a.ctypes.data for a in arrays),
        num_rows,
        vocab,
        vocab if num_tokens is None else num_tokens,
        num_threads(),
    )
    check(lib.outrider_sample(ctypes.byref(arguments)))
    tokens: list[int] = out_R.tolist()
    return tokens


def _row_array(values: npt.NDArray[Any], dtype: Any, size: int) -> npt.NDArray[Any]:
    array = np.ascontiguousarray(values, dtype=dtype)
    if array.shape != (size,):
        raise ValueError(f"expected one value for each of {size} rows, not {array.shape}")
    return array


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
