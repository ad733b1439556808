"""Same seed, same tokens, whatever parts a family is made of: drafts change no token.

A sample of the families; with OUTRIDER_ZOO=1 (`make zoo`) all of them.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from exactness.same_tokens import assert_same, run
from family_models import FAMILY_CONFIGS
from native_models import ZOO, families, needs_native, random_tokens
from outrider.engine.build import EngineConfig, build
from outrider.sampling import SamplingParams
from outrider.testing import write_tiny_llama
from tiny_models import write

# One of each kind of norm, window, cap, position, block and order of heads.
SAMPLE: tuple[str, ...] = (
    "gemma2",
    "gemma3",
    "olmo3",
    "cohere2",
    "glm4",
    "gpt_neox",
    "gpt2",
    "smollm3",
    "phi3",
)
SAMPLE += ("mixtral", "qwen2_moe", "gpt_oss", "glm4_moe", "phimoe", "llama4", "bloom")
SAMPLE += ("deepseek_v3",)
PARAMS = (
    SamplingParams(max_tokens=40),
    SamplingParams(temperature=1.0, top_p=0.95, seed=3, max_tokens=40),
)
PROMPTS = [random_tokens(4, 64, seed) * repeats for seed, repeats in ((1, 2), (2, 5), (3, 9))]


def cases() -> list[object]:
    """Family and decoder."""
    on_torch = ["gemma2", "gpt_neox", "gpt2", "qwen2_moe", "gemma3n", "gemma4"]
    on_native = list(SAMPLE)
    if ZOO:
        on_torch = families()
        on_native = families(native_step=True)
    return [
        *((name, "torch") for name in on_torch),
        *(pytest.param(name, "native", marks=needs_native) for name in on_native),
    ]


@pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning")  # GPT-BigCode's
@pytest.mark.parametrize(("name", "backend"), cases())
def test_drafts_change_no_token(name: str, backend: str, tmp_path: Path) -> None:
    target = write(tmp_path / "target", FAMILY_CONFIGS[name])
    draft = write_tiny_llama(tmp_path / "draft", num_layers=1, max_positions=128)
    shutil.copy(draft / "tokenizer.json", target)

    def engine(proposer: str, k: int) -> object:
        return build(
            EngineConfig(
                model=str(target),
                draft_model=str(draft),
                proposer=proposer,
                num_draft_tokens=k,
                backend=backend,  # type: ignore[arg-type]
                block_size=8,
            )
        )

    plain = engine("ngram", 0)
    for params in PARAMS:
        expected = run(plain, PROMPTS, params)  # type: ignore[arg-type]
        for proposer, k in (("suffix", 6), ("draft-tree", 8), ("early-exit", 3)):
            drafting = engine(proposer, k)
            results = run(drafting, PROMPTS, params)  # type: ignore[arg-type]
            assert sum(r.stats.num_drafted for r in results) > 0, proposer
            assert_same(
                drafting,  # type: ignore[arg-type]
                results,
                expected,
                params,
                f"{name} {proposer}",
                bitwise=backend == "native",
            )
