"""Granite 3 and HyperCLOVA X: multipliers on embeddings, scores, residuals and logits."""

from __future__ import annotations

from dataclasses import replace

from outrider.model.families.description import DecoderConfig, Layout
from outrider.model.families.reader import Reader, family


@family("granite", "GraniteForCausalLM", max_position_embeddings=2048)
def granite(read: Reader) -> DecoderConfig:
    return read.llama(
        embedding_scale=read.real("embedding_multiplier", 1.0),
        attention_scale=read.real("attention_multiplier", 1.0),
        residual_scale=read.real("residual_multiplier", 1.0),
        logit_scale=1 / read.real("logits_scaling", 1.0),
    )


@family("hyperclovax", "HyperCLOVAXForCausalLM", max_position_embeddings=2048, use_post_norm=True)
def hyperclovax(read: Reader) -> DecoderConfig:
    """Granite with norms after attention and MLP. Logits are multiplied, not divided."""
    config = granite(read)
    modules = {"attention_out_norm": "post_norm1", "mlp_out_norm": "post_norm2"}
    return replace(
        config,
        attention_scale=read.real("attention_multiplier", config.head_dim**-0.5),
        logit_scale=read.real("logits_scaling", 1.0),
        norm_after=read.flag("use_post_norm"),
        layout=Layout(modules=modules),
    )
