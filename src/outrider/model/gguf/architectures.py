"""Architectures of GGUF files: metadata -> what the config.json of the same model says.

One function per architecture that is not a plain Llama. Names, factors and defaults are those that
llama.cpp writes and reads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from outrider.model.gguf.metadata import Metadata

Described = dict[str, Any]
SLIDING, FULL = "sliding_attention", "full_attention"


@dataclass(frozen=True, slots=True)
class Architecture:
    """`pairs`: rotary pairs lie beside each other in the rows of queries and keys. `partial`: part
    of a head may rotate."""

    model_type: str
    describe: Callable[[Metadata], Described] = lambda m: {}
    pairs: bool = False
    partial: bool = False


def windows(m: Metadata, period: int) -> Described:
    """A window in all layers but every `period`-th, unless the file lists the layers."""
    size = m.count("attention.sliding_window") or None
    listed = m.get("attention.sliding_window_pattern", period)
    if isinstance(listed, np.ndarray):
        near = [bool(value) for value in listed][: m.layers]
    else:
        period = m.count("attention.sliding_window_pattern", period)
        near = [bool(period) and (i + 1) % period != 0 for i in range(m.layers)]
    types = [SLIDING if yes and size else FULL for yes in near]
    return {"sliding_window": size, "layer_types": types}


def one_window(m: Metadata) -> Described:
    return {"sliding_window": m.count("attention.sliding_window") or None}


def experts(m: Metadata, count: str = "num_experts") -> Described:
    return {
        count: m.experts,
        "num_experts_per_tok": m.number("expert_used_count"),
        "moe_intermediate_size": m.number("expert_feed_forward_length", m.inner),
    }


def llama(m: Metadata) -> Described:
    if not m.count("expert_count"):
        return {}
    inner = m.number("expert_feed_forward_length", m.inner)
    return experts(m, "num_local_experts") | {
        "model_type": "mixtral",
        "sliding_window": None,
        "intermediate_size": inner,
    }


def qwen2_moe(m: Metadata) -> Described:
    shared = m.number("expert_shared_feed_forward_length", m.inner)
    return experts(m) | {"norm_topk_prob": False, "shared_expert_intermediate_size": shared}


def qwen3_moe(m: Metadata) -> Described:
    return experts(m) | {"norm_topk_prob": True}


def gemma(m: Metadata) -> Described:
    return {"hidden_act": "gelu_pytorch_tanh"}


def gemma2(m: Metadata) -> Described:
    largest = m.layers in (46, 62)  # the 27B models scale by the width of an even split
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": m.hidden // m.heads if largest else m.head_dim,
        "attn_logit_softcapping": m.cap("attn_logit_softcapping"),
        "final_logit_softcapping": m.cap("final_logit_softcapping"),
        **windows(m, 2),
    }


def gemma3(m: Metadata) -> Described:
    local = {"rope_type": "default", "rope_theta": m.positive("rope.freq_base_swa", 10_000.0)}
    both = {"sliding_attention": local, "full_attention": m.rope(1_000_000.0)}
    return gemma2(m) | windows(m, 6) | {"rope_parameters": both}


def phi2(m: Metadata) -> Described:
    return {"hidden_act": "gelu_new"}


def phi3(m: Metadata) -> Described:
    original = m.number("rope.scaling.original_context_length", m.number("context_length"))
    return one_window(m) | {"original_max_position_embeddings": original}


def phimoe(m: Metadata) -> Described:
    inner = m.number("expert_feed_forward_length", m.inner)
    return {
        **experts(m, "num_local_experts"),
        **phi3(m),
        "intermediate_size": inner,
        "lm_head_bias": m.holds("output.bias"),
    }


def olmo(m: Metadata) -> Described:
    return {"clip_qkv": m.cap("attention.clamp_kqv") or None}


def olmo2(m: Metadata) -> Described:
    if not m.count("attention.sliding_window"):
        return {}
    local = {"rope_type": "default", "rope_theta": m.theta()}
    both = {"sliding_attention": local, "full_attention": m.rope()}
    return windows(m, 4) | {"model_type": "olmo3", "rope_parameters": both}


def olmoe(m: Metadata) -> Described:
    return experts(m) | {"norm_topk_prob": False, "intermediate_size": m.inner}


def granite(m: Metadata) -> Described:
    return {
        "embedding_multiplier": m.real("embedding_scale", 1.0),
        "attention_multiplier": m.real("attention.scale", 1.0),
        "residual_multiplier": m.real("residual_scale", 1.0),
        "logits_scaling": m.real("logit_scale", 1.0),
    }


def granite_moe(m: Metadata) -> Described:
    if m.count("expert_shared_feed_forward_length"):
        raise m.refuse("has an MLP beside its experts")
    return granite(m) | experts(m, "num_local_experts")


def cohere(m: Metadata) -> Described:
    normed = m.holds("blk.0.attn_q_norm.weight")
    return {"logit_scale": m.real("logit_scale", 0.0625), "use_qk_norm": normed}


def cohere2(m: Metadata) -> Described:
    return {"logit_scale": m.real("logit_scale", 0.0625), **windows(m, 4)}


def grouped(m: Metadata) -> Described:
    """Experts in the manner of DeepSeek-V3."""
    return experts(m, "n_routed_experts") | {
        "n_shared_experts": m.count("expert_shared_count"),
        "first_k_dense_replace": m.count("leading_dense_block_count"),
        "routed_scaling_factor": m.real("expert_weights_scale", 1.0),
        "norm_topk_prob": m.flag("expert_weights_norm"),
        "n_group": m.number("expert_group_count", 1),
        "topk_group": m.number("expert_group_used_count", 1),
    }


def glm4_moe(m: Metadata) -> Described:
    return grouped(m) | {"use_qk_norm": m.holds("blk.0.attn_q_norm.weight")}


def dots1(m: Metadata) -> Described:
    return grouped(m) | {"sliding_window": None}


def stablelm(m: Metadata) -> Described:
    return {
        "use_parallel_residual": not m.holds("blk.0.ffn_norm.weight"),
        "use_qkv_bias": m.holds("blk.0.attn_q.bias"),
        "qk_layernorm": m.holds("blk.0.attn_q_norm.weight"),
    }


def starcoder2(m: Metadata) -> Described:
    biased = m.holds("blk.0.attn_q.bias", "blk.0.attn_qkv.bias")
    return {"use_bias": biased, "hidden_act": "gelu_pytorch_tanh", **one_window(m)}


def gpt2(m: Metadata) -> Described:
    return {"n_positions": m.number("context_length"), "n_inner": m.inner}


def starcoder(m: Metadata) -> Described:
    return gpt2(m) | {"multi_query": m.kv_heads == 1}


def gpt_neox(m: Metadata) -> Described:
    parallel = m.flag("use_parallel_residual", True)
    return {"hidden_act": "gelu", "use_parallel_residual": parallel}


def nemotron(m: Metadata) -> Described:
    return {"hidden_act": "relu2"}


def arcee(m: Metadata) -> Described:
    return {"hidden_act": "relu2"}


def smollm3(m: Metadata) -> Described:
    return {"no_rope_layer_interval": 4}


def exaone4(m: Metadata) -> Described:
    return windows(m, 4) | {"sliding_window_pattern": None}


def ernie(m: Metadata) -> Described:
    return {"use_bias": m.holds("blk.0.attn_q.bias")}


def ernie_moe(m: Metadata) -> Described:
    inner = m.number("expert_feed_forward_length")
    shared = m.width("ffn_up_shexp.weight", 0)
    return ernie(m) | {
        "moe_num_experts": m.experts,
        "moe_k": m.number("expert_used_count"),
        "moe_intermediate_size": inner,
        "moe_num_shared_experts": shared // inner,
        "moe_layer_start_index": m.count("leading_dense_block_count"),
        "moe_layer_interval": m.number("interleave_moe_layer_step", 1),
    }


def seed_oss(m: Metadata) -> Described:
    return {"attention_out_bias": m.holds("blk.0.attn_output.bias")}


def gpt_oss(m: Metadata) -> Described:
    inner = m.number("expert_feed_forward_length")
    rope = m.rope(150_000.0)
    return {
        **experts(m, "num_local_experts"),
        **windows(m, 2),
        "intermediate_size": inner,
        "rope_parameters": rope | {"truncate": False},
    }


def minimax_m2(m: Metadata) -> Described:
    return experts(m, "num_local_experts") | {
        "intermediate_size": m.number("expert_feed_forward_length", m.inner)
    }


ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture("llama", llama, pairs=True),
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3"),
    "qwen2moe": Architecture("qwen2_moe", qwen2_moe),
    "qwen3moe": Architecture("qwen3_moe", qwen3_moe),
    "gemma": Architecture("gemma", gemma),
    "gemma2": Architecture("gemma2", gemma2),
    "gemma3": Architecture("gemma3_text", gemma3),
    "phi2": Architecture("phi", phi2, partial=True),
    "phi3": Architecture("phi3", phi3, partial=True),
    "phimoe": Architecture("phimoe", phimoe),
    "olmo": Architecture("olmo", olmo, pairs=True),
    "olmo2": Architecture("olmo2", olmo2),
    "olmoe": Architecture("olmoe", olmoe),
    "granite": Architecture("granite", granite, pairs=True),
    "granitemoe": Architecture("granitemoe", granite_moe, pairs=True),
    "command-r": Architecture("cohere", cohere, pairs=True),
    "cohere2": Architecture("cohere2", cohere2, pairs=True),
    "chatglm": Architecture("glm", pairs=True, partial=True),
    "glm4": Architecture("glm4", pairs=True, partial=True),
    "glm4moe": Architecture("glm4_moe", glm4_moe, partial=True),
    "dots1": Architecture("dots1", dots1),
    "stablelm": Architecture("stablelm", stablelm, partial=True),
    "starcoder2": Architecture("starcoder2", starcoder2),
    "starcoder": Architecture("gpt_bigcode", starcoder),
    "gpt2": Architecture("gpt2", gpt2),
    "gptneox": Architecture("gpt_neox", gpt_neox, partial=True),
    "nemotron": Architecture("nemotron", nemotron, partial=True),
    "arcee": Architecture("arcee", arcee, pairs=True),
    "smollm3": Architecture("smollm3", smollm3, pairs=True),
    "exaone4": Architecture("exaone4", exaone4),
    "hunyuan-dense": Architecture("hunyuan_v1_dense"),
    "ernie4_5": Architecture("ernie4_5", ernie, pairs=True),
    "ernie4_5-moe": Architecture("ernie4_5_moe", ernie_moe, pairs=True),
    "seed_oss": Architecture("seed_oss", seed_oss),
    "gpt-oss": Architecture("gpt_oss", gpt_oss),
    "minimax-m2": Architecture("minimax_m2", minimax_m2, partial=True),
}
