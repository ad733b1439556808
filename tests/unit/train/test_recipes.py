"""Every kind of drafter learns: the loss falls and acceptance on the training text rises."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from outrider.errors import ConfigError, UnknownName
from outrider.train.config import Eagle3RecipeConfig, TargetConfig
from outrider.train.data import Windows, pack_answers
from outrider.train.kinds import KINDS, Material, build_recipe, draft_shape
from outrider.train.models import layer_states
from outrider.train.recipes.eagle3 import Eagle3Recipe, default_taps, frequent_ids
from outrider.train.recipes.heads import FrozenTarget, Together, narrowed
from outrider.train.recipes.target import TargetRecipe
from outrider.train.trainer import train
from tiny_training import quick, tiny_target, tiny_tokenizer, tokens_of

OPTIONS: dict[str, dict[str, Any]] = {
    "draft": {"hidden_size": 64, "num_layers": 1},
    "medusa": {"num_heads": 2},
    "eagle3": {"num_unroll": 2, "draft_vocab_size": 200},
    "dflash": {"block_size": 4, "num_hidden_layers": 1, "markov_rank": 4, "confidence": True},
    "early-exit": {"layer_dropout": 0.0},
}


@pytest.fixture(scope="module")
def trained_target() -> Any:
    target = tiny_target()
    train(TargetRecipe(target, TargetConfig(exit_weight=0.0)), Windows(tokens_of(), 64), quick(40))
    return target


def material(target: Any, **more: Any) -> Material:
    return Material(target=target, tokenizer=tiny_tokenizer(), text=tokens_of(), **more)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_each_kind_learns_its_target(kind: str, trained_target: Any) -> None:
    target = tiny_target()
    target.load_state_dict(trained_target.state_dict())
    recipe = build_recipe(kind, material(target), OPTIONS[kind])
    source = Windows(tokens_of(), 64)
    rows = source.rows(0, 4)
    before = recipe.measure(rows)
    report = train(recipe, source, quick(25))
    after = recipe.measure(rows)
    first, last = report.curve[:5], report.curve[-5:]
    assert sum(row["loss"] for row in last) < sum(row["loss"] for row in first)
    assert after["alpha"] > before["alpha"]
    assert after["greedy_acceptance_length"] >= 1
    if kind != "early-exit":  # drafters must leave the target as it was
        for name, value in trained_target.state_dict().items():
            assert torch.equal(value, target.state_dict()[name])


def test_heads_trained_together_are_those_trained_alone(trained_target: Any) -> None:
    source = Windows(tokens_of(), 64)

    def heads() -> dict[str, Any]:
        frozen = FrozenTarget(trained_target)
        torch.manual_seed(0)
        made: dict[str, Any] = {}
        for kind in ("medusa", "dflash"):
            recipe: Any = build_recipe(kind, material(trained_target), OPTIONS[kind])
            recipe.target = frozen
            made[kind] = recipe
        return made

    both = heads()
    loss, figures = Together(both).loss(source.rows(0, 2), 0, 0.0)
    alone = [recipe.loss(source.rows(0, 2), 0, 0.0)[0] for recipe in heads().values()]
    torch.testing.assert_close(loss, sum(alone, torch.zeros(())))
    assert {"medusa_alpha", "dflash_alpha"} <= set(figures)


def test_states_by_layer_are_transformers_own(trained_target: Any) -> None:
    tokens = tokens_of()[None, :40].long()
    with torch.no_grad():
        ours = layer_states(trained_target, tokens)
        theirs = trained_target.model(
            input_ids=tokens, use_cache=False, output_hidden_states=True
        ).hidden_states
    assert len(ours) == len(theirs) == 5
    for mine, reference in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, reference)


def test_a_narrowed_distribution_has_all_others_in_one_column() -> None:
    logits = torch.randn(7, 20, generator=torch.Generator().manual_seed(1))
    ids = torch.tensor([2, 3, 11])
    logs, columns = narrowed(logits, ids)
    p = logits.softmax(-1)
    torch.testing.assert_close(logs[:, :3].exp(), p[:, ids])
    torch.testing.assert_close(logs.exp().sum(-1), torch.ones(7))
    best = logits.argmax(-1).tolist()
    assert columns.tolist() == [ids.tolist().index(b) if b in ids else -1 for b in best]


def test_answers_only_counts_drafts_of_answers_and_measures_the_same(trained_target: Any) -> None:
    """Over all of a row, counting answers only is the usual measurement."""
    frozen, config = FrozenTarget(trained_target), Eagle3RecipeConfig(draft_vocab_size=150)
    usual = Eagle3Recipe(frozen, config, tokens_of())
    answers = Eagle3Recipe(frozen, config, tokens_of(), usual.head, answers_only=True)
    rows = tokens_of()[:128].view(2, 64).long()

    def measured(first: int, end: int) -> dict[str, Any]:
        packed = pack_answers(rows, torch.full((2,), first), torch.full((2,), end))
        return answers.measure(packed.long())

    expected, found = usual.measure(rows), measured(2, 65)
    assert found["num_positions"] == expected["num_positions"]
    assert found["alpha_by_depth"] == pytest.approx(expected["alpha_by_depth"], abs=1e-5)
    assert found["agreement_by_depth"] == pytest.approx(expected["agreement_by_depth"], abs=1e-5)
    # Starts t with 20 <= t + 2 and t + 2 + 4 <= 40.
    assert measured(20, 40)["num_positions"] == 2 * (40 - 4 - 20 + 1)


def test_an_untrained_draft_of_the_targets_weights_agrees_fully(trained_target: Any) -> None:
    recipe = build_recipe("draft", material(trained_target), OPTIONS["draft"])
    twin: Any = recipe
    twin.draft = trained_target
    figures = recipe.measure(tokens_of()[None, :64].long())
    assert figures["alpha"] == pytest.approx(1.0, abs=1e-5)
    assert figures["greedy_acceptance_length"] == 5


def test_options_that_do_not_exist_are_refused(trained_target: Any) -> None:
    with pytest.raises(UnknownName, match="eagle3"):
        build_recipe("eagle", material(trained_target), {})
    with pytest.raises(ConfigError, match="num_hedas"):
        build_recipe("medusa", material(trained_target), {"num_hedas": 3})
    with pytest.raises(ConfigError, match="multiple of 64"):
        draft_shape(trained_target.config, {"hidden_size": 100})


def test_taps_and_frequent_ids() -> None:
    assert default_taps(32) == (2, 16, 29)
    assert default_taps(7) == (2, 4, 6)
    assert frequent_ids(torch.tensor([5, 5, 3, 9, 9, 9]), 10, 3).tolist() == [3, 5, 9]
