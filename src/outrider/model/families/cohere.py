"""Cohere: attention and MLP beside each other, norms that subtract the mean, scaled logits."""

from __future__ import annotations

from typing import Any

from outrider.model.families.description import DecoderConfig
from outrider.model.families.reader import SLIDING, Reader, family


def _cohere(read: Reader, **parts: Any) -> DecoderConfig:
    return read.llama(
        mlp_bias=False,
        layer_norm=True,
        norm_eps=read.real("layer_norm_eps"),
        parallel=True,
        one_norm=True,
        rope_pairs=True,
        logit_scale=read.real("logit_scale"),
        **parts,
    )


@family(
    "cohere",
    "CohereForCausalLM",
    max_position_embeddings=8192,
    layer_norm_eps=1e-5,
    logit_scale=0.0625,
    rope_theta=500_000.0,
    tie_word_embeddings=True,
)
def cohere(read: Reader) -> DecoderConfig:
    return _cohere(read, qk_norm=read.flag("use_qk_norm"), qk_layer_norm=True, qk_span="heads")


@family(
    "cohere2",
    "Cohere2ForCausalLM",
    max_position_embeddings=8192,
    layer_norm_eps=1e-5,
    logit_scale=0.0625,
    sliding_window=4096,
    sliding_window_pattern=4,
    tie_word_embeddings=True,
)
def cohere2(read: Reader) -> DecoderConfig:
    """Layers that see everything do not rotate."""
    types = read.layer_types(read.every(read.number("sliding_window_pattern")))
    rotates = [kind == SLIDING and read.config.get("sliding_window") is not None for kind in types]
    return _cohere(read, windows=read.windows(types), layer_ropes=read.no_rope(rotates))
