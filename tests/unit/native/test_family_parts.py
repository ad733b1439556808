"""The parts beyond Llama's on every instruction set and weight type, and at odd sizes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from family_models import FAMILY_CONFIGS
from native_models import ISAS, ODD, ZOO, families, needs_native, random_tokens
from outrider.model.driver import Driver
from outrider.model.native_decoder import NativeDecoder
from outrider.model.torch_decoder import TorchDecoder
from tiny_models import logits, reference, worst, write

pytestmark = needs_native
TOKENS = random_tokens(48, 64)
# Every activation, kind of norm, span of head norms and cap.
SAMPLE: tuple[str, ...] = (
    "arcee",
    "cohere heads",
    "gemma2",
    "gpt2",
    "gpt_neox",
    "olmo3",
    "opt",
    "glm4",
)
SAMPLE += ("llama4", "bloom", "deepseek_v2 lite", "qwen2_moe", "gpt_oss", "flex_olmo", "dots1")
SAMPLE += ("lfm2", "granite4", "falcon_h1", "nemotron_h", "qwen3_next", "olmo_hybrid", "minimax")
SAMPLE += ("openai-gpt",)
if ZOO:
    SAMPLE = tuple(families(native_step=True))
# Latent attention rounds the inputs of two more products in a row; the delta rule enlarges errors,
# and so do the weights of two tiny models, in all three types alike.
ROUNDS_MORE = {"deepseek_v2 lite": 1.5, "minimax plain": 1.5, "granite4 attention": 2.0}
ROUNDS_MORE |= dict.fromkeys(("qwen3_next", "qwen3_5", "qwen3_5_moe"), 2.0)
_ODD = {k: v for k, v in ODD.items() if k != "head_dim"}


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")  # GPT-BigCode's
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", SAMPLE)
def test_every_instruction_set(
    name: str, isa: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTRIDER_ISA", isa)
    folder = write(tmp_path, FAMILY_CONFIGS[name])
    driver = Driver(NativeDecoder.load(folder), block_size=5, seed=3)
    got = driver.forward({"a": TOKENS}).logits["a"]
    # See `test_family_models`: the delta rule enlarges rounding errors.
    most = 1e-3 if name == "qwen3_next" else 2e-4
    assert worst(got, logits(reference(folder), TOKENS)) < most


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")  # GPT-BigCode's
@pytest.mark.parametrize("name", SAMPLE)
@pytest.mark.parametrize(("dtype", "most"), [("bfloat16", 0.03), ("int8", 0.1), ("int4", 0.8)])
def test_every_weight_type(name: str, dtype: str, most: float, tmp_path: Path) -> None:
    """Rounded weights stay near the true logits, and rows depend on their path only."""
    folder = write(tmp_path, FAMILY_CONFIGS[name])
    expected = logits(reference(folder), TOKENS)
    driver = Driver(NativeDecoder.load(folder, dtype=dtype), block_size=16, seed=1)
    whole = driver.forward({"a": TOKENS}).logits["a"].clone()
    error_R = (whole - expected).pow(2).mean(1).sqrt() / expected.std()
    # The median row: rounding may turn a near-tie between experts, which changes one row much.
    assert 0 < error_R.median() < most * ROUNDS_MORE.get(name, 1)
    for i, token in enumerate(TOKENS[:20]):
        assert torch.equal(driver.forward({"b": [token]}).logits["b"][0], whole[i])
        driver.keep("b", [0])


@pytest.mark.parametrize(
    "config",
    [
        transformers.Gemma2Config(
            **ODD, sliding_window=9, query_pre_attn_scalar=20, attn_logit_softcapping=3.0
        ),
        transformers.Olmo2Config(**_ODD | {"hidden_size": 84}),
        transformers.CohereConfig(**_ODD | {"hidden_size": 84}, use_qk_norm=True),
        transformers.Starcoder2Config(**_ODD | {"hidden_size": 84}, hidden_act="gelu"),
        transformers.GraniteConfig(**_ODD | {"hidden_size": 84}, residual_multiplier=0.2),
    ],
    ids=lambda config: config.model_type,
)
def test_odd_sizes(config: transformers.PretrainedConfig, tmp_path: Path) -> None:
    folder = write(tmp_path, config)
    tokens = random_tokens(40, ODD["vocab_size"])
    got = Driver(NativeDecoder.load(folder), block_size=3).forward({"a": tokens}).logits["a"]
    assert worst(got, logits(reference(folder), tokens)) < 2e-4


@pytest.mark.parametrize("name", ["gemma2", "gpt2", "olmo2", "opt", "openai-gpt", "minimax"])
def test_taps_exits_and_nan(name: str, tmp_path: Path) -> None:
    folder = write(tmp_path, FAMILY_CONFIGS[name])
    ours, theirs = (Driver(kind.load(folder)) for kind in (NativeDecoder, TorchDecoder))
    a = ours.forward({"a": TOKENS[:9]}, taps=(0, 1, 2), exit_layer=2)
    b = theirs.forward({"a": TOKENS[:9]}, taps=(0, 1, 2), exit_layer=2)
    assert worst(a.logits["a"], b.logits["a"]) < 1e-4
    for layer in (0, 1, 2):
        assert worst(a.taps[layer]["a"], b.taps[layer]["a"]) < 1e-4

    tensors = load_file(folder / "model.safetensors")
    names = ("embed_tokens.weight", "wte.weight", "tokens_embed.weight")
    embedding = next(k for k in tensors if k.endswith(names))
    tensors[embedding] = tensors[embedding].clone()
    tensors[embedding][3] = torch.nan  # a cap or an activation must not hide it
    if "lm_head.weight" not in tensors:
        config = NativeDecoder.load(folder).config
        assert config.tied
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    rows = Driver(NativeDecoder.load(folder)).forward({"a": [1, 3]}).logits["a"]
    assert torch.isnan(rows[1]).all()
