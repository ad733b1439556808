"""A family of one's own: docs/how-to/add-a-model-family.md, followed step by step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from family_models import FAMILY_CONFIGS
from outrider.errors import ModelError
from outrider.model import load_model
from outrider.model.driver import Driver
from outrider.model.families import (
    FAMILIES,
    DecoderConfig,
    Reader,
    family,
    read_decoder_config,
)
from outrider.model.families.description import NO_ROPE
from outrider.model.native_decoder import NativeDecoder, available
from outrider.model.selfcheck import self_check
from outrider.model.torch_decoder import TorchDecoder
from outrider.model.transformers_model import TransformersModel
from outrider.model.weights import read_config
from tiny_models import SMALL, logits, reference, worst, write

TOKENS = [int(token) for token in torch.arange(40) * 7 % 64]


def register() -> None:
    @family(
        "jais2",
        "Jais2ForCausalLM",
        max_position_embeddings=8192,
        hidden_act="relu2",
        attention_bias=True,
        mlp_bias=True,
        layer_norm_eps=1e-5,
    )
    def jais2(read: Reader) -> DecoderConfig:
        return read.llama(
            layer_norm=True,
            norm_bias=True,
            norm_eps=read.real("layer_norm_eps"),
            gated=False,
        )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(tmp_path, transformers.Jais2Config(**SMALL))


def test_a_family_is_one_function(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = logits(reference(folder), TOKENS)
    with pytest.raises(ModelError, match="jais2"):
        load_model(folder, backend="torch")
    assert isinstance(load_model(folder), TransformersModel)

    monkeypatch.setitem(FAMILIES, "jais2", FAMILIES["llama"])  # removed after the test
    register()
    config = read_decoder_config(read_config(folder))
    assert config.deviations == ("layer_norm", "norm_bias", "activation", "gated")
    for kind in (TorchDecoder, *([NativeDecoder] if available(config, "cpu") else [])):
        model = load_model(folder, backend="native" if kind is NativeDecoder else "torch")
        assert isinstance(model, kind)
        assert worst(Driver(model).forward({"a": TOKENS}).logits["a"], expected) < 1e-4
        self_check(model, plain=lambda tokens: logits(reference(folder), tokens))


def test_defaults_say_what_an_absent_key_means(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(FAMILIES, "jais2", FAMILIES["llama"])
    register()
    config = {key: value for key, value in read_config(folder).items() if key != "attention_bias"}
    assert read_decoder_config(config).qkv_bias
    assert not read_decoder_config(config | {"attention_bias": False}).qkv_bias


def test_olmo_hybrid_as_published(tmp_path: Path) -> None:
    """Its convolutions are tensors of their own sizes; transformers writes three equal parts."""
    config = FAMILY_CONFIGS["olmo_hybrid"]
    folder = write(tmp_path, config)
    expected = Driver(TorchDecoder.load(folder), seed=1).forward({"a": TOKENS}).logits["a"].clone()
    tensors = load_file(folder / "model.safetensors")
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    for i in (0, 2):
        names = [f"model.layers.{i}.linear_attn.{part}_conv1d.weight" for part in "qkv"]
        whole = torch.cat([tensors[name] for name in names])
        sizes = [keys, keys, len(whole) - 2 * keys]
        assert [len(tensors[name]) for name in names] != sizes
        tensors |= dict(zip(names, map(torch.Tensor.clone, torch.split(whole, sizes)), strict=True))
    between = "model.layers.1.feedforward_layer_norm.weight"
    tensors["model.layers.1.post_attention_layernorm.weight"] = tensors.pop(between)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    got = Driver(TorchDecoder.load(folder), seed=1).forward({"a": TOKENS}).logits["a"]
    assert torch.equal(got, expected)


@pytest.mark.parametrize(
    ("name", "changed", "reason"),
    [
        ("olmo_hybrid", {"hidden_act": "gelu"}, "of the convolution"),
        ("olmo_hybrid", {"layer_types": ["sliding_attention"] * 3}, "other layers"),
        ("minimax", {"hidden_act": "gelu"}, "lightning attention"),
        ("minimax", {"layer_types": ["full_attention"] * 2}, "other layers"),
        ("minimax", {"mlp_alpha_factor": 0}, "not positive"),
        ("minimax", {"rotary_dim": 4}, "part of a head"),
        ("openai-gpt", {"afn": "tanh"}, "afn"),
    ],
)
def test_refuses_what_it_does_not_describe(
    name: str, changed: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    config = read_config(write(tmp_path, FAMILY_CONFIGS[name]))
    with pytest.raises(ModelError, match=reason):
        read_decoder_config(config | changed)


def test_a_rope_without_theta_does_not_rotate(tmp_path: Path) -> None:
    """As published: null, which old configs write beside the rope's parameters."""
    config = read_config(write(tmp_path, FAMILY_CONFIGS["olmo_hybrid"]))
    expected = read_decoder_config(config)
    assert set(expected.layer_ropes) == {NO_ROPE}
    del config["rope_parameters"]
    assert read_decoder_config(config | {"rope_theta": None}) == expected
    assert read_decoder_config(config).layer_ropes == ()
