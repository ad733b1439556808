"""The states of recurrent layers after any sequence of steps are those of plain decoding.

Each step drafts some tokens, of which some are accepted: none, all, or a path of a tree. States
that no pass has written are NaN, so that a model which reads one gives NaN.
"""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from draft_steps import MOST_TOKENS, STEP, accepted
from family_models import FAMILY_CONFIGS
from native_models import ZOO, families
from outrider.kv.states import ZEROS, StateRows
from outrider.model.driver import Driver
from outrider.model.torch_decoder import TorchDecoder
from tiny_models import write

FAMILIES = ["lfm2", "granite4", "qwen3_next", "olmo_hybrid", "minimax"]
if ZOO:
    FAMILIES = families(recurrent=True)


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TorchDecoder:
    folder = tmp_path_factory.mktemp("recurrent") / request.param.replace(" ", "-")
    return TorchDecoder.load(write(folder, FAMILY_CONFIGS[request.param]))


def start(model: TorchDecoder, seed: int) -> Driver:
    driver = Driver(model, num_blocks=80, block_size=4, seed=seed)
    assert model.states is not None
    model.states.poison = True
    return driver


def state(model: TorchDecoder, driver: Driver, name: str) -> torch.Tensor:
    """Everything that the sequence's last committed token leaves behind, in one row."""
    assert model.states is not None
    layout = driver.batch({name: [0]})
    last = int(layout.context_S[0]) - 1
    slot = int(layout.tables_SW[0, last // 4]) * 4 + last % 4
    row = model.states.rows.row(slot)
    kept = (model.states.tails[:, row], model.states.matrices[:, row])
    return torch.cat([part.flatten() for part in kept])


def check(model: TorchDecoder, driver: Driver, name: str, text: list[int]) -> None:
    """Compares logits and state with those of the text read token by token."""
    logits = driver.forward({name: [1]}).logits[name]
    driver.keep(name, [0])
    got = state(model, driver, name)
    for token in [*text, 1]:
        expected = driver.forward({"plain": [token]}).logits["plain"]
        driver.keep("plain", [0])
    torch.testing.assert_close(logits, expected, atol=2e-4, rtol=1e-4)
    torch.testing.assert_close(got, state(model, driver, "plain"), atol=2e-4, rtol=1e-4)
    driver.release("plain")


@settings(max_examples=15)
@given(st.lists(STEP, min_size=1, max_size=12), st.integers(0, 3))
def test_any_steps_leave_the_state_of_plain_decoding(
    model: TorchDecoder, steps: list[tuple[list[int], int, list[int]]], seed: int
) -> None:
    driver = start(model, seed)
    texts: dict[str, list[int]] = {"a": [], "b": []}
    for i, (tokens, num_kept, above) in enumerate(steps):
        name = "a" if i % 3 else "b"
        if len(texts[name]) + len(tokens) > MOST_TOKENS:
            continue
        parents, path = accepted(tokens, num_kept, above)
        driver.forward({name: tokens}, None if parents is None else {name: parents})
        driver.keep(name, path)
        texts[name] += [tokens[node] for node in path]
    for name, text in texts.items():
        if text:
            check(model, driver, name, text)


def test_lost_states_are_computed_again(model: TorchDecoder) -> None:
    driver = start(model, 0)
    text = [i * i % 64 for i in range(45)]
    driver.forward({"a": text})
    driver.keep("a", range(45))
    assert model.states is not None
    rows = model.states.rows
    rows.forget([slot for slot in range(320) if slot in rows])
    check(model, driver, "a", text)
    assert model.states.num_replayed == 45


def test_rows_of_many_sequences_never_run_out() -> None:
    rows = StateRows(8, 4)
    rows.add(rows.num_missing(20, 40))
    for turn in range(30):
        held = set()
        for slot in range(turn * 40, turn * 40 + 40):
            held.add(rows.take(slot))
        assert len(held) == 40
        assert ZEROS not in held
        assert all(slot in rows for slot in range(turn * 40, turn * 40 + 40))
