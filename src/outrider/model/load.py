"""Loads the model of a folder or name: an object that implements `contracts.Model`."""

from __future__ import annotations

import importlib
import importlib.util
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from outrider.contracts import Model
from outrider.errors import ConfigError, ModelError, UnknownName
from outrider.model.bundled import bundled_path, find_folder
from outrider.model.gguf.files import is_gguf
from outrider.model.weights import read_config

if TYPE_CHECKING:
    from outrider.model.cuda_decoder import CudaDecoder
    from outrider.model.families import DecoderConfig
    from outrider.model.torch_decoder import TorchDecoder

__all__ = ["bundled_path", "load_model"]
logger = logging.getLogger(__name__)

Backend = Literal["auto", "native", "torch", "transformers"]
BACKENDS = ("auto", "native", "torch", "transformers")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_NO_KV_DTYPE = (
    "kv_dtype {0!r} needs the native step or the torch decoder, in one process; choose kv_dtype "
    "'auto'"
)
INTEGER = ("int8", "int4")  # for our own kernels only: the native step; on CUDA int8 alone


def load_model(
    path_or_name: str | Path,
    *,
    device: str = "cpu",
    dtype: str = "auto",
    backend: Backend = "auto",
    tensor_parallel_size: int = 1,
    kv_dtype: str = "auto",
    max_length: int | None = None,
) -> Model:
    """Loads a causal language model: a folder, a GGUF file, a hub name or `bundled[:NAME]`.

    backend "auto" takes the first of these that can run the model: the native CPU step, the compact
    torch decoder, transformers. dtype "auto" is the stored type; torch on a CPU computes in
    float32. `tensor_parallel_size` processes share the model (the compact torch decoder only).
    kv_dtype "int8" rounds keys and values (the first two backends). `max_length`: of the longest
    text; beyond the original length of a longrope, its long factors are taken for all texts.
    Raises `ModelError` or `ConfigError`, one line each.
    """
    _check_options(device, dtype, backend)
    folder = find_folder(path_or_name)
    decoder_config = _decoder_config(folder, backend, max_length)
    if decoder_config is not None and max_length is not None:
        _tell_of_long_factors(folder.name, decoder_config, max_length)
    if kv_dtype != "auto" and (decoder_config is None or tensor_parallel_size != 1):
        raise ConfigError(_NO_KV_DTYPE.format(kv_dtype))
    if tensor_parallel_size != 1:
        return _shared(folder, decoder_config, device, dtype, backend, tensor_parallel_size)
    if decoder_config is not None and backend in ("auto", "native"):
        native = _native(decoder_config, device)
        if native is not None and dtype != "float16":
            model: Model = native.NativeDecoder.load(
                folder, dtype=dtype, kv_dtype=kv_dtype, max_length=max_length
            )
            return model
    if decoder_config is not None and dtype == "int8" and backend != "native":
        kernels = gpu_decoder(device)
        if kernels is not None and decoder_config.is_llama and kv_dtype == "auto":
            return kernels.load(folder, device=device, max_length=max_length).round_weights()
    if backend == "native" or dtype in INTEGER:
        wanted = f"dtype {dtype!r}" if dtype in INTEGER else "backend 'native'"
        raise ModelError(
            f"{wanted} needs the native step, which cannot run this model here; choose backend "
            "'torch' and dtype 'auto', or install with a C++ compiler"
        )
    if decoder_config is not None:
        if kv_dtype != "auto":  # our GPU kernels read keys and values of the model's type
            from outrider.model.torch_decoder import TorchDecoder

            kind = DTYPES.get(dtype)
            return TorchDecoder.load(
                folder, device=device, dtype=kind, kv_dtype=kv_dtype, max_length=max_length
            )
        compact = _compact(device, decoder_config)
        return compact.load(folder, device=device, dtype=DTYPES.get(dtype), max_length=max_length)
    from outrider.model.transformers_model import TransformersModel

    return TransformersModel.load(
        folder, device=device, dtype=DTYPES.get(dtype), max_length=max_length
    )


def _tell_of_long_factors(name: str, config: DecoderConfig, max_length: int) -> None:
    for rope in config.ropes:
        if rope.kind == "longrope" and not rope.ends_early and rope.original_positions < max_length:
            logger.warning(
                "%s: its longrope takes the factors of long texts for all texts, because "
                "max_model_len is above %d",
                name,
                rope.original_positions,
            )


def _check_options(device: str, dtype: str, backend: str) -> None:
    if backend not in BACKENDS:
        raise UnknownName("backend", backend, BACKENDS)
    if dtype != "auto" and dtype not in DTYPES and dtype not in INTEGER:
        raise UnknownName("dtype", dtype, ["auto", *DTYPES, *INTEGER])
    try:
        kind = torch.device(device).type
    except RuntimeError as error:
        raise ConfigError(f"unknown device {device!r}; use cpu, cuda or cuda:N") from error
    if kind == "cuda" and not torch.cuda.is_available():
        raise ConfigError("no CUDA device here; use device cpu")


def _decoder_config(
    folder: Path, backend: str, max_length: int | None = None
) -> DecoderConfig | None:
    """The config for the compact decoders, or None if transformers runs the model."""
    from outrider.model.families import UnsupportedByDecoder, read_decoder_config

    config = read_config(folder)
    only_ours = is_gguf(folder)
    if backend == "transformers":
        if only_ours:
            raise ConfigError(
                "backend 'transformers' does not run GGUF files; leave the backend out"
            )
        return None
    try:
        return read_decoder_config(config, max_length)
    except UnsupportedByDecoder as error:
        if only_ours:
            reason = str(error).removesuffix("; use backend 'transformers'")
            raise ModelError(f"{folder}: {reason}; use another model") from error
        if backend == "auto":
            return None
        raise


def _shared(
    folder: Path, config: DecoderConfig | None, device: str, dtype: str, backend: str, size: int
) -> Model:
    from outrider.model.tensor_parallel import TensorParallelModel, check_split

    if config is None or backend == "native" or dtype in INTEGER:
        raise ConfigError(
            "tensor_parallel_size above 1 needs the compact torch decoder: a Llama, Mistral or "
            "Qwen model, backend 'auto' or 'torch', no integer dtype"
        )
    check_split(config, size)
    return TensorParallelModel(folder, size, device=device, dtype=DTYPES.get(dtype))


def _compact(device: str, config: DecoderConfig) -> type[TorchDecoder]:
    """The compact decoder for a device: with our kernels if they run this model there."""
    from outrider.model.torch_decoder import TorchDecoder

    return (gpu_decoder(device) if config.is_llama else None) or TorchDecoder


def gpu_decoder(device: str) -> type[CudaDecoder] | None:
    """The decoder with our GPU kernels; None without CUDA or Triton."""
    if torch.device(device).type != "cuda" or importlib.util.find_spec("triton") is None:
        return None
    from outrider.model.cuda_target import CudaTarget

    return CudaTarget


def _native(config: DecoderConfig, device: str) -> Any | None:
    """The module of the native step; None if it is not built or cannot run this model."""
    if importlib.util.find_spec("outrider.model.native_decoder") is None:
        return None
    module = importlib.import_module("outrider.model.native_decoder")
    return module if module.available(config, device) else None
