"""The kinds of trainable drafters, by name: options in, recipe out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from outrider.errors import ConfigError, ModelError, UnknownName, VocabularyMismatch
from outrider.model.heads import DFlashHead, Eagle3Head, Head, MedusaHeads, load_head
from outrider.train.config import (
    DFlashRecipeConfig,
    DraftConfig,
    DraftShape,
    Eagle3RecipeConfig,
    MedusaRecipeConfig,
    TargetConfig,
)
from outrider.train.models import llama, load_model
from outrider.train.recipes.dflash import DFlashRecipe
from outrider.train.recipes.draft import DraftRecipe
from outrider.train.recipes.eagle3 import Eagle3Recipe
from outrider.train.recipes.heads import FrozenTarget
from outrider.train.recipes.medusa import MedusaRecipe
from outrider.train.recipes.target import TargetRecipe
from outrider.train.trainer import Recipe


@dataclass(frozen=True, kw_only=True)
class Material:
    """The input of recipes. `start` is a folder to continue from instead of fresh weights."""

    target: Any
    tokenizer: Any
    text: Tensor
    start: Path | None = None
    compiled: bool = False
    seed: int = 0
    answers_only: bool = False  # rows of `data.pack_answers`


Options = Mapping[str, Any]
H = TypeVar("H", bound=Head)


def build_recipe(kind: str, material: Material, options: Options) -> Recipe:
    """The recipe called `kind`; unknown options are an error, never ignored."""
    if kind not in KINDS:
        raise UnknownName("kind of drafter", kind, KINDS)
    try:
        return KINDS[kind](material, dict(options))
    except TypeError as error:
        raise ConfigError(f"train {kind}: {error}") from None


def _draft(material: Material, options: dict[str, Any]) -> Recipe:
    config = material.target.config
    shape = {
        field.name: options.pop(field.name)
        for field in fields(DraftShape)
        if options.get(field.name) is not None
    }
    if material.start is not None:
        if shape:
            raise ConfigError("a draft that is continued keeps its shape: leave out the sizes")
        draft = load_model(material.start)
        if draft.config.vocab_size != config.vocab_size:
            raise VocabularyMismatch(
                f"{material.start} has {draft.config.vocab_size} ids, the target "
                f"{config.vocab_size}: train a new draft"
            )
    else:
        draft = llama(**draft_shape(config, shape), vocab_size=config.vocab_size,
                      max_positions=config.max_position_embeddings,
                      eos_token_id=_end(config), seed=material.seed)  # fmt: skip
    device = next(material.target.parameters()).device
    recipe_config = DraftConfig(compiled=material.compiled, **options)
    return DraftRecipe(draft.to(device), _frozen(material), recipe_config)


def draft_shape(config: Any, given: Mapping[str, int]) -> dict[str, int]:
    """Sizes of a fresh draft: a third of the target's width and of its depth unless given."""
    hidden = given.get("hidden_size") or max(64, round(config.hidden_size * 3 / 8 / 64) * 64)
    if hidden % 64:
        raise ConfigError(f"hidden_size is {hidden}; take a multiple of 64")
    heads = hidden // 64
    kv_heads = given.get("num_kv_heads") or (1 if heads % 2 else max(1, heads // 2))
    if heads % kv_heads:
        raise ConfigError(f"num_kv_heads is {kv_heads}; {heads} heads cannot share them evenly")
    return {
        "hidden_size": hidden,
        "num_layers": given.get("num_layers") or max(1, round(config.num_hidden_layers / 3.5)),
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "intermediate_size": given.get("intermediate_size") or round(hidden * 8 / 3 / 64) * 64,
    }


def _end(config: Any) -> int:
    end = config.eos_token_id
    return int(end[0] if isinstance(end, list) else end or 0)


def _medusa(material: Material, options: dict[str, Any]) -> Recipe:
    config = MedusaRecipeConfig(seed=material.seed, compiled=material.compiled, **options)
    return MedusaRecipe(_frozen(material), config, _started(material, MedusaHeads))


def _eagle3(material: Material, options: dict[str, Any]) -> Recipe:
    config = Eagle3RecipeConfig(seed=material.seed, compiled=material.compiled, **options)
    head = _started(material, Eagle3Head)
    answers = material.answers_only
    return Eagle3Recipe(_frozen(material), config, material.text, head, answers_only=answers)


def _dflash(material: Material, options: dict[str, Any]) -> Recipe:
    if options.get("mask_token_id") is None:
        options["mask_token_id"] = unused_id(material)
    config = DFlashRecipeConfig(seed=material.seed, compiled=material.compiled, **options)
    return DFlashRecipe(_frozen(material), config, _started(material, DFlashHead))


def unused_id(material: Material) -> int:
    """An id for "not known yet": the mask token, or an id that is not in the text."""
    tokenizer = material.tokenizer
    for token_id in (tokenizer.mask_token_id, tokenizer.convert_tokens_to_ids("ÿ")):
        if isinstance(token_id, int) and token_id != tokenizer.unk_token_id:
            return token_id
    seen = set(torch.unique(material.text).tolist())
    for token_id in range(material.target.config.vocab_size - 1, -1, -1):
        if token_id not in seen:
            return token_id
    raise ConfigError("every id occurs in the text: choose one with --mask-token-id")


def _early_exit(material: Material, options: dict[str, Any]) -> Recipe:
    if material.start is not None:
        raise ConfigError("early exits are trained into the target itself: leave out --from")
    if not hasattr(material.target.base_model, "layers"):
        raise ModelError("early exits need a target with plain decoder layers")
    config = TargetConfig(seed=material.seed, compiled=material.compiled, **options)
    return TargetRecipe(material.target, config)


def _frozen(material: Material) -> FrozenTarget:
    return FrozenTarget(material.target, compiled=material.compiled)


def _started(material: Material, kind: type[H]) -> H | None:
    """The head in `material.start`, checked against the target."""
    if material.start is None:
        return None
    config = material.target.config
    head: Any = load_head(material.start, num_layers=config.num_hidden_layers)
    if head.kind != kind.kind:
        raise ModelError(f"{material.start} holds a {head.kind} head, not {kind.kind}")
    if (head.config.hidden_size, head.config.vocab_size) != (config.hidden_size, config.vocab_size):
        raise VocabularyMismatch(f"{material.start} was trained for another target")
    trained: H = head.train()
    return trained


KINDS: dict[str, Callable[[Material, dict[str, Any]], Recipe]] = {
    "draft": _draft,
    "medusa": _medusa,
    "eagle3": _eagle3,
    "dflash": _dflash,
    "early-exit": _early_exit,
}
