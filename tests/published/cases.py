"""What the cases of this package share: the target's shape, tensors and configs in pieces."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from published.references import Draw, Shape, Shown

H, V, W, L = 32, 64, 24, 8
TARGET: dict[str, Any] = {"num_layers": L, "hidden_size": H, "vocab_size": V, "max_positions": 128}
Tensors = dict[str, Tensor]
Json = dict[str, Any]


class Reference(Protocol):
    def draft(self, shown: Shown, num_tokens: int, draw: Draw) -> list[int]: ...


CASES: dict[str, tuple[str, Callable[[Path], Reference]]] = {}  # name -> kind, writer


def case(kind: str) -> Callable[[Callable[[Path], Reference]], Callable[[Path], Reference]]:
    def add(write: Callable[[Path], Reference]) -> Callable[[Path], Reference]:
        CASES[write.__name__] = kind, write
        return write

    return add


def rand(name: str, *shape: int) -> Tensor:
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))
    return 1 + 0.1 * noise if len(shape) == 1 else noise * shape[-1] ** -0.5


def llama(**more: Any) -> Json:
    return {
        "model_type": "llama", "hidden_size": H, "vocab_size": V, "intermediate_size": 40,
        "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
        "hidden_act": "silu", "rms_norm_eps": 1e-6, "max_position_embeddings": 2048,
        "rope_theta": 10000.0, "tie_word_embeddings": False, "torch_dtype": "float32",
        "transformers_version": "4.52.3", "use_cache": True, "bos_token_id": 1,
        "initializer_range": 0.02, "rope_scaling": None,
    } | more  # fmt: skip


def layer(
    at: str, inputs: int = H, *, size: int = H, heads: int = 4, dim: int = 8, qk: bool = False,
    bias: bool = False,
) -> Tensors:  # fmt: skip
    shapes: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj.weight": (heads * dim, inputs),
        "self_attn.k_proj.weight": (heads * dim // 2, inputs),
        "self_attn.v_proj.weight": (heads * dim // 2, inputs),
        "self_attn.o_proj.weight": (size, heads * dim),
        "mlp.gate_proj.weight": (40, size),
        "mlp.up_proj.weight": (40, size),
        "mlp.down_proj.weight": (size, 40),
        "post_attention_layernorm.weight": (size,),
        "input_layernorm.weight": (size,),
    }
    if qk:
        shapes |= {f"self_attn.{name}_norm.weight": (dim,) for name in "qk"}
    if bias:
        shapes |= {
            f"self_attn.{n}_proj.bias": (heads * dim // (1 if n == "q" else 2),) for n in "qkv"
        }
    return {at + name: rand(at + name, *shape) for name, shape in shapes.items()}


def eagle3(
    taps: int = 3, *, rows: int = W, size: int = H, dim: int = 8, heads: int = 4, depth: int = 1,
    qk: bool = False, bias: bool = False,
) -> Tensors:  # fmt: skip
    """One EAGLE-3 head under the names that most dialects use below layer 0."""
    found = layer("layers.0.", 2 * size, size=size, dim=dim, heads=heads, qk=qk, bias=bias)
    for i in range(1, depth):
        found |= layer(f"layers.{i}.", size, size=size, dim=dim, heads=heads, qk=qk, bias=bias)
    found["layers.0.hidden_norm.weight"] = rand("hidden_norm", size)
    found["fc.weight"] = rand("fc", size, taps * H)
    found["norm.weight"] = rand("norm", size)
    found["lm_head.weight"] = rand("lm_head", rows, size)
    if rows < V:
        ids = torch.randperm(V, generator=torch.Generator().manual_seed(1))[:rows].sort().values
        found["d2t"] = ids - torch.arange(rows)
        found["t2d"] = torch.zeros(V, dtype=torch.bool).index_fill_(0, ids, True)
    return found


def eagle1(*, bias: bool = True, depth: int = 1) -> Tensors:
    found = layer("layers.0.")
    for i in range(1, depth):
        found |= layer(f"layers.{i}.")
    del found["layers.0.input_layernorm.weight"]
    found["fc.weight"] = rand("fc", H, 2 * H)
    if bias:
        found["fc.bias"] = 0.3 * rand("fc.bias", H)
    found["embed_tokens.weight"] = rand("embed", V, H)
    return found


def dflash(taps: int = 2, *, depth: int = 2, size: int = H) -> Tensors:
    found = {"fc.weight": rand("fc", size, taps * H), "hidden_norm.weight": rand("hn", size)}
    for i in range(depth):
        found |= layer(f"layers.{i}.", size, size=size, qk=True)
    return found | {"norm.weight": rand("norm", size)}


def qwen3(**more: Any) -> Json:
    return llama(model_type="qwen3", head_dim=8, num_hidden_layers=2, attention_bias=False) | more


def write(folder: Path, config: Json, tensors: Tensors, *, file: str = "model.safetensors") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    if file.endswith(".safetensors"):
        save_file(tensors, folder / file)
    else:
        torch.save(tensors, folder / file)


def midlayer(tensors: Tensors) -> Tensors:
    return {name.replace("layers.0.", "midlayer."): t for name, t in tensors.items()}


def prefixed(prefix: str, tensors: Tensors) -> Tensors:
    return {prefix + name: tensor for name, tensor in tensors.items()}


def rope_shape(config: Json) -> Shape:
    """The frequencies by transformers, which the authors use."""
    kind = config["rope_scaling"]["rope_type"]
    read = LlamaConfig(**{k: v for k, v in config.items() if k != "model_type"})
    frequencies, scale = ROPE_INIT_FUNCTIONS[kind](read, torch.device("cpu"))
    return Shape(frequencies=frequencies, scale=scale)


def speculators(kind: str, layers: Json, **more: Any) -> Json:
    layers = {name: value for name, value in layers.items() if name != "tie_word_embeddings"}
    return {
        "architectures": ["Eagle3Speculator"], "auto_map": {"": "eagle3.Eagle3SpeculatorConfig"},
        "speculators_model_type": kind, "speculators_version": "0.4.0",
        "transformer_layer_config": layers | {"vocab_size": V},
        "speculators_config": {
            "algorithm": kind, "default_proposal_method": "greedy",
            "proposal_methods": [
                {"proposal_type": "greedy", "speculative_tokens": 5, "verifier_accept_k": 1,
                 "accept_tolerance": 0.0}
            ],
            "verifier": {"name_or_path": "owner/verifier", "architectures": ["LlamaForCausalLM"]},
        },
        "draft_vocab_size": W, "target_hidden_size": None, "tie_word_embeddings": False,
        "torch_dtype": "float32", "transformers_version": "4.57.1",
    } | more  # fmt: skip
