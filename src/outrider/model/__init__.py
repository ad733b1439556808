"""Models: from a folder or a name to something that implements `contracts.Model`."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Any, Literal

import torch

from outrider.contracts import Model
from outrider.errors import ConfigError, ModelError, UnknownName
from outrider.model.bundled import bundled_path, find_folder
from outrider.model.families import DecoderConfig, UnsupportedByDecoder, read_decoder_config
from outrider.model.weights import read_config

__all__ = ["bundled_path", "load_model"]

Backend = Literal["auto", "native", "torch", "transformers"]
BACKENDS = ("auto", "native", "torch", "transformers")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_model(
    path_or_name: str | Path,
    *,
    device: str = "cpu",
    dtype: str = "auto",
    backend: Backend = "auto",
) -> Model:
    """Loads a causal language model from a folder, a hub name or `bundled[:NAME]`.

    backend "auto" takes the first that can: the native CPU step, the compact torch decoder, any
    architecture through transformers. dtype "auto" computes in float32 on a CPU and in the
    stored type elsewhere. Raises `ModelError` or `ConfigError`, one line each.
    """
    if backend not in BACKENDS:
        raise UnknownName("backend", backend, BACKENDS)
    chosen_device = _device(device)
    chosen_dtype = _dtype(dtype)
    folder = find_folder(path_or_name)
    config = read_config(folder)
    decoder_config: DecoderConfig | None = None
    if backend != "transformers":
        try:
            decoder_config = read_decoder_config(config)
        except UnsupportedByDecoder:
            if backend != "auto":
                raise
    if decoder_config is not None:
        if backend == "native" or (backend == "auto" and chosen_dtype is None):
            native = _native(decoder_config, device, required=backend == "native")
            if native is not None:
                model: Model = native.NativeDecoder.load(folder, dtype=dtype)
                return model
        from outrider.model.torch_decoder import TorchDecoder

        return TorchDecoder.load(folder, device=chosen_device, dtype=chosen_dtype)
    from outrider.model.transformers_model import TransformersModel

    return TransformersModel.load(folder, device=chosen_device, dtype=chosen_dtype)


def _native(config: DecoderConfig, device: str, *, required: bool) -> Any | None:
    """The native step's module if it can run this model here."""
    if importlib.util.find_spec("outrider.model.native_decoder") is not None:
        native_decoder = importlib.import_module("outrider.model.native_decoder")
        if native_decoder.available(config, device):
            return native_decoder
    if required:
        raise ModelError(
            "the native step cannot run this model here; use backend 'torch', or see the "
            "installation notes about the C++ compiler"
        )
    return None


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"unknown device {name!r}; use cpu, cuda or cuda:N") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("no CUDA device here; use device cpu")
    return device


def _dtype(name: str) -> torch.dtype | None:
    if name != "auto" and name not in DTYPES:
        raise UnknownName("dtype", name, ["auto", *DTYPES])
    return DTYPES.get(name)
