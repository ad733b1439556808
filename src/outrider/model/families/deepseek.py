"""DeepSeek V2 to V3.2, GLM-4.7 Flash: latent attention, experts in groups beside shared ones."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from outrider.model.families.description import DecoderConfig, Experts, Latent
from outrider.model.families.experts import grouped
from outrider.model.families.reader import Reader, family
from outrider.model.rope import rope_parameters

_DEEPSEEK = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64}


def _latent(read: Reader, experts: Experts, **parts: Any) -> DecoderConfig:
    if read.flag("attention_bias"):
        raise read.refuse("attention_bias is set")
    latent = Latent(
        q_rank=int(read.config.get("q_lora_rank") or 0),
        kv_rank=read.number("kv_lora_rank"),
        rope=read.number("qk_rope_head_dim"),
        nope=read.number("qk_nope_head_dim"),
        value=read.number("v_head_dim"),
    )
    head_dim = latent.rope + latent.nope
    if latent.value > head_dim:
        raise read.refuse("values are wider than keys")
    given, scale = rope_parameters(read.config), head_dim**-0.5
    weight = float(given.get("mscale_all_dim") or 0)
    kind = given.get("rope_type") or given.get("type") or "default"
    if kind != "default" and weight:
        factor = float(given["factor"])
        scale *= (0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0) ** 2
    return read.llama(
        head_dim=head_dim,
        num_kv_heads=read.number("num_attention_heads"),
        rotary_dim=latent.rope,
        attention_scale=scale,
        latent=latent,
        experts=experts,
        mlp_bias=False,
        **parts,
    )


@family(
    "deepseek_v2",
    "DeepseekV2ForCausalLM",
    max_position_embeddings=2048,
    q_lora_rank=1536,
    v_head_dim=128,
    n_routed_experts=64,
    n_shared_experts=2,
    n_group=1,
    topk_group=1,
    topk_method="greedy",
    norm_topk_prob=False,
    routed_scaling_factor=1.0,
    first_k_dense_replace=0,
    moe_intermediate_size=1407,
    **_DEEPSEEK,
)
def deepseek_v2(read: Reader) -> DecoderConfig:
    """The sum of a token's weights is never divided out, whatever the config says."""
    limited = read.config["topk_method"] == "group_limited_greedy"
    if not limited and read.config["topk_method"] != "greedy":
        raise read.refuse(f"topk_method is {read.config['topk_method']!r}")
    experts = grouped(
        read,
        router="softmax",
        choice_bias=False,
        normalised=False,
        groups=read.number("n_group") if limited else 1,
        open_groups=read.number("topk_group") if limited else 1,
        group_best=1,
    )
    return _latent(read, experts, rope_pairs=True)


@family(
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    max_position_embeddings=4096,
    q_lora_rank=1536,
    v_head_dim=128,
    n_routed_experts=256,
    n_shared_experts=1,
    num_experts_per_tok=8,
    n_group=8,
    topk_group=4,
    norm_topk_prob=True,
    routed_scaling_factor=2.5,
    first_k_dense_replace=3,
    moe_intermediate_size=2048,
    rope_interleave=True,
    **_DEEPSEEK,
)
def deepseek_v3(read: Reader) -> DecoderConfig:
    return _latent(read, grouped(read), rope_pairs=read.flag("rope_interleave"))


@family(
    "deepseek_v32",
    "DeepseekV32ForCausalLM",
    vocab_size=129280,
    hidden_size=7168,
    intermediate_size=18432,
    num_hidden_layers=61,
    num_attention_heads=128,
    max_position_embeddings=163840,
    q_lora_rank=1536,
    v_head_dim=128,
    n_routed_experts=256,
    n_shared_experts=1,
    num_experts_per_tok=8,
    n_group=8,
    topk_group=4,
    norm_topk_prob=True,
    routed_scaling_factor=2.5,
    first_k_dense_replace=3,
    moe_intermediate_size=2048,
    index_topk=2048,
    **_DEEPSEEK,
)
def deepseek_v32(read: Reader) -> DecoderConfig:
    """V3 as long as its indexer chooses all keys."""
    types = read.config.get("mlp_layer_types")
    parts = {} if types is None else {"layers": tuple(kind == "sparse" for kind in types)}
    config = _latent(read, grouped(read, **parts), rope_pairs=True)
    most = read.number("index_topk")
    if most >= config.max_positions:
        return config
    why = "its indexer chooses among the keys of longer texts"
    return replace(config, max_positions=most, limited=why)


@family(
    "glm4_moe_lite",
    "Glm4MoeLiteForCausalLM",
    max_position_embeddings=202752,
    rms_norm_eps=1e-5,
    kv_lora_rank=512,
    q_lora_rank=768,
    qk_rope_head_dim=64,
    qk_nope_head_dim=192,
    v_head_dim=256,
    n_routed_experts=64,
    n_shared_experts=1,
    num_experts_per_tok=4,
    n_group=1,
    topk_group=1,
    norm_topk_prob=True,
    routed_scaling_factor=1.8,
    first_k_dense_replace=1,
    moe_intermediate_size=1536,
    rope_interleave=True,
)
def glm4_moe_lite(read: Reader) -> DecoderConfig:
    count = read.number("num_hidden_layers")
    types = read.config.get("mlp_layer_types") or ["dense"] + ["sparse"] * (count - 1)
    experts = grouped(read, layers=tuple(kind == "sparse" for kind in types))
    return _latent(read, experts, rope_pairs=read.flag("rope_interleave"))
