"""Where a GGUF file has the tensors of a model that a folder would call by Llama's names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from outrider.errors import ModelError
from outrider.model.families.description import DecoderConfig
from outrider.model.families.shapes import layer_shapes
from outrider.model.gguf.container import Container, TensorInfo

# Module in a file's layer -> module in a folder's.
LAYER_MODULES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "post_attention_norm": "attention_out_norm",
    "post_ffw_norm": "mlp_out_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
MODULES = {
    "token_embd": "model.embed_tokens",
    "position_embd": "model.embed_positions",
    "output_norm": "model.norm",
    "output": "lm_head",
}
# Modules around a layer that drafts: its other `nextn` tensors are copies of the target's.
_NEXTN = {
    "nextn.enorm": "enorm",
    "nextn.hnorm": "hnorm",
    "nextn.eh_proj": "eh_proj",
    "nextn.shared_head_norm": "shared_head.norm",
}
_EXPERTS = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
_SINKS, _CHOICE = "attn_sinks.weight", "exp_probs_b.bias"
_UNREAD = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of a tensor in the file: from `first` on; -1: all."""

    info: TensorInfo
    first: int = 0
    rows: int = -1


def names_of(container: Container, config: DecoderConfig) -> dict[str, Part]:
    """Name in a folder -> place in the file; `ModelError` for a tensor that the model lacks."""
    found: dict[str, Part] = {}
    known = _known(config)
    for name, info in container.tensors.items():
        block, _, rest = name.partition(".")
        index, _, suffix = rest.partition(".")
        if name in _UNREAD or suffix == "attn_rot_embd.weight":
            continue
        if block == "blk" and index.isdigit():
            if int(index) >= config.num_layers:
                found |= _of_drafting_layer(suffix, info, config, int(index))
                continue
            at = f"model.layers.{int(index)}."
            parts = {at + k: v for k, v in _of_layer(suffix, info, config, int(index)).items()}
        else:
            parts = {f"{MODULES.get(block, name)}.{rest}": Part(info)}
        if not parts or not parts.keys() <= known:
            raise ModelError(
                f"{container.path} has the tensor {name}, which the decoder of a {config.family} "
                "does not; use another model"
            )
        found |= parts
    return found


def _of_layer(
    suffix: str, info: TensorInfo, config: DecoderConfig, layer: int
) -> Mapping[str, Part]:
    module, _, kind = suffix.rpartition(".")
    if suffix == _SINKS:
        return {"self_attn.sinks": Part(info)}
    if suffix == _CHOICE:
        return {"mlp.gate.e_score_correction_bias": Part(info)}
    if module == "attn_qkv":
        return _split(
            info,
            {
                f"self_attn.q_proj.{kind}": config.num_heads * config.head_dim,
                f"self_attn.k_proj.{kind}": config.num_kv_heads * config.head_dim,
                f"self_attn.v_proj.{kind}": config.num_kv_heads * config.head_dim,
            },
        )
    inner = config.inner_size(layer)
    if module == "ffn_up" and config.gated and len(_lead(info)) and _lead(info)[0] == 2 * inner:
        return _split(info, {f"mlp.gate_proj.{kind}": inner, f"mlp.up_proj.{kind}": inner})
    if module in _EXPERTS and config.experts is not None:
        count = config.experts.count
        rows = info.shape[-2] if kind == "weight" else info.shape[-1]
        names = (f"mlp.experts.{e}.{_EXPERTS[module]}.{kind}" for e in range(count))
        return _split(info, dict.fromkeys(names, rows))
    if module == "post_attention_norm" and not config.norm_after:
        return {f"post_attention_layernorm.{kind}": Part(info)}
    if module == "ffn_norm" and config.one_norm:
        return {}
    return {f"{LAYER_MODULES.get(module, module)}.{kind}": Part(info)}


def _of_drafting_layer(
    suffix: str, info: TensorInfo, config: DecoderConfig, layer: int
) -> Mapping[str, Part]:
    """Of a layer for multi-token prediction, which is like the target's last one."""
    module, _, kind = suffix.rpartition(".")
    if module in _NEXTN:
        parts: Mapping[str, Part] = {f"{_NEXTN[module]}.{kind}": Part(info)}
    elif module.startswith("nextn."):
        parts = {}
    else:
        parts = _of_layer(suffix, info, config, config.num_layers - 1)
    return {f"model.layers.{layer}.{name}": part for name, part in parts.items()}


def _lead(info: TensorInfo) -> tuple[int, ...]:
    return info.shape[:-1] if len(info.shape) > 1 else info.shape


def _split(info: TensorInfo, rows: Mapping[str, int]) -> dict[str, Part]:
    found, first = {}, 0
    for name, count in rows.items():
        found[name] = Part(info, first, count)
        first += count
    return found


def _known(config: DecoderConfig) -> set[str]:
    """All names that a decoder of this description reads."""
    names = {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
    if config.norm_bias:
        names.add("model.norm.bias")
    if config.head_bias:
        names.add("lm_head.bias")
    if config.position_rows:
        names.add("model.embed_positions.weight")
    for layer in range(config.num_layers):
        at, experts = f"model.layers.{layer}.", config.experts
        shapes = layer_shapes(config, layer)
        if experts is None or not config.has_experts(layer):
            names |= {at + name for name in shapes}
            continue
        names |= {at + name.replace("mlp.", "mlp.shared_experts.") for name in shapes}
        names |= {f"{at}mlp.gate.weight"}
        names |= {f"{at}mlp.gate.bias"} if experts.router_bias else set()
        names |= {f"{at}mlp.gate.e_score_correction_bias"} if experts.choice_bias else set()
        names |= {f"{at}mlp.shared_expert_gate.weight"} if experts.shared_gate else set()
        kinds = ("weight", "bias") if experts.bias else ("weight",)
        for expert in range(experts.count):
            for part in ("gate", "up", "down"):
                names |= {f"{at}mlp.experts.{expert}.{part}_proj.{kind}" for kind in kinds}
    return names
