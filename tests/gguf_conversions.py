"""Tiny models of many architectures, and how llama.cpp's own converter made files of them.

    python tests/gguf_conversions.py LLAMA_CPP

writes `gguf_conversions.zip`; LLAMA_CPP is a checkout of llama.cpp. Weights are few different
numbers, drawn by name, so that the files pack well and the test can draw them again. Tokenizers are
left out.
"""

from __future__ import annotations

import json
import sys
import tempfile
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers as t

ARCHIVE = Path(__file__).with_name("gguf_conversions.zip")
_SMALL: dict[str, Any] = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": None,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
_FOUR = _SMALL | {"num_hidden_layers": 4}
_GPT: dict[str, Any] = {
    "vocab_size": 48,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 128,
    "n_ctx": 128,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
_GROUPS: dict[str, Any] = {
    "n_routed_experts": 6,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.7,
}
_EXPERTS: dict[str, Any] = {
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
_LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.5, 2.0, 2.5],
    "long_factor": [2.0, 3.0, 4.0, 5.0],
    "original_max_position_embeddings": 64,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}

CONFIGS: dict[str, t.PretrainedConfig] = {
    "llama": t.LlamaConfig(**_SMALL, rope_parameters=_LLAMA3),
    "llama biased": t.LlamaConfig(**_SMALL, attention_bias=True, tie_word_embeddings=True),
    "mistral": t.MistralConfig(**_SMALL, head_dim=16, sliding_window=None),
    "mixtral": t.MixtralConfig(**_SMALL, num_local_experts=5, sliding_window=None),
    "qwen2": t.Qwen2Config(**_SMALL),
    "qwen3": t.Qwen3Config(**_SMALL, head_dim=16, rope_parameters=_YARN),
    "qwen2_moe": t.Qwen2MoeConfig(**_SMALL, **_EXPERTS, shared_expert_intermediate_size=64),
    "qwen3_moe": t.Qwen3MoeConfig(**_SMALL, **_EXPERTS, head_dim=16, norm_topk_prob=True),
    "gemma": t.GemmaConfig(**_SMALL, head_dim=16),
    "gemma2": t.Gemma2Config(**_SMALL, head_dim=16, query_pre_attn_scalar=16, sliding_window=7),
    "gemma3": t.Gemma3TextConfig(
        **_SMALL | {"num_hidden_layers": 6}, head_dim=16, query_pre_attn_scalar=16, sliding_window=7
    ),
    "phi": t.PhiConfig(**_SMALL | {"num_key_value_heads": 4, "intermediate_size": 128}),
    "phi3": t.Phi3Config(**_SMALL, sliding_window=9),
    "phi3 longrope": t.Phi3Config(
        **_SMALL, original_max_position_embeddings=64, rope_parameters=_LONG, sliding_window=None
    ),
    "phimoe": t.PhimoeConfig(
        **_SMALL,
        num_local_experts=5,
        attention_bias=True,
        lm_head_bias=True,
        sliding_window=None,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000.0,
            "original_max_position_embeddings": 128,
        },
    ),
    "olmo": t.OlmoConfig(**_SMALL),
    "olmo2": t.Olmo2Config(**_SMALL),
    "olmo3": t.Olmo3Config(**_FOUR, sliding_window=9),
    "olmoe": t.OlmoeConfig(**_SMALL, num_experts=6, num_experts_per_tok=3),
    "granite": t.GraniteConfig(
        **_SMALL,
        embedding_multiplier=3.0,
        attention_multiplier=0.2,
        residual_multiplier=0.3,
        logits_scaling=4.0,
    ),
    "granitemoe": t.GraniteMoeConfig(
        **_SMALL, num_local_experts=6, num_experts_per_tok=3, residual_multiplier=0.3
    ),
    "cohere": t.CohereConfig(**_SMALL, logit_scale=0.3, use_qk_norm=True),
    "cohere2": t.Cohere2Config(**_FOUR, logit_scale=0.3, sliding_window=7, rotary_pct=1.0),
    "glm": t.GlmConfig(**_SMALL, head_dim=8, rms_norm_eps=1e-5),
    "glm4": t.Glm4Config(**_SMALL, head_dim=8),
    "glm4_moe": t.Glm4MoeConfig(
        **_SMALL, head_dim=16, use_qk_norm=True, attention_bias=True, **_GROUPS
    ),
    "dots1": t.Dots1Config(**_SMALL, head_dim=16, **_GROUPS),
    "stablelm": t.StableLmConfig(**_SMALL, use_qkv_bias=True),
    "stablelm parallel": t.StableLmConfig(**_SMALL, use_parallel_residual=True),
    "starcoder2": t.Starcoder2Config(**_SMALL, sliding_window=None),
    "gpt_bigcode": t.GPTBigCodeConfig(**_GPT),
    "gpt2": t.GPT2Config(**_GPT),
    "gpt_neox": t.GPTNeoXConfig(**_SMALL),
    "nemotron": t.NemotronConfig(**_SMALL),
    "arcee": t.ArceeConfig(**_SMALL),
    "smollm3": t.SmolLM3Config(**_FOUR),
    "exaone4": t.Exaone4Config(**_FOUR, sliding_window=7, sliding_window_pattern=4),
    "hunyuan": t.HunYuanDenseV1Config(**_SMALL, head_dim=16),
    "ernie4_5": t.Ernie4_5Config(**_SMALL, head_dim=16),
    "ernie4_5_moe": t.Ernie4_5_MoeConfig(
        **_SMALL, moe_num_experts=6, moe_k=3, moe_intermediate_size=32
    ),
    "seed_oss": t.SeedOssConfig(**_SMALL, head_dim=16),
    "gpt_oss": t.GptOssConfig(
        **_SMALL, head_dim=16, num_local_experts=6, num_experts_per_tok=3, sliding_window=9
    ),
    "minimax_m2": t.MiniMaxM2Config(
        **_SMALL, head_dim=16, num_local_experts=6, num_experts_per_tok=3, rotary_dim=8
    ),
}


# What the converter reads of older config.json files.
OLD_KEYS: dict[str, dict[str, Any]] = {
    "gpt_neox": {"rotary_pct": 0.25},
    "phimoe": {"architectures": ["PhiMoEForCausalLM"]},
}


def build(name: str) -> torch.nn.Module:
    """The model in transformers, its weights drawn by their names."""
    model: torch.nn.Module = t.AutoModelForCausalLM.from_config(CONFIGS[name], dtype=torch.float32)
    buffers = {k: v for k, v in model.named_buffers() if k.endswith("correction_bias")}
    with torch.no_grad():
        for key, value in [*model.named_parameters(), *buffers.items()]:
            rng = np.random.RandomState(zlib.crc32(key.encode()))
            drawn = torch.from_numpy(rng.randint(-3, 4, tuple(value.shape)) / 8.0)
            is_norm = value.dim() == 1 and key.endswith("weight")
            value.copy_(drawn / 8 + 1 if is_norm else drawn / 2)
    return model.eval()


def main(llama_cpp: Path) -> None:
    sys.path[:0] = [str(llama_cpp / "gguf-py"), str(llama_cpp)]
    import conversion  # type: ignore[import-not-found]
    import gguf

    with (
        tempfile.TemporaryDirectory() as scratch,
        zipfile.ZipFile(ARCHIVE, "w", zipfile.ZIP_LZMA) as archive,
    ):
        for name in CONFIGS:
            folder = Path(scratch) / name.replace(" ", "-")
            build(name).save_pretrained(folder)  # type: ignore[operator]
            config = conversion.ModelBase.load_hparams(folder, False) | OLD_KEYS.get(name, {})
            tokens = {str(id): id for id in range(48)}  # of Gemma 3, to count them
            tokenizer = {"model": {"vocab": tokens}, "added_tokens": []}
            (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
            kind = conversion.get_model_class(config["architectures"][0])
            for base in kind.__mro__:
                if "set_vocab" in base.__dict__:
                    base.set_vocab = lambda self: None
            path = folder.with_suffix(".gguf")
            made = kind(folder, gguf.LlamaFileType.ALL_F32, path, eager=True, hparams=config)
            made.write()
            archive.write(path, f"{name}.gguf")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
