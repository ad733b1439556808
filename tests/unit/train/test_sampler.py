"""Bulk generation agrees with transformers where both are deterministic."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from outrider.train.sampler import generate_rows, prompts, temperatures
from tiny_training import VOCABULARY, tiny_target


@pytest.fixture(scope="module")
def target() -> Any:
    return tiny_target().eval()


@torch.no_grad()
def continued(model: Any, given: torch.Tensor, length: int) -> torch.Tensor:
    for _ in range(length - given.shape[1]):
        logits = model(input_ids=given, use_cache=False).logits[:, -1]
        given = torch.cat([given, logits.argmax(-1, keepdim=True)], dim=1)
    return given


def test_greedy_rows_are_the_models_own(target: Any) -> None:
    torch.manual_seed(1)
    given = torch.randint(1, VOCABULARY, (3, 5))
    rows = generate_rows(target, given, 24, torch.zeros(3), seed=0)
    assert torch.equal(rows, continued(target, given, 24))


def test_the_seed_decides(target: Any) -> None:
    given = torch.randint(1, VOCABULARY, (4, 5), generator=torch.Generator().manual_seed(2))
    warm = torch.ones(4)
    first = generate_rows(target, given, 24, warm, seed=0)
    assert torch.equal(first, generate_rows(target, given, 24, warm, seed=0))
    assert not torch.equal(first, generate_rows(target, given, 24, warm, seed=1))
    assert torch.equal(first[:, :5], given)


def test_other_architectures_go_through_transformers() -> None:
    config = GPT2Config(vocab_size=64, n_positions=64, n_embd=32, n_layer=1, n_head=2)
    config.eos_token_id = config.bos_token_id = 0
    torch.manual_seed(0)
    model = GPT2LMHeadModel(config).eval()
    given = torch.randint(1, 64, (2, 4))
    rows = generate_rows(model, given, 12, torch.tensor([0.0, 1.0]), seed=0)
    assert rows.shape == (2, 12)
    assert torch.equal(rows[:, :4], given)


def test_prompts_and_temperatures() -> None:
    pieces = prompts(torch.arange(100), 5, 8, seed=0)
    assert all(torch.equal(piece, torch.arange(8) + piece[0]) for piece in pieces)
    warm = temperatures(10, {1.0: 0.6, 0.7: 0.3, 0.0: 0.1})
    assert sorted(warm.tolist()) == pytest.approx([0.0] + [0.7] * 3 + [1.0] * 6)
