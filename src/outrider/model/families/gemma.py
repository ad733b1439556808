"""Gemma: norms store their weights less one, embeddings are scaled, norms on both sides."""

from __future__ import annotations

from dataclasses import replace

from outrider.model.families.description import DecoderConfig, Layout
from outrider.model.families.reader import SLIDING, Reader, family
from outrider.model.rope import rope_parameters

_BOTH_NORMS = Layout(
    modules={
        "attention_out_norm": "post_attention_layernorm",
        "post_attention_layernorm": "pre_feedforward_layernorm",
        "mlp_out_norm": "post_feedforward_layernorm",
    }
)
_GEMMA = {"head_dim": 256, "tie_word_embeddings": True, "num_hidden_layers": 26}


@family(
    "gemma",
    "GemmaForCausalLM",
    max_position_embeddings=8192,
    hidden_act="gelu_pytorch_tanh",
    **_GEMMA,
)
def gemma(read: Reader) -> DecoderConfig:
    """The first releases say "gelu" and mean its approximation."""
    activation = read.activation()
    return _gemma(read, activation="gelu_tanh" if activation == "gelu" else activation)


def _gemma(read: Reader, **parts: object) -> DecoderConfig:
    if read.flag("use_bidirectional_attention"):
        raise read.refuse("the model reads a text in both directions")
    scale = float(read.number("hidden_size")) ** 0.5
    return read.llama(norm_shift=1.0, embedding_scale=scale, mlp_bias=False, **parts)


@family(
    "gemma2",
    "Gemma2ForCausalLM",
    max_position_embeddings=8192,
    num_key_value_heads=4,
    hidden_activation="gelu_pytorch_tanh",
    query_pre_attn_scalar=256,
    sliding_window=4096,
    final_logit_softcapping=30.0,
    attn_logit_softcapping=50.0,
    **_GEMMA,
)
@family(
    "vaultgemma",
    "VaultGemmaForCausalLM",
    max_position_embeddings=8192,
    num_key_value_heads=4,
    hidden_activation="gelu_pytorch_tanh",
    query_pre_attn_scalar=256,
    sliding_window=4096,
    final_logit_softcapping=30.0,
    attn_logit_softcapping=50.0,
    **_GEMMA,
)
def gemma2(read: Reader) -> DecoderConfig:
    both = read.model_type == "gemma2"
    return _gemma(
        read,
        activation=read.activation("hidden_activation"),
        norm_after=both,
        attention_scale=read.real("query_pre_attn_scalar") ** -0.5,
        score_cap=read.cap("attn_logit_softcapping"),
        logit_cap=read.cap("final_logit_softcapping"),
        windows=read.windows(read.layer_types(read.every(2))),
        layout=_BOTH_NORMS if both else _VAULT_NORMS,
    )


_VAULT_NORMS = Layout(modules={"post_attention_layernorm": "pre_feedforward_layernorm"})


@family(
    "gemma3_text",
    "Gemma3ForCausalLM",
    max_position_embeddings=131072,
    num_key_value_heads=4,
    hidden_activation="gelu_pytorch_tanh",
    query_pre_attn_scalar=256,
    sliding_window=4096,
    sliding_window_pattern=6,
    vocab_size=262208,
    hidden_size=2304,
    intermediate_size=9216,
    num_attention_heads=8,
    **_GEMMA,
)
def gemma3(read: Reader) -> DecoderConfig:
    """Layers with a window have a rope of their own, which is never scaled."""
    types = read.layer_types(read.every(read.number("sliding_window_pattern")))
    given = rope_parameters(read.config)
    near, far = given.get("sliding_attention"), given.get("full_attention")
    if near is None and far is None and given:
        far = given  # an old config: the scaling of the layers without a window
    local = {"rope_theta": read.real("rope_local_base_freq", 10_000.0), **(near or {})}
    whole = {"rope_theta": read.real("rope_theta", 1_000_000.0), **(far or {})}
    config = gemma2(read)
    return replace(
        config,
        qk_norm=True,
        windows=read.windows(types),
        norm_after=True,
        layout=_BOTH_NORMS,
        rope=read.rope(whole),
        other_ropes=(read.rope(local),),
        layer_ropes=tuple(1 if kind == SLIDING else 0 for kind in types),
    )
