"""Tiny configurations of every family beyond Llama's, each part of a description among them."""

from __future__ import annotations

from typing import Any

import transformers as t

from tiny_models import SMALL

_WINDOWS = ["sliding_attention", "full_attention", "sliding_attention"]
_ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
    "full_attention": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 32,
    },
}
_GPT = {
    "vocab_size": 64,
    "n_embd": 32,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 128,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


_FALCON = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
_BLOOM = {"vocab_size": 64, "hidden_size": 48, "n_layer": 3, "bos_token_id": 0, "eos_token_id": 0}
_MPT = {"vocab_size": 64, "d_model": 32, "n_layers": 3, "max_seq_len": 128}


_IDS = {key: SMALL[key] for key in ("vocab_size", "pad_token_id", "bos_token_id", "eos_token_id")}
_MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 12,
    "mamba_chunk_size": 16,
}
_DELTA = {
    "head_dim": 16,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
}
_JAPANESE = {
    k: v for k, v in SMALL.items() if k not in ("num_key_value_heads", "intermediate_size")
}
_GROUPS = {
    "n_routed_experts": 6,
    "n_shared_experts": 2,
    "n_group": 3,
    "topk_group": 2,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.7,
}


_LATENT = SMALL | {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 10,
}


def _longrope(pairs: int) -> dict[str, Any]:
    factors = [1.0 + i / 2 for i in range(pairs)]
    return {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": factors,
        "long_factor": [2 * factor for factor in factors],
    }


_PAIRS = ["sliding_attention", "full_attention"]
_SHARED = SMALL | {
    "num_hidden_layers": 6,
    "layer_types": _PAIRS * 3,
    "num_kv_shared_layers": 2,
    "sliding_window": 7,
    "head_dim": 8,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 64,
}

FAMILY_CONFIGS: dict[str, Any] = {
    "arcee": t.ArceeConfig(**SMALL),
    "ministral": t.MinistralConfig(**SMALL, head_dim=8, sliding_window=7, layer_types=_WINDOWS),
    "seed_oss": t.SeedOssConfig(**SMALL, head_dim=8, attention_out_bias=True, mlp_bias=True),
    "smollm3": t.SmolLM3Config(**SMALL, no_rope_layer_interval=2),
    "smollm3 window": t.SmolLM3Config(
        **SMALL, no_rope_layers=[1, 0, 1], use_sliding_window=True, sliding_window=6
    ),
    "hunyuan": t.HunYuanDenseV1Config(**SMALL, head_dim=8),
    "hunyuan alpha": t.HunYuanDenseV1Config(
        **SMALL,
        head_dim=8,
        rope_parameters={
            "rope_type": "dynamic",
            "rope_theta": 10000.0,
            "alpha": 1000.0,
            "factor": 1.0,
        },
    ),
    "cwm": t.CwmConfig(**SMALL, head_dim=8, sliding_window=7),
    "ernie": t.Ernie4_5Config(**SMALL, head_dim=16, use_bias=True),
    "helium": t.HeliumConfig(**SMALL, head_dim=8),
    "exaone4": t.Exaone4Config(**SMALL, head_dim=8, sliding_window=7, sliding_window_pattern=3),
    "exaone4 whole": t.Exaone4Config(
        **SMALL, sliding_window=None, layer_types=["full_attention"] * 3
    ),
    "olmo": t.OlmoConfig(**SMALL),
    "olmo2": t.Olmo2Config(**SMALL),
    "olmo3": t.Olmo3Config(**SMALL, sliding_window=9, layer_types=_WINDOWS, rope_parameters=_ROPES),
    "gemma": t.GemmaConfig(**SMALL, head_dim=16),
    "gemma2": t.Gemma2Config(
        **SMALL,
        head_dim=16,
        sliding_window=7,
        query_pre_attn_scalar=24,
        **{"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    ),
    "gemma3": t.Gemma3TextConfig(
        **SMALL, head_dim=16, sliding_window=7, layer_types=_WINDOWS, rope_parameters=_ROPES
    ),
    "gemma3n": t.Gemma3nTextConfig(
        **_SHARED
        | {
            "activation_sparsity_pattern": [0.5, 0.5, 0.0, 0.9, 0.0, 0.0],
            "laurel_rank": 4,
            "altup_num_inputs": 3,
            "vocab_size_per_layer_input": 50,
        }
    ),
    "gemma4": t.Gemma4TextConfig(
        **_SHARED, global_head_dim=16, use_double_wide_mlp=True, final_logit_softcapping=3.0
    ),
    "gemma4 experts": t.Gemma4TextConfig(
        **SMALL,
        head_dim=8,
        global_head_dim=16,
        num_global_key_value_heads=1,
        attention_k_eq_v=True,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
        sliding_window=9,
        hidden_size_per_layer_input=0,
        enable_moe_block=True,
        num_experts=6,
        top_k_experts=3,
        moe_intermediate_size=24,
    ),
    "vaultgemma": t.VaultGemmaConfig(**SMALL, head_dim=16, sliding_window=7),
    "granite": t.GraniteConfig(
        **SMALL,
        attention_bias=True,
        mlp_bias=True,
        embedding_multiplier=3.0,
        attention_multiplier=0.2,
        residual_multiplier=0.3,
        logits_scaling=4.0,
    ),
    "hyperclovax": t.HyperCLOVAXConfig(**SMALL, residual_multiplier=0.3, logits_scaling=0.5),
    "cohere": t.CohereConfig(**SMALL, logit_scale=0.3),
    "cohere heads": t.CohereConfig(**SMALL, use_qk_norm=True, attention_bias=True),
    "cohere2": t.Cohere2Config(**SMALL, sliding_window=7, layer_types=_WINDOWS),
    "glm": t.GlmConfig(**SMALL, head_dim=16),
    "glm4": t.Glm4Config(**SMALL, head_dim=16),
    "phi": t.PhiConfig(**SMALL),
    "phi3": t.Phi3Config(**SMALL, sliding_window=9),
    "phi3 longrope": t.Phi3Config(
        **SMALL | {"max_position_embeddings": 256, "hidden_size": 64},
        original_max_position_embeddings=64,
        partial_rotary_factor=0.75,
        rope_parameters=_longrope(6),
    ),
    "stablelm": t.StableLmConfig(**SMALL, use_qkv_bias=True),
    "stablelm parallel": t.StableLmConfig(**SMALL, qk_layernorm=True, use_parallel_residual=True),
    "starcoder2": t.Starcoder2Config(**SMALL, sliding_window=9),
    "gpt_neox": t.GPTNeoXConfig(**SMALL, rope_parameters={"rope_theta": 500.0}),
    "gpt_neox serial": t.GPTNeoXConfig(
        **SMALL, use_parallel_residual=False, partial_rotary_factor=0.5, hidden_act="gelu_fast"
    ),
    "gpt_neox_japanese": t.GPTNeoXJapaneseConfig(
        **_JAPANESE, intermediate_multiple_size=3, rotary_pct=0.5, rotary_emb_base=500
    ),
    "nemotron": t.NemotronConfig(**SMALL),
    "openai-gpt": t.OpenAIGPTConfig(**_GPT),
    "openai-gpt relu": t.OpenAIGPTConfig(**_GPT, afn="relu"),
    "gpt2": t.GPT2Config(**_GPT),
    "gpt_bigcode": t.GPTBigCodeConfig(**_GPT),
    "gpt_bigcode heads": t.GPTBigCodeConfig(**_GPT, multi_query=False, n_inner=48),
    "mixtral": t.MixtralConfig(**SMALL, num_local_experts=5, sliding_window=9),
    "qwen2_moe": t.Qwen2MoeConfig(
        **SMALL,
        num_experts=6,
        num_experts_per_tok=3,
        moe_intermediate_size=24,
        shared_expert_intermediate_size=40,
        mlp_only_layers=[1],
    ),
    "qwen3_moe": t.Qwen3MoeConfig(
        **SMALL,
        head_dim=8,
        num_experts=6,
        num_experts_per_tok=3,
        moe_intermediate_size=24,
        norm_topk_prob=True,
    ),
    "olmoe": t.OlmoeConfig(**SMALL, num_experts=6, num_experts_per_tok=3),
    "flex_olmo": t.FlexOlmoConfig(**SMALL, num_experts=6, num_experts_per_tok=3),
    "phimoe": t.PhimoeConfig(
        **SMALL, num_local_experts=5, attention_bias=True, lm_head_bias=True, sliding_window=9
    ),
    "glm4_moe": t.Glm4MoeConfig(
        **SMALL, head_dim=8, num_experts_per_tok=3, use_qk_norm=True, attention_bias=True, **_GROUPS
    ),
    "dots1": t.Dots1Config(**SMALL, head_dim=8, num_experts_per_tok=3, **_GROUPS),
    "ernie4_5_moe": t.Ernie4_5_MoeConfig(
        **SMALL, moe_num_experts=6, moe_k=3, moe_intermediate_size=24
    ),
    "gpt_oss": t.GptOssConfig(
        **SMALL, head_dim=8, num_local_experts=6, num_experts_per_tok=3, sliding_window=9
    ),
    "granitemoe": t.GraniteMoeConfig(
        **SMALL, num_local_experts=6, num_experts_per_tok=3, residual_multiplier=0.3
    ),
    "minimax_m2": t.MiniMaxM2Config(
        **SMALL, head_dim=8, num_local_experts=6, num_experts_per_tok=3, rotary_dim=4
    ),
    "hunyuan_v1_moe": t.HunYuanMoEV1Config(**SMALL, head_dim=8, num_experts=6, moe_topk=3),
    "deepseek_v2": t.DeepseekV2Config(
        **_LATENT, **_GROUPS, num_experts_per_tok=3, topk_method="group_limited_greedy"
    ),
    "deepseek_v2 lite": t.DeepseekV2Config(
        **_LATENT | {"q_lora_rank": None},
        **_GROUPS,
        num_experts_per_tok=3,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 32,
            "mscale": 0.7,
            "mscale_all_dim": 0.9,
        },
    ),
    "deepseek_v3": t.DeepseekV3Config(**_LATENT, **_GROUPS, num_experts_per_tok=3),
    "glm4_moe_lite": t.Glm4MoeLiteConfig(
        **_LATENT, **_GROUPS, num_experts_per_tok=3, mlp_layer_types=["sparse", "dense", "sparse"]
    ),
    "deepseek_v32": t.DeepseekV32Config(
        **_LATENT, **_GROUPS, num_experts_per_tok=3, index_topk=60, index_head_dim=16
    ),
    "deepseek_v3 halves": t.DeepseekV3Config(
        **_LATENT, **_GROUPS, num_experts_per_tok=3, rope_interleave=False
    ),
    "lfm2": t.Lfm2Config(
        **SMALL | {"num_hidden_layers": 4},
        layer_types=["conv", "full_attention", "conv", "conv"],
        block_multiple_of=8,
        rope_theta=500.0,
    ),
    "lfm2 biased": t.Lfm2Config(
        **SMALL,
        layer_types=["full_attention", "conv", "conv"],
        conv_bias=True,
        conv_L_cache=4,
        block_auto_adjust_ff_dim=False,
        tie_word_embeddings=False,
    ),
    "llama4": t.Llama4TextConfig(
        **SMALL | {"num_hidden_layers": 4},
        head_dim=8,
        intermediate_size_mlp=40,
        interleave_moe_layer_step=2,
        num_local_experts=5,
        no_rope_layers=[1, 1, 0, 1],
        attention_chunk_size=9,
        floor_scale=5,
        attn_scale=0.4,
    ),
    "llama4 plain": t.Llama4TextConfig(
        **SMALL,
        head_dim=8,
        intermediate_size_mlp=40,
        num_local_experts=5,
        num_experts_per_tok=2,
        use_qk_norm=False,
        attn_temperature_tuning=False,
    ),
    "ministral3": t.Ministral3Config(
        **SMALL,
        head_dim=8,
        rope_parameters=_ROPES["full_attention"]
        | {"llama_4_scaling_beta": 0.3, "original_max_position_embeddings": 16},
    ),
    "gptj": t.GPTJConfig(**_GPT, rotary_dim=4),
    "codegen": t.CodeGenConfig(**_GPT | {"n_head": 8}, rotary_dim=4),
    "falcon": t.FalconConfig(**_FALCON),
    "falcon heads": t.FalconConfig(**_FALCON, multi_query=False, parallel_attn=False, bias=True),
    "falcon groups": t.FalconConfig(**_FALCON, new_decoder_architecture=True, num_kv_heads=2),
    "falcon groups, one norm": t.FalconConfig(
        **_FALCON, new_decoder_architecture=True, num_kv_heads=2, num_ln_in_parallel_attn=1
    ),
    "bloom": t.BloomConfig(**_BLOOM, n_head=6),
    "mpt": t.MptConfig(**_MPT, n_heads=4),
    "mpt odd": t.MptConfig(**_MPT | {"d_model": 48}, n_heads=6),
    "mamba2": t.Mamba2Config(
        **_IDS,
        hidden_size=32,
        num_hidden_layers=3,
        num_heads=8,
        head_dim=8,
        state_size=12,
        n_groups=2,
        use_bias=True,
        chunk_size=16,
    ),
    "granite4": t.GraniteMoeHybridConfig(
        **SMALL,
        **_MAMBA,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        num_local_experts=6,
        num_experts_per_tok=3,
        shared_intermediate_size=40,
        residual_multiplier=0.3,
        embedding_multiplier=3.0,
        attention_multiplier=0.2,
        logits_scaling=4.0,
        mamba_proj_bias=True,
    ),
    "granite4 dense": t.GraniteMoeHybridConfig(
        **SMALL,
        **_MAMBA,
        layer_types=["full_attention", "linear_attention", "linear_attention"],
        num_local_experts=0,
        shared_intermediate_size=40,
        position_embedding_type="rope",
    ),
    "granite4 attention": t.GraniteMoeHybridConfig(
        **SMALL,
        **_MAMBA,
        layer_types=["full_attention"] * 3,
        num_local_experts=0,
        shared_intermediate_size=40,
    ),
    "falcon_h1": t.FalconH1Config(
        **SMALL,
        **_MAMBA,
        mamba_d_ssm=64,
        mamba_rms_norm=True,
        mamba_norm_before_gate=False,
        projectors_bias=True,
        lm_head_multiplier=0.5,
        embedding_multiplier=2.0,
        mlp_multipliers=[0.7, 0.6],
        key_multiplier=0.8,
        attention_in_multiplier=1.3,
        attention_out_multiplier=0.9,
        ssm_multipliers=[0.5, 0.6, 0.7, 0.8, 0.9],
        ssm_in_multiplier=1.2,
        ssm_out_multiplier=1.1,
    ),
    "falcon_h1 plain": t.FalconH1Config(**SMALL, **_MAMBA, mamba_d_ssm=64),
    "falcon_h1 norm": t.FalconH1Config(**SMALL, **_MAMBA, mamba_d_ssm=64, mamba_rms_norm=True),
    "nemotron_h": t.NemotronHConfig(
        **{k: v for k, v in SMALL.items() if k != "num_hidden_layers"},
        layers_block_type=["linear_attention", "mlp", "full_attention", "linear_attention", "moe"],
        head_dim=8,
        ssm_state_size=12,
        mamba_num_heads=8,
        mamba_head_dim=8,
        n_groups=2,
        chunk_size=16,
        n_routed_experts=6,
        num_experts_per_tok=3,
        moe_intermediate_size=24,
        moe_shared_expert_intermediate_size=40,
        n_group=3,
        topk_group=2,
        routed_scaling_factor=1.7,
    ),
    "qwen3_next": t.Qwen3NextConfig(
        **SMALL | {"num_hidden_layers": 4},
        **_DELTA,
        num_experts=6,
        num_experts_per_tok=3,
        moe_intermediate_size=24,
        shared_expert_intermediate_size=40,
        mlp_only_layers=[1],
    ),
    "qwen3_5": t.Qwen3_5TextConfig(**SMALL | {"num_hidden_layers": 4}, **_DELTA),
    "qwen3_5_moe": t.Qwen3_5MoeTextConfig(
        **{k: v for k, v in SMALL.items() if k != "intermediate_size"},
        **_DELTA,
        layer_types=["full_attention", "linear_attention", "linear_attention"],
        num_experts=6,
        num_experts_per_tok=3,
        moe_intermediate_size=24,
        shared_expert_intermediate_size=40,
    ),
    "olmo_hybrid": t.OlmoHybridConfig(
        **SMALL,
        **{k: v for k, v in _DELTA.items() if k != "head_dim"},
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        rope_parameters={"rope_theta": None},
        attention_bias=True,
    ),
    "olmo_hybrid rope": t.OlmoHybridConfig(
        **SMALL, linear_num_key_heads=2, linear_key_head_dim=6, linear_allow_neg_eigval=False
    ),
    "minimax": t.MiniMaxConfig(
        **SMALL,
        head_dim=8,
        num_local_experts=6,
        num_experts_per_tok=3,
        block_size=16,
        full_attn_alpha_factor=1.7,
        full_attn_beta_factor=0.8,
        linear_attn_alpha_factor=1.4,
        linear_attn_beta_factor=1.2,
        mlp_alpha_factor=2.0,
        mlp_beta_factor=0.7,
    ),
    "minimax plain": t.MiniMaxConfig(
        **SMALL | {"num_attention_heads": 6},
        head_dim=10,
        num_local_experts=5,
        layer_types=["linear_attention", "linear_attention", "full_attention"],
        sliding_window=9,
    ),
    "gpt_neo": t.GPTNeoConfig(
        **_IDS,
        hidden_size=32,
        num_layers=4,
        num_heads=4,
        max_position_embeddings=128,
        attention_types=[[["global", "local"], 2]],
        window_size=9,
    ),
    "xglm": t.XGLMConfig(
        **_IDS,
        d_model=32,
        ffn_dim=48,
        num_layers=3,
        attention_heads=4,
        max_position_embeddings=128,
    ),
    "biogpt": t.BioGptConfig(**SMALL),
    "bamba": t.BambaConfig(
        **SMALL | {"intermediate_size": 40},
        mamba_n_heads=8,
        mamba_d_head=8,
        mamba_n_groups=2,
        mamba_d_state=12,
        mamba_chunk_size=16,
        attn_layer_indices=[1],
        mamba_proj_bias=True,
        attention_bias=True,
    ),
    "mamba": t.MambaConfig(
        **_IDS, hidden_size=32, num_hidden_layers=3, state_size=6, time_step_rank=5, use_bias=True
    ),
    "falcon_mamba": t.FalconMambaConfig(
        **_IDS, hidden_size=32, num_hidden_layers=3, state_size=6, use_conv_bias=False
    ),
    "jamba": t.JambaConfig(
        **SMALL | {"num_hidden_layers": 4},
        num_experts=6,
        num_experts_per_tok=3,
        attn_layer_period=4,
        attn_layer_offset=2,
        mamba_d_state=6,
        mamba_proj_bias=True,
    ),
    "opt": t.OPTConfig(**SMALL, ffn_dim=48, word_embed_proj_dim=32),
}
