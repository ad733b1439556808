"""Same seed, same tokens, with drafting heads on every form of a target's weights.

A form rounds weights and activations, and a pass over drafts must round them as a pass over one
token does: bit for bit.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import gguf_files
from exactness.same_tokens import assert_same, run
from native_models import needs_native
from outrider.engine.build import EngineConfig, build
from outrider.engine.engine import Engine
from outrider.engine.request import Speculation
from outrider.model.gguf.types import TYPES
from outrider.sampling import SamplingParams
from outrider.testing import write_tiny_head, write_tiny_llama, write_tiny_tokenizer
from published import CASES, TARGET

pytestmark = needs_native
BLOCK_TYPES = sorted(kind.name for kind in TYPES.values() if kind.values > 1)
PUBLISHED = (
    *("specforge", "eagle1_with_bias", "p_eagle_speculators", "medusa_vllm", "mlp_ibm"),
    *("dflash_zlab", "dspark_fill_in"),
)
PROMPTS = [[5, 9, 5, 9, 2], list(range(1, 30)), [7]]
# Target and drafter share the noise of a draw: with much of it, they often agree.
SAMPLINGS = [
    SamplingParams(max_tokens=24, ignore_eos=True),
    SamplingParams(max_tokens=24, ignore_eos=True, temperature=4.0, seed=3),
]


def check(engine: Engine, kinds: list[str], label: str) -> None:
    drafted = dict.fromkeys(kinds, 0)
    accepted = 0
    for params in SAMPLINGS:
        plain = run(engine, PROMPTS, params, Speculation(proposer=None))
        for kind in kinds:
            results = run(engine, PROMPTS, params, Speculation(proposer=kind, num_draft_tokens=4))
            assert_same(engine, results, plain, params, f"{label} {kind}", bitwise=True)
            drafted[kind] += sum(result.stats.num_drafted for result in results)
            accepted += sum(result.stats.num_accepted for result in results)
    assert all(drafted.values()), drafted
    assert accepted > 0


@pytest.mark.parametrize("kind", [*BLOCK_TYPES, "F16", "BF16"])
def test_gguf_files(kind: str, tmp_path: Path) -> None:
    write_tiny_tokenizer(tmp_path, num_tokens=300)
    metadata = gguf_files.tokenizer_of(tmp_path)
    target = gguf_files.write_model(tmp_path / "target.gguf", kind, vocab=300, **metadata)
    kinds = ["eagle3", "medusa", "dflash"]
    for name in kinds:
        write_tiny_head(tmp_path / name, name, vocab_size=300, hidden_size=256)
    engine = build(
        EngineConfig(
            model=str(target),
            proposer_options={name: {"head": str(tmp_path / name)} for name in kinds},
            kv_tokens=512,
        )
    )
    check(engine, kinds, kind)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int8", "int4"])
def test_types_of_weights(dtype: str, tmp_path: Path) -> None:
    target = write_tiny_llama(tmp_path / "target", **TARGET)
    folders = [tmp_path / name for name in PUBLISHED]
    for folder in folders:
        CASES[folder.name][1](folder)
    engine = build(
        EngineConfig(
            model=str(target),
            draft_model=str(folders[0]),
            other_drafters=tuple(map(str, folders[1:])),
            dtype=dtype,
            kv_tokens=512,
        )
    )
    check(engine, list(engine.drafters), dtype)
