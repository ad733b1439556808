"""Drafting in one native call against the same loop written in Python."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from native_models import ISAS, ODD, batch_of, needs_native, random_tokens
from outrider import native
from outrider.contracts import LEVEL_STEP, NUM_LEVELS, StepBatch, StopRule, Stream
from outrider.model.capabilities import TreeDraft, TreeLimits
from outrider.model.driver import Driver
from outrider.model.native_decoder import NativeDecoder
from outrider.noise import draw_key, gumbel, sequence_key
from outrider.sampling import RowParams, SamplingParams, draw_tokens
from tiny_models import write

pytestmark = needs_native
VOCAB = ODD["vocab_size"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("draft"), transformers.LlamaConfig(**ODD))


def rows_of(*temperatures: float) -> RowParams:
    """Parameters without filters; unlike SamplingParams, they may be nonsense."""
    size = len(temperatures)
    return RowParams(
        np.array(temperatures, np.float32),
        np.zeros(size, np.int32),
        np.ones(size, np.float32),
        np.zeros(size, np.float32),
    )


def by_hand(
    model: NativeDecoder, tokens: list[int], count: int, temperature: float, seed: int
) -> list[int]:
    """Forward, draw with torch's noise, feed back, repeat."""
    driver = Driver(model)
    drafted: list[int] = []
    new = tokens
    for _ in range(count):
        logits_V = driver.forward({"a": new}).logits["a"][-1]
        driver.keep("a", range(len(new)))
        if temperature:
            key = draw_key(seed, 0, len(tokens) + len(drafted), Stream.TARGET)
            logits_V = logits_V / temperature + gumbel([key], VOCAB, torch.device("cpu"))[0]
        new = [int(logits_V.argmax())]
        drafted += new
    return drafted


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("threads", [1, 2])
def test_ragged_drafts(
    isa: str, threads: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTRIDER_ISA", isa)
    model = NativeDecoder.load(folder, threads=threads)
    prompts = {
        "a": random_tokens(9, VOCAB, 1),
        "b": random_tokens(1, VOCAB, 2),
        "c": random_tokens(30, VOCAB, 3),
        "d": random_tokens(4, VOCAB, 4),
    }
    counts, temperatures, seeds = [5, 3, 0, 8], [0.0, 1.0, 1.0, 0.7], [1, 2, 3, 4]
    expected = [
        by_hand(model, prompt, count, temperature, seed)
        for prompt, count, temperature, seed in zip(
            prompts.values(), counts, temperatures, seeds, strict=True
        )
    ]
    driver = Driver(model, seed=2)
    batch = driver.batch({name: [*p, *[0] * 8] for name, p in prompts.items()})  # room for drafts
    tables = batch.tables_SW
    batch = driver.batch(prompts)
    batch.tables_SW = tables
    keys = [sequence_key(seed, 0, Stream.TARGET) for seed in seeds]
    got = model.draft_chain(
        batch,
        np.array(counts, np.int32),
        rows_of(*temperatures),
        np.array(keys, np.uint64),
    )
    assert got == expected


def margins_by_hand(
    model: NativeDecoder, tokens: list[int], drafts: list[int], temperature: float, seed: int
) -> list[float]:
    """By how much each draft's score beats the runner-up's."""
    driver = Driver(model)
    logits_NV = driver.forward({"a": [*tokens, *drafts[:-1]]}).logits["a"]
    found = []
    for place in range(len(drafts)):
        row_V = logits_NV[len(tokens) - 1 + place]
        if temperature:
            key = draw_key(seed, 0, len(tokens) + place, Stream.TARGET)
            row_V = row_V / temperature + gumbel([key], VOCAB, torch.device("cpu"))[0]
        best, second = row_V.topk(2).values.tolist()
        found.append(best - second)
    return found


def stopped(
    levels: list[list[int]], chances: list[list[float]], floors: list[float], toll: float
) -> tuple[list[int], list[int]]:
    """How many tokens a cautious drafter draws and takes, in rounds, from the rule's own words."""
    drawn, taken = [0] * len(levels), [0] * len(levels)
    products, drafting = [1.0] * len(levels), [i for i, some in enumerate(levels) if some]
    for place in range(max(map(len, levels))):
        num_rivals, still = len(drafting), []
        for i in drafting:
            drawn[i] += 1
            products[i] *= chances[i][levels[i][place]]
            if products[i] < floors[min(sum(taken), len(floors) - 1)]:
                continue
            taken[i] += 1
            if products[i] < floors[min(sum(taken), len(floors) - 1)] + toll / num_rivals:
                continue
            if place + 1 < len(levels[i]):
                still.append(i)
        drafting = still
    return drawn, taken


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("threads", [1, 2])
def test_a_cautious_drafter_stops_where_it_is_not_sure(
    isa: str, threads: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTRIDER_ISA", isa)
    model = NativeDecoder.load(folder, threads=threads)
    prompts = {
        name: random_tokens(size, VOCAB, size)
        for name, size in zip("abcde", (9, 1, 30, 4, 7), strict=True)
    }
    counts, temperatures, seeds = [8, 3, 0, 8, 7], [0.0, 1.0, 1.0, 0.7, 1.0], [1, 2, 3, 4, 5]
    keys = np.array([sequence_key(seed, 0, Stream.TARGET) for seed in seeds], np.uint64)
    rows, most = rows_of(*temperatures), np.array(counts, np.int32)

    def batch() -> StepBatch:
        driver = Driver(model, seed=2)
        tables = driver.batch({name: [*p, *[0] * 8] for name, p in prompts.items()}).tables_SW
        made = driver.batch(prompts)
        made.tables_SW = tables
        return made

    chains = model.draft_chain(batch(), most, rows, keys)
    random = np.random.default_rng(0)
    chances = [sorted(random.uniform(0.2, 1.0, NUM_LEVELS).tolist()) for _ in prompts]
    # Without floors nothing is left out, and every level is told.
    same, levels = model.draft_with_stop_rules(
        batch(), most, rows, keys, [StopRule(some) for some in chances]
    )
    assert same == chains
    for i, (name, chain) in enumerate(zip(prompts, chains, strict=True)):
        assert len(levels[i]) == len(chain)
        margins = (
            margins_by_hand(model, prompts[name], chain, temperatures[i], seeds[i]) if chain else []
        )
        for level, margin in zip(levels[i], margins, strict=True):
            assert level == NUM_LEVELS - 1 or level <= margin / LEVEL_STEP + 1e-3
            assert level >= min(margin / LEVEL_STEP - 1.0 - 1e-3, NUM_LEVELS - 1)
    some_end_early = False
    for floors, toll in [([0.5], 0.0), ([0.1, 0.1, 0.2, 0.3, 0.4, 0.6], 0.3), ([1.1], 0.0)]:
        cautions = [StopRule(some, floors, toll) for some in chances]
        got, drawn = model.draft_with_stop_rules(batch(), most, rows, keys, cautions)
        num_drawn, num_taken = stopped(levels, chances, floors, toll)
        assert [len(some) for some in drawn] == num_drawn
        assert got == [chain[:n] for chain, n in zip(chains, num_taken, strict=True)]
        assert drawn == [some[:n] for some, n in zip(levels, num_drawn, strict=True)]
        some_end_early = some_end_early or 0 < sum(num_taken) < sum(counts)
    assert some_end_early


FILTERS = [
    SamplingParams(temperature=1.0, top_k=5),
    SamplingParams(temperature=0.7, top_p=0.9, min_p=0.05),
    SamplingParams(temperature=1.3, top_k=20, top_p=0.6),
    SamplingParams(top_k=1),
    SamplingParams(temperature=2.0, min_p=0.3),
]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("threads", [1, 2])
def test_filters_as_drawn_step_by_step(
    isa: str, threads: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same decisions as a forward, `draw_tokens` and round again: bit for bit, mixed."""
    monkeypatch.setenv("OUTRIDER_ISA", isa)
    model = NativeDecoder.load(folder, threads=threads)
    model.allocate(40, 16)
    prompt = random_tokens(12, VOCAB, 5)
    expected = []
    for seed, params in enumerate(FILTERS):
        new, context, drafted = prompt, 0, list[int]()
        for _ in range(7):
            logits_RV = model.forward(batch_of(new, context=context, width=4)).logits_RV[-1:]
            context += len(new)
            key = draw_key(seed, 0, context, Stream.TARGET)
            new = draw_tokens(logits_RV, RowParams.of([params], [1]), [key])
            drafted += new
        expected.append(drafted)
    size = len(FILTERS)
    batch = StepBatch(
        tokens_T=np.array(prompt * size, np.int32),
        positions_T=np.array(list(range(12)) * size, np.int32),
        starts_S1=np.arange(size + 1, dtype=np.int32) * 12,
        context_S=np.zeros(size, np.int32),
        tables_SW=np.arange(4 * size, dtype=np.int32).reshape(size, 4),
        logit_rows_R=np.empty(0, np.int32),
    )
    keys = np.array([sequence_key(i, 0, Stream.TARGET) for i in range(size)], np.uint64)
    got = model.draft_chain(
        batch, np.full(size, 7, np.int32), RowParams.of(FILTERS, [1] * size), keys
    )
    assert got == expected


def test_the_cache_goes_on_from_the_draft(folder: Path) -> None:
    """What drafting wrote is what plain steps would have written."""
    model = NativeDecoder.load(folder)
    model.allocate(8, 16)
    prompt = random_tokens(20, VOCAB)
    one = (np.array([4], np.int32), rows_of(0.0), np.zeros(1, np.uint64))
    [drafted] = model.draft_chain(batch_of(prompt, context=0, width=8), *one)
    after = model.forward(batch_of([drafted[3]], context=23, width=8)).logits_RV.clone()
    model.allocate(8, 16)
    whole = model.forward(batch_of([*prompt, *drafted], context=0, width=8)).logits_RV
    assert torch.equal(after[0], whole[-1])


def test_padded_vocabulary_is_never_drafted(tmp_path: Path) -> None:
    from outrider.testing import write_tiny_llama

    folder = write_tiny_llama(tmp_path, vocab_size=80, num_tokens=65)
    model = NativeDecoder.load(folder)
    model.allocate(40, 16)
    for seed in range(6):
        [drafted] = model.draft_chain(
            batch_of([1, 2, 3], context=0, width=40),
            np.array([60], np.int32),
            rows_of(8.0),
            np.array([seed], np.uint64),
        )
        assert len(drafted) == 60
        assert max(drafted) < 65


def test_misuse(folder: Path) -> None:
    model = NativeDecoder.load(folder)
    model.allocate(2, 4)
    key = np.zeros(1, np.uint64)
    batch = batch_of([1, 2, 3], context=0, width=2)

    def draft(count: int, temperature: float = 0.0) -> list[list[int]]:
        return model.draft_chain(batch, np.array([count], np.int32), rows_of(temperature), key)

    assert len(draft(6)[0]) == 6  # slots 3..7 for five of them; the last is not fed back
    with pytest.raises(ValueError, match="block table"):
        draft(7)
    with pytest.raises(ValueError, match="temperature"):
        draft(1, -1.0)
    with pytest.raises(ValueError, match="temperature"):
        draft(1, float("nan"))
    assert draft(0) == [[]]
    batch.parents_T = np.array([-1, -1, 0], np.int32)
    with pytest.raises(ValueError, match="chain"):
        draft(2)
    batch.parents_T = np.array([-1, 0, 1], np.int32)
    assert len(draft(2)[0]) == 2
    batch.tokens_T = batch.tokens_T[:0]
    with pytest.raises(ValueError, match="fit together"):
        draft(2)
    empty = batch_of([], context=3, width=2)
    with pytest.raises(ValueError, match="start from"):
        model.draft_chain(empty, np.array([1], np.int32), rows_of(0.0), key)


def test_drafting_past_the_rotary_table(folder: Path) -> None:
    model = NativeDecoder.load(folder)
    model.allocate(40, 16)
    batch = batch_of([1, 2], context=0, width=40)
    batch.positions_T = np.array([253, 254], np.int32)
    [drafted] = model.draft_chain(
        batch, np.array([20], np.int32), rows_of(0.0), np.zeros(1, np.uint64)
    )
    assert len(drafted) == 20
    assert native.num_threads() >= 1


def test_tree_misuse(folder: Path) -> None:
    model = NativeDecoder.load(folder)
    model.allocate(2, 4)
    key = np.zeros(1, np.uint64)
    batch = batch_of([1, 2, 3], context=0, width=2)

    def grow(count: int, *limits: int) -> TreeDraft:
        return model.draft_tree(
            batch, np.array([count], np.int32), rows_of(0.0), key, TreeLimits(*limits)
        )[0]

    tree = grow(4, 3, 2, 2)
    assert len(tree.tokens) == len(tree.parents) == 4
    assert all(-1 <= parent < i for i, parent in enumerate(tree.parents))
    assert 0 < len(tree.fed_tokens) <= 4
    with pytest.raises(ValueError, match="block table"):
        grow(4, 4, 2, 2)
    with pytest.raises(ValueError, match="out of range"):
        grow(4, 2, 2, 0)
    with pytest.raises(ValueError, match="out of range"):
        grow(4, 2, 0, 1)
    assert grow(0, 2, 2, 2).tokens == []
