"""Creates, loads, compiles and saves the Hugging Face models for training."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import tokenizers
import torch
from torch import Tensor, nn

from outrider.errors import ModelError
from outrider.model.checkpoints import open_checkpoint
from outrider.model.gguf.files import is_gguf
from outrider.model.tokenizer import Tokenizer
from outrider.model.weights import read_config

MAX_SHARD = "12MB"


def llama(
    *,
    hidden_size: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    intermediate_size: int,
    vocab_size: int,
    max_positions: int = 2048,
    eos_token_id: int = 0,
    seed: int = 0,
) -> Any:
    """A new Llama-shaped model from the seed: tied embeddings, head_dim 64, fp32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=64,
        intermediate_size=intermediate_size,
        vocab_size=vocab_size,
        max_position_embeddings=max_positions,
        rope_theta=10000.0,
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        bos_token_id=eos_token_id,
        eos_token_id=eos_token_id,
        attn_implementation="sdpa",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)


def load_model(folder: str | Path, *, dtype: torch.dtype = torch.float32) -> Any:
    """A causal language model from a folder or a GGUF file, as transformers' trainable module."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    if is_gguf(Path(folder)):
        return _from_gguf(Path(folder), dtype)
    try:
        return AutoModelForCausalLM.from_pretrained(
            str(folder), dtype=dtype, attn_implementation="sdpa"
        )
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"cannot load {folder}: {str(error).splitlines()[0]}") from None


def _from_gguf(path: Path, dtype: torch.dtype) -> Any:
    """The model in a GGUF file, dequantised: what the engine computes up to its rounding."""
    from transformers import AutoConfig, AutoModelForCausalLM

    stored = read_config(path)
    config = AutoConfig.for_model(**stored, attn_implementation="sdpa")
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    tensors = open_checkpoint(path)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(tensors.tensor(name, parameter.shape))
    return model


def _gguf_tokenizer(path: Path) -> Any:
    from transformers import PreTrainedTokenizerFast

    own = Tokenizer(path)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer.from_str(own.serialized()), **own.config
    )


def load_tokenizer(folder: str | Path) -> Any:
    """The tokenizer of a folder or a GGUF file, as transformers has them."""
    from transformers import AutoTokenizer

    if is_gguf(Path(folder)):
        return _gguf_tokenizer(Path(folder))
    try:
        return AutoTokenizer.from_pretrained(str(folder))
    except (OSError, ValueError) as error:
        raise ModelError(f"no tokenizer in {folder}: {str(error).splitlines()[0]}") from None


def compile_layers(model: Any) -> None:
    """Compile each decoder layer in place; one compilation serves all layers of a model."""
    for layer in getattr(model.base_model, "layers", ()):
        layer.compile()


def hidden_states(model: Any, tokens_BL: Tensor) -> Tensor:
    """The normalised last hidden state, [B, L, H]."""
    output: Tensor = model.base_model(input_ids=tokens_BL, use_cache=False).last_hidden_state
    return output


def layer_states(model: Any, tokens_BL: Tensor) -> tuple[Tensor, ...]:
    """Hidden states by tap, [B, L, H] each: embeddings, after each layer, the last one normalised.

    Llama runs layer by layer, since compiled layers and transformers' own capture conflict; other
    architectures use `output_hidden_states`.
    """
    if model.config.model_type != "llama":
        output = model.base_model(input_ids=tokens_BL, use_cache=False, output_hidden_states=True)
        states: tuple[Tensor, ...] = output.hidden_states
        return states
    decoder = model.model
    hidden_BLH = decoder.embed_tokens(tokens_BL)
    positions_1L = torch.arange(tokens_BL.shape[1], device=tokens_BL.device)[None]
    rotary = decoder.rotary_emb(hidden_BLH, positions_1L)
    outputs = [hidden_BLH]
    for layer in decoder.layers:
        hidden_BLH = layer(
            hidden_BLH,
            attention_mask=None,
            position_ids=positions_1L,
            position_embeddings=rotary,
        )
        outputs.append(hidden_BLH)
    outputs[-1] = decoder.norm(outputs[-1])
    return tuple(outputs)


def rope_theta(config: Any) -> float:
    """The base of a model's rotary positions, from either place in its config."""
    parameters = getattr(config, "rope_parameters", None) or {}
    return float(parameters.get("rope_theta") or getattr(config, "rope_theta", None) or 10000.0)


def output_logits(model: Any, hidden: Tensor) -> Tensor:
    """Logits from the normalised last hidden state, with the scaling of some architectures."""
    logits: Tensor = model.get_output_embeddings()(hidden)
    config = model.config
    if getattr(config, "logit_scale", None):
        logits = logits * config.logit_scale
    if getattr(config, "logits_scaling", None):
        logits = logits / config.logits_scaling
    cap = getattr(config, "final_logit_softcapping", None)
    return torch.tanh(logits / cap) * cap if cap else logits


def num_parameters(module: nn.Module) -> int:
    """Parameters, tied ones counted once."""
    return sum(parameter.numel() for parameter in module.parameters())


def save_model(model: Any, folder: Path, tokenizer: Any = None) -> None:
    """Write a Hugging Face folder in bf16, atomically; `model` keeps its own type."""
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    names = set(dict(model.named_parameters()))
    state = {
        name: value.detach().to(torch.bfloat16).cpu().contiguous()
        for name, value in model.state_dict().items()
        if name in names
    }
    model.save_pretrained(partial, state_dict=state, max_shard_size=MAX_SHARD)
    # transformers writes the current type of the model, not that of the tensors.
    path = partial / "config.json"
    path.write_text(
        json.dumps(json.loads(path.read_text()) | {"dtype": "bfloat16"}, indent=2) + "\n"
    )
    if tokenizer is not None:
        tokenizer.save_pretrained(partial)
    for path in partial.iterdir():
        path.chmod(0o644)
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    os.replace(partial, folder)
