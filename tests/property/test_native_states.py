"""The native step's recurrent states after any steps have the bits of plain decoding's.

As in `test_states`. Logits of a further token show every number of the state before it.
"""

from __future__ import annotations

from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
import transformers
from hypothesis import given, settings

from draft_steps import MOST_TOKENS, STEP, accepted
from family_models import FAMILY_CONFIGS
from native_models import ZOO, families, needs_native
from outrider import native
from outrider.model.driver import Driver
from outrider.model.native_decoder import NativeDecoder
from tiny_models import write

pytestmark = needs_native
FAMILIES = ["granite4", "falcon_h1", "qwen3_next", "olmo_hybrid", "minimax"]
if ZOO:
    SHORT = ("lfm2", "lfm2 biased")  # keeps the inputs of convolutions for every token, no states
    FAMILIES = [f for f in families(native_step=True, recurrent=True) if f not in SHORT]


@pytest.fixture(scope="module", params=FAMILIES)
def model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> NativeDecoder:
    folder = tmp_path_factory.mktemp("recurrent") / request.param
    made = NativeDecoder.load(write(folder, FAMILY_CONFIGS[request.param]))
    made.states(native.STATES_POISON)
    return made


def plain(driver: Driver, text: list[int]) -> torch.Tensor:
    """The logits of the last token, read one token at a time."""
    for token in text:
        logits = driver.forward({"plain": [token]}).logits["plain"].clone()
        driver.keep("plain", [0])
    driver.release("plain")
    return logits


@settings(max_examples=40)
@given(st.lists(STEP, min_size=1, max_size=12), st.integers(0, 3), st.sampled_from((1, 2)))
def test_any_steps_leave_the_bits_of_plain_decoding(
    model: NativeDecoder,
    steps: list[tuple[list[int], int, list[int]]],
    seed: int,
    num_together: int,
) -> None:
    """Drafts of one or of two sequences in a pass; none, some or all are kept, also of trees."""
    driver = Driver(model, num_blocks=80, block_size=4, seed=seed)
    names = ("a", "b")[:num_together]
    texts: dict[str, list[int]] = {"a": [], "b": []}
    for tokens, num_kept, above in steps:
        if len(texts["a"]) + len(tokens) > MOST_TOKENS:
            continue
        parents, path = accepted(tokens, num_kept, above)
        batch = dict.fromkeys(names, tokens)
        driver.forward(batch, None if parents is None else dict.fromkeys(names, parents))
        for name in names:
            driver.keep(name, path)
            texts[name] += [tokens[node] for node in path]
    for name in names:
        logits = driver.forward({name: [1]}).logits[name][0].clone()
        driver.keep(name, [0])
        assert torch.equal(logits, plain(driver, [*texts[name], 1])[0])
        logits = driver.forward({name: [2]}).logits[name][0].clone()  # the state of a plain step
        assert torch.equal(logits, plain(driver, [*texts[name], 1, 2])[0])


def test_rows_do_not_depend_on_the_step(model: NativeDecoder) -> None:
    """1, 2 or 17 rows of a pass, and batches of them, give a row the same bits."""
    text = [i * i % 61 for i in range(51)]
    driver = Driver(model, num_blocks=200, block_size=4, seed=1)
    expected = [plain(driver, text[: i + 1])[0] for i in (0, 16, 33, 50)]
    for width in (2, 17, 51):
        rows = []
        for i in range(0, 51, width):
            batch = {"a": text[i : i + width], "b": text[i : i + width]}
            rows.append(driver.forward(batch).logits["b"].clone())
            for name in batch:
                driver.keep(name, range(len(batch[name])))
        whole = torch.cat(rows)
        for at, row in zip((0, 16, 33, 50), expected, strict=True):
            assert torch.equal(whole[at], row)
        for name in ("a", "b"):
            driver.release(name)


def test_lost_states_are_computed_again(model: NativeDecoder) -> None:
    driver = Driver(model, num_blocks=80, block_size=4)
    text = [i * i % 64 for i in range(45)]
    driver.forward({"a": text})
    driver.keep("a", range(45))
    before = model.states(native.STATES_REPLAYED)
    model.states(native.STATES_FORGET)
    logits = driver.forward({"a": [1]}).logits["a"][0].clone()
    assert model.states(native.STATES_REPLAYED) == before + 45
    assert torch.equal(logits, plain(driver, [*text, 1])[0])


def test_lost_states_of_many_long_texts_are_computed_again(tmp_path: Path) -> None:
    """Room for few states: those of one text must survive while others are computed."""
    config = transformers.Mamba2Config(
        **{"vocab_size": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
        **{"hidden_size": 16, "num_hidden_layers": 1, "num_heads": 16, "head_dim": 64},
        **{"expand": 64, "state_size": 1024, "n_groups": 1},  # 4 MB a state
    )
    model = NativeDecoder.load(write(tmp_path, config))
    texts = {name: [(i * i + k) % 64 for i in range(2100)] for k, name in enumerate("bcdefg")}
    texts = {"a": list(range(16)), **texts}  # ends with a block: a checkpoint
    driver = Driver(model, num_blocks=7 * 133, block_size=16)
    for name, text in texts.items():
        for start in range(0, len(text), 512):
            piece = text[start : start + 512]
            driver.forward({name: piece})
            driver.keep(name, range(len(piece)))
    expected = driver.forward({name: [5] for name in texts}).logits
    expected = {name: logits.clone() for name, logits in expected.items()}
    model.states(native.STATES_FORGET)
    logits = driver.forward({name: [5] for name in texts}).logits
    assert all(torch.equal(logits[name], expected[name]) for name in texts)
