"""Every described family against transformers: torch, native, whole texts and pieces."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from family_models import FAMILY_CONFIGS
from native_models import random_tokens
from outrider import native
from outrider.contracts import Model
from outrider.errors import ModelError
from outrider.model import load_model
from outrider.model.driver import Driver
from outrider.model.families import FAMILIES, read_decoder_config
from outrider.model.families.shapes import count_parameters
from outrider.model.native_decoder import NativeDecoder
from outrider.model.native_description import cannot_run
from outrider.model.selfcheck import self_check
from outrider.model.torch_decoder import TorchDecoder
from outrider.model.weights import read_config
from tiny_models import CONFIGS, logits, reference, worst, write

TOKENS = random_tokens(48, 64)


# The largest difference of logits. Tiny models with the delta rule enlarge rounding errors:
# transformers' own passes in float32 and float64 differ by 2e-4 there.
TOLERANCE = 2e-4
# Parameters of transformers' models that ours do not read or count.
UNREAD = re.compile(r"correction_bias|self_attn\.indexer\.")
# Parts that the native step lacks.
IN_TORCH = ("", "mixer", "head_dims", "kv_layers")
TOLERANCE_OF = dict.fromkeys(("qwen3_next", "qwen3_5", "qwen3_5_moe"), 1e-3)


def check(model: Model, expected: torch.Tensor, most: float = TOLERANCE) -> None:
    """One pass, and the same text in pieces, the KV read back from shuffled blocks.

    The native step gives the same bits both ways.
    """
    driver = Driver(model, seed=1)
    whole = driver.forward({"a": TOKENS}).logits["a"].clone()
    assert worst(whole, expected) < most
    got = []
    for piece in (TOKENS[:19], TOKENS[19:20], TOKENS[20:25], TOKENS[25:]):
        got.append(driver.forward({"b": piece}).logits["b"])
        driver.keep("b", range(len(piece)))
    assert worst(torch.cat(got), expected) < most
    assert torch.equal(torch.cat(got), whole) or not isinstance(model, NativeDecoder)


@pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning")  # GPT-BigCode's
@pytest.mark.parametrize("name", FAMILY_CONFIGS)
def test_agrees_with_transformers(name: str, tmp_path: Path) -> None:
    folder = write(tmp_path, FAMILY_CONFIGS[name])
    theirs = reference(folder)
    expected = logits(theirs, TOKENS)
    model = TorchDecoder.load(folder)
    check(model, expected, TOLERANCE_OF.get(name, TOLERANCE))
    config = model.config
    parameters = {k: p for k, p in theirs.named_parameters() if not UNREAD.search(k)}
    assert model.spec.num_parameters == sum(p.numel() for p in parameters.values())
    assert model.spec.num_parameters == count_parameters(config)
    assert cannot_run(config) in IN_TORCH
    if native.available() and not cannot_run(config):
        native_model = load_model(folder, backend="native")
        check(native_model, expected, TOLERANCE_OF.get(name, TOLERANCE))
        self_check(native_model, plain=lambda tokens: logits(theirs, tokens))


# What transformers has no default for, or none that fits the others.
NO_DEFAULT: dict[str, dict[str, Any]] = {
    "glm4_moe": {"num_attention_heads": 64},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2},
}


# Families whose code is in their folders: transformers has no class to compare with.
FOREIGN = {"mimo"}


@pytest.mark.parametrize("model_type", [name for name in FAMILIES if name not in FOREIGN])
def test_defaults_are_those_of_transformers(model_type: str) -> None:
    """A config.json that names nothing but the type means what transformers' class means by it."""
    import transformers

    kinds: dict[str, Any] = transformers.models.auto.configuration_auto.CONFIG_MAPPING
    full = kinds[model_type](**NO_DEFAULT.get(model_type, {})).to_dict()
    sizes = {"vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "ffn_dim"}
    sizes |= {
        "num_attention_heads",
        "d_model",
        "n_embd",
        "n_head",
        "n_heads",
        "n_layer",
        "n_layers",
    }
    short = {key: full[key] for key in sizes if key in full} | {"model_type": model_type}
    short |= NO_DEFAULT.get(model_type, {})
    short["dtype"] = full.get("dtype")
    assert read_decoder_config(short) == read_decoder_config(full)


def test_every_family_has_a_tiny_model() -> None:
    tried = {config.model_type for config in [*FAMILY_CONFIGS.values(), *CONFIGS.values()]}
    assert set(FAMILIES) - FOREIGN == tried


def test_what_a_description_lacks_is_refused(tmp_path: Path) -> None:
    config = read_config(write(tmp_path, FAMILY_CONFIGS["olmo"]))
    with pytest.raises(ModelError, match="clip_qkv"):
        read_decoder_config(config | {"clip_qkv": 8.0})
    config["hidden_act"] = "laplace"
    with pytest.raises(ModelError, match="laplace"):
        read_decoder_config(config)
