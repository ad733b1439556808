"""The models we ship: speculation is invisible on them, and plain decoding is transformers' own."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from exactness.same_tokens import assert_same, run, seeded
from native_models import needs_native
from outrider.engine.build import EngineConfig, build
from outrider.engine.engine import Engine
from outrider.engine.request import Request, Speculation
from outrider.model.bundled import bundled_path
from outrider.prove.identity import explain
from outrider.sampling import SamplingParams

PROMPTS = [
    "def quicksort(items):\n",
    'class Stack:\n    """Last in, first out."""\n',
    "import argparse\n\n\ndef main():\n",
    '"""Read a table of numbers from a file and print the mean of every column."""\n',
]
PARAMS = {
    "greedy": SamplingParams(max_tokens=48),
    "sampled": SamplingParams(temperature=1.0, seed=1, max_tokens=48),
    "everything": SamplingParams(
        temperature=0.7,
        top_k=50,
        top_p=0.9,
        min_p=0.05,
        presence_penalty=0.3,
        frequency_penalty=0.2,
        repetition_penalty=1.1,
        seed=2,
        max_tokens=48,
        stop=("\n\n\n",),
    ),
}
BACKENDS = [
    ("torch", "auto"),
    pytest.param(("native", "auto"), marks=needs_native),
    pytest.param(("native", "bfloat16"), marks=needs_native),
]


@pytest.fixture(scope="module", params=BACKENDS, ids="-".join)
def engine(request: pytest.FixtureRequest) -> Engine:
    backend, dtype = request.param
    return build(EngineConfig(backend=backend, dtype=dtype, kv_tokens=8192))


@pytest.mark.parametrize("name", PARAMS)
def test_speculation_is_invisible_on_the_bundled_pair(engine: Engine, name: str) -> None:
    params = PARAMS[name]
    prompts = [engine.tokenizer.encode(prompt) for prompt in PROMPTS]
    off = Speculation(proposer=None)
    plain = [run(engine, [p], seeded(params, i), off)[0] for i, p in enumerate(prompts)]
    bitwise = type(engine.target).__name__ == "NativeDecoder"
    num_accepted = 0
    for proposer in ("draft-model", "ngram"):
        for k in (2, 6):
            choice = Speculation(proposer=proposer, num_draft_tokens=k)
            results = run(engine, prompts, params, choice)
            label = f"{proposer} K={k} {name}"
            assert_same(engine, results, plain, params, label, bitwise=bitwise)
            if proposer == "draft-model":
                num_accepted += sum(r.stats.num_accepted for r in results)
    assert num_accepted > 48, "a trained draft should be right now and then"


def test_greedy_is_transformers_greedy(engine: Engine) -> None:
    """An oracle we did not write: transformers' own generation on the same folder."""
    oracle = AutoModelForCausalLM.from_pretrained(bundled_path("target"), dtype=torch.float32)
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    for prompt in PROMPTS[:2]:
        tokens = engine.tokenizer.encode(prompt)
        output = oracle.generate(
            torch.tensor([tokens]),
            attention_mask=torch.ones(1, len(tokens), dtype=torch.long),
            max_new_tokens=40,
            min_new_tokens=40,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
        )
        expected = output[0, len(tokens) :].tolist()
        got = run(engine, [tokens], params)[0].tokens
        request = Request("oracle", tokens, params, Speculation(), 0)
        difference = explain(engine, request, 0, expected, got)
        assert difference is None or difference.is_near_tie, difference
