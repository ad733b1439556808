"""Text models inside multimodal classes: their text part runs on our decoder."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers as t

from native_models import random_tokens
from outrider import native
from outrider.errors import ModelError
from outrider.model import load_model
from outrider.model.driver import Driver
from outrider.model.families import read_decoder_config
from outrider.model.native_description import cannot_run
from outrider.model.weights import read_config
from tiny_models import SMALL, worst

TOKENS = random_tokens(40, 64)
VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
}
MODELS = {
    "gemma3": (
        t.Gemma3ForConditionalGeneration,
        t.Gemma3Config(
            text_config={**SMALL, "head_dim": 16, "sliding_window": 7},
            vision_config={"model_type": "siglip_vision_model", **VISION},
            mm_tokens_per_image=4,
        ),
    ),
    "gemma4": (
        t.Gemma4ForConditionalGeneration,
        t.Gemma4Config(
            text_config={
                **SMALL,
                "pad_token_id": 0,
                "head_dim": 8,
                "global_head_dim": 16,
                "sliding_window": 7,
                "hidden_size_per_layer_input": 8,
                "vocab_size_per_layer_input": 64,
                "num_kv_shared_layers": 1,
                "layer_types": ["sliding_attention", "full_attention", "full_attention"],
            },
            vision_config={
                "hidden_size": 16,
                "intermediate_size": 16,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
                "head_dim": 8,
                "position_embedding_size": 16,
            },
        ),
    ),
    "llama4": (
        t.Llama4ForConditionalGeneration,
        t.Llama4Config(
            text_config={
                **SMALL,
                "head_dim": 8,
                "intermediate_size_mlp": 40,
                "num_local_experts": 3,
                "attention_chunk_size": 9,
            },
            vision_config={
                **VISION,
                "model_type": "llama4_vision_model",
                "intermediate_size": 64,
                "projector_input_dim": 16,
                "projector_output_dim": 16,
                "vision_output_dim": 16,
            },
        ),
    ),
    "ministral3": (
        t.Mistral3ForConditionalGeneration,
        t.Mistral3Config(
            text_config={"model_type": "ministral3", **SMALL, "head_dim": 8},
            vision_config={"model_type": "pixtral", **VISION},
        ),
    ),
    "mistral3": (
        t.Mistral3ForConditionalGeneration,
        t.Mistral3Config(
            text_config={"model_type": "mistral", **SMALL, "head_dim": 8},
            vision_config={"model_type": "pixtral", **VISION},
        ),
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_agrees_with_transformers(name: str, tmp_path: Path) -> None:
    kind, config = MODELS[name]
    torch.manual_seed(0)
    theirs = kind(config).eval()
    theirs.save_pretrained(tmp_path)
    with torch.no_grad():
        expected = theirs(input_ids=torch.tensor([TOKENS])).logits[0].float()
    runs = native.available() and not cannot_run(read_decoder_config(read_config(tmp_path)))
    for backend in ("torch", *(["native"] if runs else [])):
        model = load_model(tmp_path, backend=backend)  # type: ignore[arg-type]
        assert worst(Driver(model).forward({"a": TOKENS}).logits["a"], expected) < 1e-4


def test_other_classes_are_refused_by_name(tmp_path: Path) -> None:
    kind, config = MODELS["mistral3"]
    kind(config).save_pretrained(tmp_path)
    raw = read_config(tmp_path) | {"architectures": ["LlavaForConditionalGeneration"]}
    with pytest.raises(ModelError, match="LlavaForConditionalGeneration"):
        read_decoder_config(raw)
