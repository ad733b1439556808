"""Heads: KV kept by the caller gives what a whole pass gives; folders round-trip bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.errors import ModelError
from outrider.model.head_layers import join
from outrider.model.heads import (
    DFlashConfig,
    DFlashHead,
    Eagle3Config,
    Eagle3Head,
    Head,
    MedusaConfig,
    MedusaHeads,
    load_head,
)

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "vocab_size": 50,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
}


def eagle3() -> Eagle3Head:
    torch.manual_seed(0)
    head = Eagle3Head(Eagle3Config(draft_vocab_size=20, taps=(1, 2, 3), **SIZES))
    head.set_target_ids(torch.arange(0, 40, 2))
    return head


def dflash() -> DFlashHead:
    torch.manual_seed(0)
    return DFlashHead(
        DFlashConfig(
            taps=(1, 3),
            mask_token_id=49,
            num_hidden_layers=2,
            block_size=4,
            markov_rank=4,
            confidence=True,
            **SIZES,
        )
    )


def medusa() -> MedusaHeads:
    torch.manual_seed(0)
    heads = MedusaHeads(MedusaConfig(hidden_size=32, vocab_size=50, num_heads=3))
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.normal_()
    return heads


def test_eagle3_step_by_step_is_one_causal_pass() -> None:
    head = eagle3().eval()
    embeds, hidden = torch.randn(1, 6, 32), torch.randn(1, 6, 32)
    positions = torch.arange(6)[None]
    causal = torch.ones(6, 6, dtype=torch.bool).tril()[None, None]
    with torch.no_grad():
        whole, logits, _ = head(embeds, hidden, positions, mask=causal)
        past = None
        for i in range(6):
            part = slice(i, i + 1)
            output, guess, own = head(embeds[:, part], hidden[:, part], positions[:, part], past)
            past = own if past is None else join([past, own])
            torch.testing.assert_close(output, whole[:, part])
            torch.testing.assert_close(guess, logits[:, part])


def test_dflash_context_can_grow_piece_by_piece() -> None:
    head = dflash().eval()
    features, positions = torch.randn(1, 7, 32), torch.arange(7)[None]
    block, places = torch.randn(1, 4, 32), torch.arange(7, 11)[None]
    with torch.no_grad():
        whole = head.context(features, positions)
        early = head.context(features[:, :5], positions[:, :5])
        late = head.context(features[:, 5:], positions[:, 5:])
        grown = [join([a, b]) for a, b in zip(early, late, strict=True)]
        torch.testing.assert_close(head(block, places, whole), head(block, places, grown))
        assert head.markov_bias(torch.tensor([[3, 4]])).shape == (1, 2, 50)
        trust = head.confidence(torch.randn(1, 4, 32))
    assert trust.shape == (1, 4)
    assert bool(((trust > 0) & (trust < 1)).all())


def test_fresh_medusa_heads_repeat_the_target() -> None:
    heads = MedusaHeads(MedusaConfig(hidden_size=32, vocab_size=50, num_heads=3))
    hidden = torch.randn(2, 5, 32)
    for guess in heads(hidden):
        assert torch.equal(guess, hidden)


def test_eagle3_vocabulary_maps_by_offsets() -> None:
    head = eagle3()
    assert head.target_ids.tolist() == list(range(0, 40, 2))
    assert isinstance(head.d2t, torch.Tensor)
    assert head.d2t.tolist() == list(range(20))


@pytest.mark.parametrize("make", [medusa, eagle3, dflash])
def test_a_saved_head_loads_bit_for_bit(make: type[Head], tmp_path: Path) -> None:
    head = make()
    head.save(tmp_path / "head", dtype=torch.float32)
    again = load_head(tmp_path / "head")
    assert again.config_json() == head.config_json()
    assert again.taps == head.taps
    for name, value in head.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name
    again.save(tmp_path / "twice", dtype=torch.float32)
    for file in ("config.json", "model.safetensors"):
        assert (tmp_path / "head" / file).read_bytes() == (tmp_path / "twice" / file).read_bytes()


def test_folders_that_hold_no_head_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no drafting head"):
        load_head(tmp_path)
    dflash().save(tmp_path / "head")
    config = json.loads((tmp_path / "head" / "config.json").read_text())
    config["num_hidden_layers"] = 3
    (tmp_path / "head" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="does not match"):
        load_head(tmp_path / "head")
