"""A tiny target, tokenizer and text, so that training takes seconds on a CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from outrider.train.config import OptimConfig, TargetConfig
from outrider.train.data import Windows
from outrider.train.models import llama, save_model
from outrider.train.recipes.target import TargetRecipe
from outrider.train.trainer import TrainConfig, train

VOCABULARY = 300
TEXT = "\n".join(
    f"def f{i % 7}(x):\n    return x + {i % 5}\n\n\nclass C{i % 3}:\n    y = f{i % 7}(2)\n"
    for i in range(160)
)


def tiny_tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")


def tiny_target(seed: int = 0) -> Any:
    return llama(
        hidden_size=64,
        num_layers=4,
        num_heads=1,
        num_kv_heads=1,
        intermediate_size=96,
        vocab_size=VOCABULARY,
        max_positions=256,
        seed=seed,
    )


def quick(num_steps: int, **more: Any) -> TrainConfig:
    optim = OptimConfig(learning_rate=5e-3, matrix_learning_rate=0.02, warmup_steps=3)
    return TrainConfig(
        num_steps=num_steps, rows_per_step=4, log_every=1, bf16=False, optim=optim, **more
    )


def tokens_of(text: str = TEXT) -> torch.Tensor:
    return torch.tensor(tiny_tokenizer()(text)["input_ids"], dtype=torch.int32)


def write_trained_target(folder: Path, num_steps: int = 60) -> Path:
    """A target that has learnt TEXT roughly, with its tokenizer."""
    target = tiny_target()
    recipe = TargetRecipe(target, TargetConfig())
    train(recipe, Windows(tokens_of(), 64), quick(num_steps))
    save_model(target, folder, tiny_tokenizer())
    return folder
