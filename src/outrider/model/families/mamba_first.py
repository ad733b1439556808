"""The first Mamba, alone and beside attention: Mamba, Falcon Mamba, Jamba."""

from __future__ import annotations

from typing import Any

from outrider.model.families.description import (
    ATTENTION,
    NO_ROPE,
    STATE,
    DecoderConfig,
    ExpertLayout,
    Experts,
    Layout,
)
from outrider.model.families.mixers import ChannelScan
from outrider.model.families.reader import Reader, family

_PARTS = ("in_proj", "x_proj", "dt_proj", "out_proj", "A_log", "D")
_NORMS = ("dt_layernorm", "b_layernorm", "c_layernorm")


def _tensors(mixer: str) -> dict[str, str]:
    """Where a layer has the tensors of its scan."""
    names = {f"mixer.{part}": f"{mixer}.{part}" for part in (*_PARTS, *_NORMS)}
    return names | {"mixer.conv": f"{mixer}.conv1d"}


def _scan(read: Reader, keys: dict[str, str], **parts: Any) -> ChannelScan:
    """`keys`: what the config calls the sizes."""
    if read.activation() != "silu":
        raise read.refuse("hidden_act of the convolution is not silu")
    hidden, rank = read.number("hidden_size"), read.config.get(keys["rank"], "auto")
    return ChannelScan(
        channels=read.number(keys["expand"]) * hidden,
        state_size=read.number(keys["state"]),
        rank=-(-hidden // 16) if rank == "auto" else read.number(keys["rank"]),
        width=read.number(keys["width"]),
        bias=read.flag(keys["bias"]),
        conv_bias=read.flag(keys["conv_bias"]),
        **parts,
    )


_MAMBA = {
    "vocab_size": 50280,
    "hidden_size": 768,
    "state_size": 16,
    "num_hidden_layers": 32,
    "layer_norm_epsilon": 1e-5,
    "expand": 2,
    "conv_kernel": 4,
    "use_conv_bias": True,
    "tie_word_embeddings": True,
    "num_attention_heads": 1,
    "intermediate_size": 1,
    "max_position_embeddings": 131072,  # it has no positions: any limit will do
}
_MAMBA_KEYS = {
    "expand": "expand",
    "state": "state_size",
    "rank": "time_step_rank",
    "width": "conv_kernel",
    "bias": "use_bias",
    "conv_bias": "use_conv_bias",
}


@family("mamba", "MambaForCausalLM", **_MAMBA)
@family("falcon_mamba", "FalconMambaForCausalLM", mixer_rms_eps=1e-6, **_MAMBA)
def mamba(read: Reader) -> DecoderConfig:
    """Falcon's normalises what it makes of x, without weights."""
    falcon, count = read.model_type == "falcon_mamba", read.number("num_hidden_layers")
    norms: dict[str, Any] = {"norms": "none"}
    if falcon:
        norms = {"norms": "unit", "norm_eps": read.real("mixer_rms_eps")}
    return read.llama(
        head_dim=2,
        intermediate_size=1,
        norm_eps=read.real("layer_norm_epsilon"),
        layer_ropes=(NO_ROPE,) * count,
        mixer=_scan(read, _MAMBA_KEYS, **norms),
        mixing=(STATE,) * count,
        mlps=(False,) * count,
        layout=Layout(
            trunks=("backbone.",),
            embedding="embeddings",
            final_norm="norm_f",
            modules={"input_layernorm": "norm", **_tensors("mixer")},
        ),
    )


@family(
    "jamba",
    "JambaForCausalLM",
    vocab_size=65536,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    max_position_embeddings=262144,
    num_experts=16,
    num_experts_per_tok=2,
    expert_layer_period=2,
    expert_layer_offset=1,
    attn_layer_period=8,
    attn_layer_offset=4,
    mamba_d_state=16,
    mamba_d_conv=4,
    mamba_expand=2,
    mamba_conv_bias=True,
)
def jamba(read: Reader) -> DecoderConfig:
    """Attention without rope in some layers, a scan in the others; experts in some."""
    layers = range(read.number("num_hidden_layers"))
    keys = {"rank": "mamba_dt_rank", "state": "mamba_d_state", "width": "mamba_d_conv"}
    keys |= {"bias": "mamba_proj_bias", "conv_bias": "mamba_conv_bias", "expand": "mamba_expand"}
    attends = _every(read, "attn")
    return read.llama(
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        layer_ropes=(NO_ROPE,) * len(layers),
        mixer=_scan(read, keys, norms="weights", norm_eps=read.real("rms_norm_eps", 1e-6)),
        mixing=tuple(ATTENTION if yes else STATE for yes in attends),
        experts=Experts(
            count=read.number("num_experts"),
            active=read.number("num_experts_per_tok"),
            inner=read.number("intermediate_size"),
            layers=_every(read, "expert"),
            normalised=False,
        )
        if read.number("num_experts") > 1
        else None,
        layout=_JAMBA,
    )


def _every(read: Reader, what: str) -> tuple[bool, ...]:
    period = read.number(f"{what}_layer_period")
    offset = int(read.config.get(f"{what}_layer_offset") or 0)
    return tuple(i % period == offset for i in range(read.number("num_hidden_layers")))


_JAMBA = Layout(
    final_norm="final_layernorm",
    modules={
        "post_attention_layernorm": "pre_ff_layernorm",
        **{f"mlp.{p}_proj": f"feed_forward.{p}_proj" for p in ("gate", "up", "down")},
        **_tensors("mamba"),
    },
    experts=ExpertLayout(
        router="feed_forward.router",
        gate="feed_forward.experts.E.gate_proj",
        up="feed_forward.experts.E.up_proj",
        down="feed_forward.experts.E.down_proj",
    ),
)
