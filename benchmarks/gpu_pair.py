"""Models of any size without a checkpoint: random weights, and a draft of a chosen agreement.

A random target's layers after the first E add only `epsilon` times what they would, and its head
is sharpened: then its first E layers with the same norm and head are a draft model that agrees
with it at a rate that `epsilon` chooses. Every tensor is a function of its name and the seed, so
that any engine gets the same ordinary weights.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Sequence
from typing import Any

import torch

from outrider.model.cuda_decoder import CudaDecoder
from outrider.model.families import DecoderConfig, read_decoder_config

LLAMA_8B: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
LLAMA_1B: dict[str, Any] = LLAMA_8B | {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "head_dim": 64,
    "tie_word_embeddings": True,
}


class RandomTensors:
    """Weights by name, made where they are needed."""

    def __init__(
        self,
        device: torch.device,
        *,
        full_layers: int = 1 << 30,
        epsilon: float = 1.0,
        sharpness: float = 1.0,
        seed: int = 0,
    ) -> None:
        """Layers from `full_layers` on add `epsilon` times as much; the head is `sharpness` x."""
        self._device = device
        self._full_layers = full_layers
        self._epsilon = epsilon
        self._sharpness = sharpness
        self._seed = seed

    def tensor(self, name: str, shape: Sequence[int]) -> torch.Tensor:
        if len(shape) == 1:
            return torch.ones(*shape, dtype=torch.bfloat16, device=self._device)
        key = zlib.crc32(f"{self._seed} {name}".encode())
        random = torch.Generator(self._device).manual_seed(key)
        tensor = torch.empty(*shape, dtype=torch.bfloat16, device=self._device)
        tensor.normal_(0, 0.02 * self._factor(name), generator=random)
        return tensor

    def _factor(self, name: str) -> float:
        if name == "lm_head.weight":
            return self._sharpness
        if "o_proj" in name or "down_proj" in name:
            layer = int(name.split(".")[2])
            return self._epsilon if layer >= self._full_layers else 1.0
        return 1.0


def make(
    tensors: RandomTensors, config: dict[str, Any], device: torch.device, **changes: Any
) -> CudaDecoder:
    shape: DecoderConfig = read_decoder_config(config | changes)
    return CudaDecoder.read(
        tensors,
        shape,
        name="random",
        num_tokens=shape.vocab_size,
        eos_ids=(),
        device=device,
        dtype=torch.bfloat16 if device.type == "cuda" else torch.float32,
    )


def make_transformers(tensors: RandomTensors, config: dict[str, Any], **changes: Any) -> Any:
    """The same weights as a transformers model on the GPU."""
    import transformers
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    settings = {k: v for k, v in (config | changes).items() if k not in ("model_type", "dtype")}
    llama = transformers.LlamaConfig(**settings, bos_token_id=0, eos_token_id=None)
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(llama)
    model = model.to(torch.bfloat16).to_empty(device="cuda")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(tensors.tensor(name, parameter.shape))
    model.model.rotary_emb = LlamaRotaryEmbedding(llama, device="cuda")
    model.generation_config = transformers.GenerationConfig(
        bos_token_id=0, eos_token_id=None, pad_token_id=0, do_sample=False
    )
    return model.eval()


def weight_bytes(model: CudaDecoder) -> int:
    """What a pass over few tokens has to read: all weights but the rows of the embedding."""
    total = model.head_VH.nbytes + model.norm_H.nbytes
    for layer in model.layers:
        for field in dataclasses.fields(layer):
            value = getattr(layer, field.name)
            total += value.nbytes if isinstance(value, torch.Tensor) else 0
    return total
