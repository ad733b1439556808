"""A family of one's own: docs/how-to/add-a-model-family.md, followed step by step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from outrider import native
from outrider.errors import ModelError
from outrider.model import load_model
from outrider.model.driver import Driver
from outrider.model.families import FAMILIES, Family, read_decoder_config
from outrider.model.native_decoder import NativeDecoder
from outrider.model.selfcheck import self_check
from outrider.model.torch_decoder import TorchDecoder
from outrider.model.transformers_model import TransformersModel
from outrider.model.weights import read_config
from tiny_models import SMALL, logits, reference, worst, write

TOKENS = [int(token) for token in torch.arange(40) * 7 % 64]
SEED_OSS = Family(
    "SeedOssForCausalLM",
    qkv_bias="attention_bias",
    o_bias="attention_out_bias",
    mlp_bias="mlp_bias",
    defaults={"max_position_embeddings": 524288, "head_dim": 128, "attention_bias": True},
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(tmp_path, transformers.SeedOssConfig(**SMALL, head_dim=8))


def test_a_family_is_one_entry_of_the_table(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = logits(reference(folder), TOKENS)
    with pytest.raises(ModelError, match="seed_oss"):
        load_model(folder, backend="torch")
    assert isinstance(load_model(folder), TransformersModel)

    monkeypatch.setitem(FAMILIES, "seed_oss", SEED_OSS)
    config = read_decoder_config(read_config(folder))
    assert (config.qkv_bias, config.o_bias, config.mlp_bias) == (True, False, False)
    for kind in (TorchDecoder, *([NativeDecoder] if native.available() else [])):
        model = load_model(folder, backend="native" if kind is NativeDecoder else "torch")
        assert isinstance(model, kind)
        assert worst(Driver(model).forward({"a": TOKENS}).logits["a"], expected) < 1e-4
        self_check(model, plain=lambda tokens: logits(reference(folder), tokens))


def test_defaults_say_what_an_absent_key_means(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(FAMILIES, "seed_oss", SEED_OSS)
    config = {key: value for key, value in read_config(folder).items() if key != "attention_bias"}
    assert read_decoder_config(config).qkv_bias
    assert not read_decoder_config(config | {"attention_bias": False}).qkv_bias
