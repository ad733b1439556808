"""Mamba-2, alone and beside attention: Bamba, Granite 4, Falcon-H1, Nemotron-H."""

from __future__ import annotations

from typing import Any

from outrider.model.families.description import (
    ATTENTION,
    BOTH,
    NO_ROPE,
    NOTHING,
    STATE,
    DecoderConfig,
    ExpertLayout,
    Experts,
    Layout,
)
from outrider.model.families.granite import granite
from outrider.model.families.mixers import SelectiveScan
from outrider.model.families.reader import Reader, family

_INFINITE = float("inf")


def _tensors(mixer: str) -> dict[str, str]:
    """Where a layer has the tensors of its scan."""
    names = {name: name for name in ("in_proj", "out_proj", "norm", "A_log", "D", "dt_bias")}
    names["conv"] = "conv1d"
    return {f"mixer.{ours}": f"{mixer}.{theirs}" for ours, theirs in names.items()}


def _limits(read: Reader) -> dict[str, Any]:
    """transformers writes an infinite limit as a string or as a dictionary."""
    least, most = read.config.get("time_step_limit") or (0.0, _INFINITE)
    return {"least_step": _finite(least, 0.0), "most_step": _finite(most, _INFINITE)}


def _finite(value: object, otherwise: float) -> float:
    return float(value) if isinstance(value, int | float) else otherwise


def _check_activation(read: Reader, key: str = "hidden_act") -> None:
    if read.activation(key) != "silu":
        raise read.refuse(f"{key} of the convolution is not silu")


@family(
    "mamba2",
    "Mamba2ForCausalLM",
    num_heads=128,
    head_dim=64,
    vocab_size=32768,
    hidden_size=4096,
    state_size=128,
    num_hidden_layers=64,
    layer_norm_epsilon=1e-5,
    conv_kernel=4,
    n_groups=8,
    use_conv_bias=True,
    num_attention_heads=1,
    intermediate_size=1,
    max_position_embeddings=131072,  # it has no positions: any limit will do
)
def mamba2(read: Reader) -> DecoderConfig:
    _check_activation(read)
    count = read.number("num_hidden_layers")
    bias = read.flag("use_bias")
    return read.llama(
        head_dim=2,
        norm_eps=read.real("layer_norm_epsilon"),
        layer_ropes=(NO_ROPE,) * count,
        mixer=SelectiveScan(
            heads=read.number("num_heads"),
            head_dim=read.number("head_dim"),
            state_size=read.number("state_size"),
            groups=read.number("n_groups"),
            width=read.number("conv_kernel"),
            bias=bias,
            out_bias=bias,
            conv_bias=read.flag("use_conv_bias"),
            **_limits(read),
        ),
        mixing=(STATE,) * count,
        mlps=(False,) * count,
        layout=Layout(
            trunks=("backbone.",),
            embedding="embeddings",
            final_norm="norm_f",
            modules={"input_layernorm": "norm", **_tensors("mixer")},
        ),
    )


def _mamba(read: Reader, **parts: Any) -> SelectiveScan:
    """The scan of configs whose keys begin with mamba."""
    heads = read.number("mamba_n_heads")
    inner = read.config.get("mamba_d_ssm") or (
        read.number("mamba_expand") * read.number("hidden_size")
    )
    dim = read.config.get("mamba_d_head", "auto")
    return SelectiveScan(
        heads=heads,
        head_dim=inner // heads if dim == "auto" else read.number("mamba_d_head"),
        state_size=read.number("mamba_d_state"),
        groups=read.number("mamba_n_groups"),
        width=read.number("mamba_d_conv"),
        bias=read.flag("mamba_proj_bias"),
        conv_bias=read.flag("mamba_conv_bias"),
        **_limits(read),
        **parts,
    )


_MAMBA = {
    "mamba_n_heads": 128,
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_head": "auto",
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
}


def _kinds(read: Reader, names: dict[str, str], default: list[str]) -> tuple[list[str], list[str]]:
    """What mixes the tokens in each layer, and the names that say so."""
    types = read.config.get("layer_types") or read.config.get("layers_block_type") or default
    if set(types) - set(names):
        raise read.refuse("layer_types names other layers than attention and Mamba")
    return [names[kind] for kind in types], list(types)


_NAMES = {"full_attention": ATTENTION, "attention": ATTENTION}
_NAMES |= {"linear_attention": STATE, "mamba": STATE}


@family(
    "granitemoehybrid",
    "GraniteMoeHybridForCausalLM",
    max_position_embeddings=2048,
    num_local_experts=8,
    num_experts_per_tok=2,
    shared_intermediate_size=1024,
    **_MAMBA,
)
def granite4(read: Reader) -> DecoderConfig:
    """Granite with attention in some layers, and a shared MLP beside the experts."""
    _check_activation(read)
    count = read.number("num_hidden_layers")
    mixing, _ = _kinds(read, _NAMES, ["mamba"] * count)
    if len(mixing) != count:
        raise read.refuse("layer_types does not name every layer")
    has_rope = read.config.get("position_embedding_type") == "rope"
    shared, experts = read.number("shared_intermediate_size"), None
    if read.config.get("num_local_experts"):
        experts = Experts(
            count=read.number("num_local_experts"),
            active=read.number("num_experts_per_tok"),
            inner=read.number("intermediate_size"),
            layers=(True,) * count,
            router="softmax_of_chosen",
            shared=shared,
        )
    has_state = STATE in mixing
    plain = granite(read)
    return read.llama(
        intermediate_size=shared,
        embedding_scale=plain.embedding_scale,
        attention_scale=plain.attention_scale,
        residual_scale=plain.residual_scale,
        logit_scale=plain.logit_scale,
        mlp_bias=False,
        layer_ropes=() if has_rope else (NO_ROPE,) * count,
        experts=experts,
        mixer=_mamba(read, out_bias=read.flag("mamba_proj_bias")) if has_state else None,
        mixing=tuple(mixing) if has_state else (),
        layout=Layout(
            modules={
                **_tensors("mamba"),
                "mlp.fused": "shared_mlp.input_linear",
                "mlp.down_proj": "shared_mlp.output_linear",
            },
            fused_gate_up="mlp.fused",
            experts=ExpertLayout(
                router="block_sparse_moe.router.layer",
                all_gate_up="block_sparse_moe.input_linear.weight",
                all_down="block_sparse_moe.output_linear.weight",
                shared="mlp",
            ),
        ),
    )


@family(
    "falcon_h1",
    "FalconH1ForCausalLM",
    vocab_size=128000,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    max_position_embeddings=8192,
    rms_norm_eps=1e-5,
    mamba_d_ssm=1024,
    mamba_norm_before_gate=True,
    **_MAMBA,
)
def falcon_h1(read: Reader) -> DecoderConfig:
    """Attention and a scan side by side in every layer. Multipliers of products are in weights."""
    _check_activation(read)
    inputs, scales = read.real("ssm_in_multiplier", 1.0), read.config.get("ssm_multipliers")
    if inputs != 1.0 and read.flag("mamba_proj_bias"):
        raise read.refuse("ssm_in_multiplier with mamba_proj_bias")
    return read.llama(
        embedding_scale=read.real("embedding_multiplier", 1.0),
        logit_scale=read.real("lm_head_multiplier", 1.0),
        mixer=_mamba(
            read,
            out_bias=read.flag("projectors_bias"),
            norm=read.flag("mamba_rms_norm"),
            norm_groups=read.number("mamba_n_groups"),
            norm_first=read.flag("mamba_norm_before_gate"),
            scales=tuple(float(s) * inputs for s in scales or (1.0,) * 5),
        ),
        mixing=(BOTH,) * read.number("num_hidden_layers"),
        layout=Layout(
            final_norm="final_layernorm",
            modules={
                "post_attention_layernorm": "pre_ff_layernorm",
                **{f"mlp.{p}_proj": f"feed_forward.{p}_proj" for p in ("gate", "up", "down")},
                **_tensors("mamba"),
            },
            scales=_falcon_scales(read),
        ),
    )


@family(
    "bamba",
    "BambaForCausalLM",
    vocab_size=128000,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    max_position_embeddings=262144,
    rms_norm_eps=1e-5,
    partial_rotary_factor=0.5,
    **_MAMBA,
)
def bamba(read: Reader) -> DecoderConfig:
    """Attention with a partial rope in the layers that the config lists."""
    _check_activation(read)
    hidden, heads = read.number("hidden_size"), read.number("num_attention_heads")
    listed = read.config.get("attn_layer_indices") or []
    return read.llama(
        o_bias=read.flag("attention_bias"),
        rotary_dim=read.rotary_dim(hidden // heads),
        mixer=_mamba(read, out_bias=read.flag("mamba_proj_bias")),
        mixing=tuple(
            ATTENTION if i in listed else STATE for i in range(read.number("num_hidden_layers"))
        ),
        layout=Layout(
            final_norm="final_layernorm",
            modules={
                "post_attention_layernorm": "pre_ff_layernorm",
                **{f"mlp.{p}_proj": f"feed_forward.{p}_proj" for p in ("gate", "up", "down")},
                **_tensors("mamba"),
            },
        ),
    )


def _falcon_scales(read: Reader) -> dict[str, float]:
    into, key = read.real("attention_in_multiplier", 1.0), read.real("key_multiplier", 1.0)
    if into != 1.0 and read.flag("attention_bias"):
        raise read.refuse("attention_in_multiplier with attention_bias")
    gate, down = read.config.get("mlp_multipliers") or (1.0, 1.0)
    factors = {
        "self_attn.q_proj": into,
        "self_attn.k_proj": into * key,
        "self_attn.v_proj": into,
        "self_attn.o_proj": read.real("attention_out_multiplier", 1.0),
        "mixer.out_proj": read.real("ssm_out_multiplier", 1.0),
        "mlp.gate_proj": float(gate),
        "mlp.down_proj": float(down),
    }
    return {f"{m}.{kind}": x for m, x in factors.items() for kind in ("weight", "bias")}


_LETTERS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}


@family(
    "nemotron_h",
    "NemotronHForCausalLM",
    vocab_size=131072,
    hidden_size=4096,
    intermediate_size=21504,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=4096,
    layer_norm_epsilon=1e-5,
    mlp_hidden_act="relu2",
    mamba_hidden_act="silu",
    mamba_num_heads=128,
    mamba_head_dim=64,
    ssm_state_size=128,
    n_groups=8,
    conv_kernel=4,
    use_conv_bias=True,
    time_step_min=0.001,
    n_routed_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=7688,
    moe_shared_expert_intermediate_size=7688,
    norm_topk_prob=True,
    routed_scaling_factor=1.0,
    n_group=1,
    topk_group=1,
)
def nemotron_h(read: Reader) -> DecoderConfig:
    """A layer is a scan, attention, an MLP or experts alone. There is no rope."""
    _check_activation(read, "mamba_hidden_act")
    if read.config.get("moe_latent_size") is not None:
        raise read.refuse("moe_latent_size is set")
    pattern = read.config.get("hybrid_override_pattern") or ""
    if set(pattern) - set(_LETTERS):
        raise read.refuse("hybrid_override_pattern names unknown layers")
    names = {**_NAMES, "mlp": NOTHING, "moe": NOTHING}
    listed = [_LETTERS[letter] for letter in pattern]
    mixing, types = _kinds(read, names, listed or ["mamba", "moe", "attention", "mlp"])
    sizes = {**read.config, "num_hidden_layers": len(mixing)}
    return Reader(read.model_type, sizes, read.stated).llama(
        norm_eps=read.real("layer_norm_epsilon"),
        qkv_bias=False,
        o_bias=False,
        gated=False,
        activation=read.activation("mlp_hidden_act"),
        experts=_experts_without_gate(read, types) if "moe" in types else None,
        layer_ropes=(NO_ROPE,) * len(mixing),
        mixer=_nemotron_scan(read),
        mixing=tuple(mixing),
        mlps=tuple(kind == NOTHING for kind in mixing),
        layout=_NEMOTRON,
    )


_NEMOTRON = Layout(
    trunks=("model.", "backbone."),
    embedding="embeddings",
    final_norm="norm_f",
    modules={
        "input_layernorm": "norm",
        "post_attention_layernorm": "norm",
        **{f"self_attn.{p}_proj": f"mixer.{p}_proj" for p in "qkvo"},
        "mlp.up_proj": "mixer.up_proj",
        "mlp.down_proj": "mixer.down_proj",
        **_tensors("mixer"),
    },
    experts=ExpertLayout(
        router="mixer.gate",
        choice_bias="mixer.gate.e_score_correction_bias",
        up="mixer.experts.E.up_proj",
        down="mixer.experts.E.down_proj",
        shared="mixer.shared_experts",
    ),
)


def _nemotron_scan(read: Reader) -> SelectiveScan:
    groups = read.number(read.one_of("n_groups", "mamba_n_groups"))
    return SelectiveScan(
        heads=read.number("mamba_num_heads"),
        head_dim=read.number("mamba_head_dim"),
        state_size=read.number("ssm_state_size"),
        groups=groups,
        width=read.number(read.one_of("conv_kernel", "mamba_d_conv")),
        bias=read.flag("use_bias"),
        out_bias=read.flag("use_bias"),
        conv_bias=read.flag(read.one_of("use_conv_bias", "mamba_conv_bias")),
        norm_groups=groups,
        least_step=read.real(read.one_of("time_step_min", "mamba_dt_min")),
    )


def _experts_without_gate(read: Reader, types: list[str]) -> Experts:
    return Experts(
        count=read.number("n_routed_experts"),
        active=read.number("num_experts_per_tok"),
        inner=read.number("moe_intermediate_size"),
        layers=tuple(kind == "moe" for kind in types),
        router="sigmoid",
        choice_bias=True,
        normalised=read.flag("norm_topk_prob"),
        scale=read.real("routed_scaling_factor"),
        groups=read.number("n_group"),
        open_groups=read.number("topk_group"),
        shared=read.number("moe_shared_expert_intermediate_size"),
    )
