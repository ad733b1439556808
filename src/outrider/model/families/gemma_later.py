"""Gemma 3n and 4: later layers read the K/V of earlier ones, and each layer has its own inputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outrider.model.families.description import DecoderConfig, ExpertLayout, Experts, Layout
from outrider.model.families.reader import FULL, SLIDING, Reader, family
from outrider.model.families.residuals import LayerInputs, Streams
from outrider.model.rope import rope_parameters

_LAYOUT = Layout(
    modules={
        "attention_out_norm": "post_attention_layernorm",
        "post_attention_layernorm": "pre_feedforward_layernorm",
        "mlp_out_norm": "post_feedforward_layernorm",
    },
    experts=ExpertLayout(
        router="router.proj",
        all_gate_up="experts.gate_up_proj",
        all_down="experts.down_proj",
        shared="mlp",
    ),
)
_WHOLE_ROPE = {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6}


@family(
    "gemma3n_text",
    "Gemma3nForCausalLM",
    vocab_size=262400,
    max_position_embeddings=32768,
    num_hidden_layers=35,
    num_key_value_heads=2,
    hidden_activation="gelu_pytorch_tanh",
    tie_word_embeddings=True,
    head_dim=256,
    sliding_window=512,
    final_logit_softcapping=30.0,
    vocab_size_per_layer_input=262144,
    hidden_size_per_layer_input=256,
    altup_num_inputs=4,
    altup_correct_scale=True,
    num_kv_shared_layers=15,
    laurel_rank=64,
)
def gemma3n(read: Reader) -> DecoderConfig:
    """Several residual streams; a share of the first layers' gates is cut to 0."""
    count = read.number("num_hidden_layers")
    types = read.layer_types(read.every(5))
    sparsity = read.config.get("activation_sparsity_pattern")
    if sparsity is None:
        sparsity = [0.95 if count > 10 and i < 10 else 0.0 for i in range(count)]
    inner = read.config.get("intermediate_size")
    sizes = tuple(inner) if isinstance(inner, list) else (read.number("intermediate_size"),) * count
    if len(sizes) != count or len(sparsity) != count:
        raise read.refuse("intermediate_size or activation_sparsity_pattern lacks a layer")
    cut = tuple(float(share) for share in sparsity)
    return _gemma(
        read,
        types,
        {"rope_theta": read.real("rope_theta", 1e6)},
        intermediate_size=max(sizes),
        inner_sizes=sizes if len(set(sizes)) > 1 else (),
        sparsity=cut if any(cut) else (),
        streams=Streams(
            count=read.number("altup_num_inputs"),
            active=int(read.config.get("altup_active_idx") or 0),
            rank=read.number("laurel_rank"),
            scaled=read.flag("altup_correct_scale"),
        ),
    )


@family(
    "gemma4_text",
    "Gemma4ForCausalLM",
    vocab_size=262144,
    max_position_embeddings=131072,
    num_hidden_layers=30,
    num_key_value_heads=4,
    hidden_activation="gelu_pytorch_tanh",
    tie_word_embeddings=True,
    head_dim=256,
    global_head_dim=512,
    sliding_window=512,
    vocab_size_per_layer_input=262144,
    hidden_size_per_layer_input=256,
)
def gemma4(read: Reader) -> DecoderConfig:
    """Layers without a window have wider heads, and their keys may be their values."""
    if read.config.get("use_bidirectional_attention") == "all":
        raise read.refuse("the model reads a text in both directions")
    count = read.number("num_hidden_layers")
    types = read.layer_types(read.every(6))
    types[-1] = FULL
    shared = int(read.config.get("num_kv_shared_layers") or 0)
    inner = read.number("intermediate_size")
    wide = [shared and i >= count - shared for i in range(count)]
    same = [read.flag("attention_k_eq_v") and kind == FULL for kind in types]
    double = read.flag("use_double_wide_mlp") and shared
    return _gemma(
        read,
        types,
        _WHOLE_ROPE,
        **_heads(read, types),
        values_of_keys=tuple(same) if any(same) else (),
        inner_sizes=tuple(inner * (2 if more else 1) for more in wide) if double else (),
        layer_scale=True,
        experts=_experts(read) if read.flag("enable_moe_block") else None,
    )


def _gemma(read: Reader, types: list[str], whole: Mapping[str, Any], **parts: Any) -> DecoderConfig:
    """`whole`: the rope of layers without a window, unless the config says another."""
    given = rope_parameters(read.config)
    near = {"rope_theta": read.real("rope_local_base_freq", 10_000.0)}
    near |= given.get("sliding_attention") or {}
    return read.llama(
        activation=read.activation("hidden_activation"),
        embedding_scale=float(read.number("hidden_size")) ** 0.5,
        attention_scale=1.0,
        qk_norm=True,
        value_unit=True,
        norm_after=True,
        mlp_bias=False,
        logit_cap=read.cap("final_logit_softcapping"),
        windows=read.windows(types),
        rope=read.rope(given.get("full_attention") or whole),
        other_ropes=(read.rope(near),),
        layer_ropes=tuple(1 if kind == SLIDING else 0 for kind in types),
        kv_layers=_kv_layers(read, types),
        layer_inputs=_inputs(read),
        layout=_LAYOUT,
        **parts,
    )


def _kv_layers(read: Reader, types: list[str]) -> tuple[int, ...]:
    """The last layers read what the last layer of their kind before them has stored."""
    first = len(types) - int(read.config.get("num_kv_shared_layers") or 0)
    if first >= len(types) or first <= 0:
        return ()
    own = {kind: i for i, kind in enumerate(types[:first])}
    if set(types[first:]) - set(own):
        raise read.refuse("num_kv_shared_layers leaves no layer of a kind to share with")
    return tuple(i if i < first else own[kind] for i, kind in enumerate(types))


def _inputs(read: Reader) -> LayerInputs | None:
    if not read.config.get("hidden_size_per_layer_input"):
        return None
    rows = read.number("vocab_size_per_layer_input")
    return LayerInputs(size=read.number("hidden_size_per_layer_input"), rows=rows)


def _heads(read: Reader, types: list[str]) -> dict[str, tuple[int, ...]]:
    """Sizes of heads by layer; newer configs list the layers that differ."""
    kv_heads, dim = read.number("num_key_value_heads"), read.number("head_dim")
    listed = read.config.get("per_layer_config")
    if listed is None:
        other = {"head_dim": read.number("global_head_dim")}
        if read.flag("attention_k_eq_v") and read.config.get("num_global_key_value_heads"):
            other["num_key_value_heads"] = read.number("num_global_key_value_heads")
        listed = {i: other for i, kind in enumerate(types) if kind == FULL}
    differing = {int(i): sizes for i, sizes in listed.items()}
    if any(set(sizes) - {"head_dim", "num_key_value_heads"} for sizes in differing.values()):
        raise read.refuse("per_layer_config names other parts than heads")
    sizes = [differing.get(i, {}) for i in range(len(types))]
    dims = tuple(int(size.get("head_dim", dim)) for size in sizes)
    heads = tuple(int(size.get("num_key_value_heads", kv_heads)) for size in sizes)
    same = set(dims) == {dim} and set(heads) == {kv_heads}
    return {} if same else {"head_dims": dims, "kv_heads": heads}


def _experts(read: Reader) -> Experts:
    return Experts(
        count=read.number("num_experts"),
        active=read.number("top_k_experts"),
        inner=read.number("moe_intermediate_size"),
        layers=(True,) * read.number("num_hidden_layers"),
        shared=read.number("intermediate_size"),
        apart=True,
        own_scales=True,
    )
