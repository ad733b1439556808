"""A pass that goes on from the states that drafting with the first layers left, bit by bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from native_models import ISAS, ODD, needs_native, random_tokens
from outrider.contracts import Begun, StepBatch, Stream
from outrider.engine.build import EngineConfig, build
from outrider.engine.request import Speculation
from outrider.model.driver import Driver
from outrider.model.native_decoder import NativeDecoder
from outrider.noise import sequence_key
from outrider.sampling import RowParams, SamplingParams
from outrider.testing import write_tiny_llama
from tiny_models import write

pytestmark = needs_native
VOCAB, LAYER = ODD["vocab_size"], 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("continue"), transformers.LlamaConfig(**ODD))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_going_on_is_the_whole_pass(
    isa: str, dtype: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTRIDER_ISA", isa)
    model = NativeDecoder.load(folder, dtype=dtype, threads=2)
    driver = Driver(model)
    prompts = {"a": random_tokens(9, VOCAB, 1), "b": random_tokens(20, VOCAB, 2)}
    driver.forward({name: prompt[:-1] for name, prompt in prompts.items()})
    for name, prompt in prompts.items():
        driver.keep(name, range(len(prompt) - 1))
    counts = np.array([4, 2], np.int32)
    rows = RowParams.of([SamplingParams(temperature=t, seed=1) for t in (0.0, 1.0)], [1, 1])
    keys = np.array([sequence_key(seed, 0, Stream.TARGET) for seed in (1, 2)], np.uint64)

    def first() -> StepBatch:
        roomy = driver.batch({name: prompt[-1:] + [0] * 4 for name, prompt in prompts.items()})
        batch = driver.batch({name: prompt[-1:] for name, prompt in prompts.items()})
        batch.tables_SW, batch.exit_layer = roomy.tables_SW, LAYER
        return batch

    plain = model.draft_chain(first(), counts, rows, keys)
    chains, states = model.draft_and_keep(first(), counts, rows, keys)
    assert chains == plain
    assert [len(kept) for kept in states] == [5, 3]
    tokens = {
        name: prompt[-1:] + chain
        for (name, prompt), chain in zip(prompts.items(), chains, strict=True)
    }
    batch = driver.batch(tokens)
    batch.begun = Begun(LAYER, torch.cat(states))
    continued = model.forward(batch).logits_RV.clone()
    batch = driver.batch(tokens, taps=(LAYER,))
    whole = model.forward(batch)
    assert torch.equal(whole.taps[LAYER], torch.cat(states))
    assert torch.equal(whole.logits_RV, continued)


def test_nonsense_is_refused(folder: Path) -> None:
    model = NativeDecoder.load(folder)
    batch = Driver(model).batch({"a": [1, 2]})
    for layer, states in (
        (3, torch.zeros(2, 42)),
        (-1, torch.zeros(2, 42)),
        (1, torch.zeros(1, 42)),
        (1, torch.zeros(2, 42, dtype=torch.float64)),
    ):
        batch.begun = Begun(layer, states)
        with pytest.raises(ValueError, match="continues from"):
            model.forward(batch)


def test_the_engine_goes_on_where_everybody_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = build(
        EngineConfig(
            model=str(write_tiny_llama(tmp_path, num_layers=3)),
            proposer="early-exit",
            num_draft_tokens=3,
            backend="native",
            max_ahead_steps=1,  # a loop of its own goes on by itself
        )
    )
    begun: list[bool] = []
    forward = engine.target.forward

    def spy(batch: StepBatch) -> object:
        begun.append(batch.begun is not None)
        return forward(batch)

    monkeypatch.setattr(engine.target, "forward", spy)
    params = SamplingParams(max_tokens=20, temperature=0.8, seed=3, ignore_eos=True)
    alone = engine.add([5, 9, 2, 7], params)
    assert len(list(engine.run([alone]))) == len(begun)
    assert not begun[0]
    assert all(begun[1:-1])
    begun.clear()
    plain = engine.add([5, 9, 2, 7], params, speculation=Speculation(proposer=None))
    again = engine.add([5, 9, 2, 7], params)
    for _ in engine.run([plain, again]):
        pass
    assert not begun[1], "a plain sequence beside it needs the lower layers"
    outputs = {tuple(engine.collect(request).tokens) for request in (alone, plain, again)}
    assert len(outputs) == 1
