"""The bundled target drafted for by itself, by its family in stages and by a foreign model."""

from __future__ import annotations

import pytest

from exactness.same_tokens import assert_same, run, seeded
from other_vocabulary import write_with_other_ids
from outrider import native
from outrider.engine.build import EngineConfig, build
from outrider.engine.engine import Engine
from outrider.engine.request import Speculation
from outrider.model.bundled import bundled_path
from outrider.sampling import SamplingParams
from outrider.statistics import SpeculationStats

PROMPTS = [
    "def quicksort(items):\n",
    'class Stack:\n    """Last in, first out."""\n',
    "import argparse\n\n\ndef main():\n",
    '"""Read a table of numbers from a file and print the mean of every column."""\n',
]
# Acceptance length at K=4 that no change may fall below, greedy and at T=1; about a tenth below
# what these prompts gave when it was written.
FLOORS = {
    "quantized": (4.3, 4.2),
    "early-exit": (3.1, 2.3),
    "cascade": (3.4, 2.4),
    "cross-vocab": (3.0, 1.8),
}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """The family's own draft drafts inside the cascade; under other ids it is a foreigner."""
    foreign = tmp_path_factory.mktemp("family") / "foreign"
    write_with_other_ids(bundled_path("draft"), foreign)
    inside = {"mid": "bundled:mid", "proposer": "cross-vocab"}
    return build(
        EngineConfig(
            draft_model=str(foreign),
            proposer_options={"cascade": inside},
            num_draft_tokens=0,
            kv_tokens=4096,
        )
    )


@pytest.mark.parametrize("temperature", [0, 1])
def test_relatives_draft_well_and_change_nothing(engine: Engine, temperature: int) -> None:
    params = SamplingParams(temperature=temperature, seed=1, max_tokens=64)
    prompts = [engine.tokenizer.encode(prompt) for prompt in PROMPTS]
    off = Speculation(proposer=None)
    plain = [run(engine, [p], seeded(params, i), off)[0] for i, p in enumerate(prompts)]
    bitwise = type(engine.target).__name__ == "NativeDecoder"
    for proposer, floors in FLOORS.items():
        if proposer == "quantized" and not native.available():
            continue
        choice = Speculation(proposer=proposer, num_draft_tokens=4)
        results = run(engine, prompts, params, choice)
        assert_same(engine, results, plain, params, f"{proposer} T={temperature}", bitwise=bitwise)
        total = SpeculationStats()
        for result in results:
            total.merge(result.stats)
        length = total.acceptance_length
        assert length > floors[temperature], f"{proposer}: acceptance length {length:.2f}"
