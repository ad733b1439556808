"""Mixtures of experts: Mixtral, Qwen, OLMoE, Phi, GLM-4.5, Ernie, gpt-oss and relatives."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from outrider.model.families.description import DecoderConfig, ExpertLayout, Experts, Layout
from outrider.model.families.granite import granite
from outrider.model.families.llama import ernie, hunyuan, qwen_windows
from outrider.model.families.olmo import olmo2
from outrider.model.families.reader import SLIDING, Reader, family
from outrider.model.quantized.forms import MXFP4
from outrider.model.rope import rope_parameters

_W = "block_sparse_moe.experts.E.w"
_BLOCK = ExpertLayout(
    router="block_sparse_moe.gate",
    choice_bias="block_sparse_moe.e_score_correction_bias",
    gate=f"{_W}1",
    up=f"{_W}3",
    down=f"{_W}2",
)


def _experts(read: Reader, count: str, inner: str, **parts: Any) -> Experts:
    """Experts in every layer, the names of whose sizes are `count` and `inner`."""
    chosen: dict[str, Any] = {
        "count": read.number(read.one_of(count, "num_experts", "num_local_experts")),
        "active": read.number(parts.pop("active", "num_experts_per_tok")),
        "inner": read.number(inner),
        "layers": (True,) * read.number("num_hidden_layers"),
    }
    found = Experts(**chosen | parts)
    if found.active > found.count or found.count % found.groups:
        raise read.refuse(f"{found.active} of {found.count} experts in {found.groups} groups")
    return found


def _every(read: Reader, period: int, but: list[int]) -> tuple[bool, ...]:
    count = read.number("num_hidden_layers")
    return tuple(i not in but and (i + 1) % period == 0 for i in range(count))


@family(
    "mixtral",
    "MixtralForCausalLM",
    max_position_embeddings=131072,
    num_key_value_heads=8,
    num_experts_per_tok=2,
    num_local_experts=8,
    rms_norm_eps=1e-5,
    rope_theta=1_000_000.0,
)
def mixtral(read: Reader) -> DecoderConfig:
    types = [SLIDING] * read.number("num_hidden_layers")
    return read.llama(
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        windows=read.windows(types),
        experts=_experts(read, "num_local_experts", "intermediate_size"),
        layout=Layout(experts=_BLOCK),
    )


_QWEN_MOE = {"max_position_embeddings": 32768, "sliding_window": 4096, "decoder_sparse_step": 1}


@family(
    "qwen2_moe",
    "Qwen2MoeForCausalLM",
    num_key_value_heads=16,
    moe_intermediate_size=1408,
    shared_expert_intermediate_size=5632,
    num_experts_per_tok=4,
    num_experts=60,
    qkv_bias=True,
    **_QWEN_MOE,
)
def qwen2_moe(read: Reader) -> DecoderConfig:
    if read.flag("use_sliding_window"):
        raise read.refuse("use_sliding_window is set")
    experts = _experts(
        read,
        "num_experts",
        "moe_intermediate_size",
        layers=_every(
            read, read.number("decoder_sparse_step"), read.config.get("mlp_only_layers") or []
        ),
        normalised=read.flag("norm_topk_prob"),
        shared=read.number("shared_expert_intermediate_size"),
        shared_gate=True,
    )
    return read.llama(
        qkv_bias=read.flag("qkv_bias"),
        o_bias=False,
        mlp_bias=False,
        experts=experts,
        layout=Layout(experts=ExpertLayout(shared="mlp.shared_expert")),
    )


@family(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    num_key_value_heads=4,
    moe_intermediate_size=768,
    num_experts_per_tok=8,
    num_experts=128,
    **_QWEN_MOE,
)
def qwen3_moe(read: Reader) -> DecoderConfig:
    layers = _every(
        read, read.number("decoder_sparse_step"), read.config.get("mlp_only_layers") or []
    )
    if read.flag("use_sliding_window"):
        raise read.refuse("use_sliding_window is set")
    return read.llama(
        mlp_bias=False,
        qk_norm=True,
        experts=_experts(
            read,
            "num_experts",
            "moe_intermediate_size",
            layers=layers,
            normalised=read.flag("norm_topk_prob"),
        ),
    )


@family(
    "olmoe",
    "OlmoeForCausalLM",
    max_position_embeddings=4096,
    num_experts_per_tok=8,
    num_experts=64,
    rms_norm_eps=1e-5,
)
def olmoe(read: Reader) -> DecoderConfig:
    if read.config.get("clip_qkv"):
        raise read.refuse("clip_qkv limits the values of queries, keys and values")
    experts = _experts(
        read, "num_experts", "intermediate_size", normalised=read.flag("norm_topk_prob")
    )
    return read.llama(mlp_bias=False, qk_norm=True, qk_span="row", experts=experts)


@family(
    "flex_olmo",
    "FlexOlmoForCausalLM",
    max_position_embeddings=4096,
    num_experts_per_tok=5,
    num_experts=7,
    rope_theta=500_000.0,
    rms_norm_eps=1e-6,
)
def flex_olmo(read: Reader) -> DecoderConfig:
    """OLMo 2 with experts."""
    experts = _experts(
        read, "num_experts", "intermediate_size", normalised=read.flag("norm_topk_prob")
    )
    return replace(olmo2(read), experts=experts)


@family(
    "phimoe",
    "PhimoeForCausalLM",
    max_position_embeddings=131072,
    num_key_value_heads=8,
    num_experts_per_tok=2,
    num_local_experts=16,
    rms_norm_eps=1e-5,
    rope_theta=1_000_000.0,
    router_jitter_noise=0.01,
)
def phimoe(read: Reader) -> DecoderConfig:
    """The attention has biases; so has the output head, if the config says so."""
    if read.number("num_experts_per_tok") != 2:
        raise read.refuse("its router chooses other than two experts")
    return read.llama(
        mlp_bias=False,
        layer_norm=True,
        norm_bias=True,
        head_bias=read.flag("lm_head_bias"),
        windows=read.windows([SLIDING] * read.number("num_hidden_layers")),
        experts=_experts(
            read,
            "num_local_experts",
            "intermediate_size",
            router="sparsemixer",
            jitter=read.real("router_jitter_noise"),
        ),
        layout=Layout(experts=_BLOCK),
    )


def grouped(read: Reader, **parts: Any) -> Experts:
    """The experts of DeepSeek-V3 and its followers."""
    count, dense = read.number("num_hidden_layers"), int(read.config["first_k_dense_replace"])
    return _experts(
        read,
        "n_routed_experts",
        "moe_intermediate_size",
        **{
            "layers": tuple(i >= dense for i in range(count)),
            "router": "sigmoid",
            "choice_bias": True,
            "normalised": read.flag("norm_topk_prob"),
            "scale": read.real("routed_scaling_factor"),
            "groups": read.number("n_group"),
            "open_groups": read.number("topk_group"),
            "shared": read.number("moe_intermediate_size") * int(read.config["n_shared_experts"]),
        }
        | parts,
    )


@family(
    "glm4_moe",
    "Glm4MoeForCausalLM",
    max_position_embeddings=131072,
    num_key_value_heads=8,
    rms_norm_eps=1e-5,
    moe_intermediate_size=1408,
    num_experts_per_tok=8,
    n_shared_experts=1,
    n_routed_experts=128,
    routed_scaling_factor=1.0,
    n_group=1,
    topk_group=1,
    first_k_dense_replace=1,
    norm_topk_prob=True,
    partial_rotary_factor=0.5,
)
def glm4_moe(read: Reader) -> DecoderConfig:
    head_dim = read.number(
        "head_dim", read.number("hidden_size") // read.number("num_attention_heads")
    )
    return read.llama(
        o_bias=False,
        mlp_bias=False,
        qk_norm=read.flag("use_qk_norm"),
        rotary_dim=read.rotary_dim(head_dim),
        experts=grouped(read),
    )


@family(
    "dots1",
    "Dots1ForCausalLM",
    max_position_embeddings=2048,
    moe_intermediate_size=1408,
    routed_scaling_factor=1.0,
    n_group=1,
    topk_group=1,
    first_k_dense_replace=0,
    norm_topk_prob=False,
    sliding_window=4096,
    max_window_layers=62,
)
def dots1(read: Reader) -> DecoderConfig:
    return read.llama(
        mlp_bias=False, qk_norm=True, windows=qwen_windows(read), experts=grouped(read)
    )


@family(
    "ernie4_5_moe",
    "Ernie4_5_MoeForCausalLM",
    max_position_embeddings=131072,
    num_key_value_heads=4,
    rms_norm_eps=1e-5,
    rope_theta=500_000.0,
    tie_word_embeddings=True,
    moe_intermediate_size=1536,
    moe_k=6,
    moe_num_experts=64,
    moe_num_shared_experts=2,
    moe_layer_start_index=1,
    moe_layer_end_index=-1,
    moe_layer_interval=1,
    moe_norm_min=1e-12,
)
def ernie_moe(read: Reader) -> DecoderConfig:
    count = read.number("num_hidden_layers")
    first, last = (int(read.config[f"moe_layer_{end}_index"]) for end in ("start", "end"))
    period = read.number("moe_layer_interval")
    last = count - 1 if last < 0 else last
    layers = tuple((i + 1) % period == 0 and first <= i <= last for i in range(count))
    inner = read.number("moe_intermediate_size")
    experts = _experts(
        read,
        "moe_num_experts",
        "moe_intermediate_size",
        active="moe_k",
        layers=layers,
        choice_bias=True,
        least_sum=read.real("moe_norm_min"),
        shared=inner * int(read.config["moe_num_shared_experts"]),
    )
    layout = Layout(experts=ExpertLayout(choice_bias="mlp.moe_statics.e_score_correction_bias"))
    return replace(ernie(read), experts=experts, layout=layout)


@family(
    "gpt_oss",
    "GptOssForCausalLM",
    max_position_embeddings=131072,
    num_key_value_heads=8,
    head_dim=64,
    rms_norm_eps=1e-5,
    rope_theta=150_000.0,
    num_local_experts=128,
    num_experts_per_tok=4,
    sliding_window=128,
    attention_bias=True,
    swiglu_alpha=1.702,
    swiglu_limit=7.0,
    rope_parameters={
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
)
def gpt_oss(read: Reader) -> DecoderConfig:
    experts = _experts(
        read,
        "num_local_experts",
        "intermediate_size",
        router="softmax_of_chosen",
        router_bias=True,
        bias=True,
        clamp=read.real("swiglu_limit"),
        alpha=read.real("swiglu_alpha"),
    )
    places = ExpertLayout(router="mlp.router")
    quantisation = read.config.get("quantization_config") or {}
    if quantisation.get("quant_method") != MXFP4:  # which is read expert by expert
        places = replace(
            places,
            all_gate_up="mlp.experts.gate_up_proj",
            all_down="mlp.experts.down_proj",
            transposed=True,
            interleaved=True,
        )
    return read.llama(
        mlp_bias=False,
        sinks=True,
        windows=read.windows(read.layer_types(read.every(2))),
        experts=experts,
        layout=Layout(experts=places),
    )


@family(
    "granitemoe",
    "GraniteMoeForCausalLM",
    max_position_embeddings=2048,
    num_local_experts=8,
    num_experts_per_tok=2,
)
def granite_moe(read: Reader) -> DecoderConfig:
    places = ExpertLayout(
        router="block_sparse_moe.router.layer",
        all_gate_up="block_sparse_moe.input_linear.weight",
        all_down="block_sparse_moe.output_linear.weight",
    )
    experts = _experts(read, "num_local_experts", "intermediate_size", router="softmax_of_chosen")
    return replace(granite(read), mlp_bias=False, experts=experts, layout=Layout(experts=places))


@family(
    "minimax_m2",
    "MiniMaxM2ForCausalLM",
    max_position_embeddings=196608,
    num_key_value_heads=8,
    head_dim=128,
    rope_theta=5_000_000.0,
    num_local_experts=256,
    num_experts_per_tok=8,
)
def minimax_m2(read: Reader) -> DecoderConfig:
    head_dim = read.number("head_dim")
    rotated = read.rotary_dim(head_dim)
    if "partial_rotary_factor" not in rope_parameters(read.config) and "rotary_dim" in read.config:
        rotated = read.number("rotary_dim")
    return read.llama(
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        qk_norm=True,
        qk_span="row",
        rotary_dim=None if rotated == head_dim else rotated,
        experts=_experts(
            read, "num_local_experts", "intermediate_size", router="sigmoid", choice_bias=True
        ),
        layout=Layout(experts=_BLOCK),
    )


@family(
    "hunyuan_v1_moe",
    "HunYuanMoEV1ForCausalLM",
    max_position_embeddings=2048,
    rms_norm_eps=1e-5,
    num_experts=1,
    moe_topk=1,
)
def hunyuan_moe(read: Reader) -> DecoderConfig:
    dense = hunyuan(read)
    experts = _experts(
        read,
        "num_experts",
        "intermediate_size",
        active="moe_topk",
        shared=read.number("intermediate_size"),
    )
    places = ExpertLayout(router="mlp.gate.wg", shared="mlp.shared_mlp")
    return replace(dense, experts=experts, layout=replace(dense.layout, experts=places))
