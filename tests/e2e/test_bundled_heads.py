"""The heads we ship: invisible on the bundled target, found by name, and right now and then."""

from __future__ import annotations

import pytest

from exactness.same_tokens import assert_same, run, seeded
from native_models import needs_native
from outrider.engine.build import EngineConfig, build
from outrider.engine.engine import Engine
from outrider.engine.request import Speculation
from outrider.sampling import SamplingParams

PROMPTS = [
    "def quicksort(items):\n",
    'class Stack:\n    """Last in, first out."""\n',
    "import argparse\n\n\ndef main():\n",
    '"""Read a table of numbers from a file and print the mean of every column."""\n',
]
PARAMS = {
    "greedy": SamplingParams(max_tokens=40),
    "sampled": SamplingParams(temperature=1.0, seed=1, max_tokens=40),
    "everything": SamplingParams(
        temperature=0.7,
        top_p=0.9,
        min_p=0.05,
        presence_penalty=0.3,
        frequency_penalty=0.2,
        repetition_penalty=1.1,
        seed=2,
        max_tokens=40,
        stop=("\n\n\n",),
    ),
}
BACKENDS = [
    "torch",
    pytest.param(
        "native",
        marks=needs_native,
    ),
]
# Acceptance lengths well below what was measured; a token off by one place falls far short.
LEAST = {("eagle3", 4): 2.6, ("dflash", 7): 2.6, ("medusa", 8): 1.8}


@pytest.fixture(scope="module", params=BACKENDS)
def engine(request: pytest.FixtureRequest) -> Engine:
    return build(EngineConfig(backend=request.param, kv_tokens=4096, max_step_tokens=64))


@pytest.mark.parametrize("name", PARAMS)
def test_heads_are_invisible_on_the_bundled_target(engine: Engine, name: str) -> None:
    params = PARAMS[name]
    prompts = [engine.tokenizer.encode(prompt) for prompt in PROMPTS]
    off = Speculation(proposer=None)
    plain = [run(engine, [p], seeded(params, i), off)[0] for i, p in enumerate(prompts)]
    bitwise = type(engine.target).__name__ == "NativeDecoder"
    for (kind, k), least in LEAST.items():
        how = Speculation(proposer=kind, num_draft_tokens=k)
        results = run(engine, prompts, params, how)
        assert_same(engine, results, plain, params, f"{kind} K={k} {name}", bitwise=bitwise)
        if name == "greedy":
            length = sum(len(r.tokens) for r in results) / sum(r.stats.num_steps for r in results)
            assert length > least, f"{kind}: acceptance length {length:.2f}"
    names = ["eagle3", "draft-model", "medusa", "dflash"]
    mixed = [Speculation(proposer=proposer, num_draft_tokens=6) for proposer in names]
    results = run(engine, prompts, params, mixed)
    assert_same(engine, results, plain, params, f"mixed {name}", bitwise=bitwise)
