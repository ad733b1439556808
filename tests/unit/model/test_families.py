"""A family of one's own: docs/how-to/add-a-model-family.md, followed step by step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

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
