"""Models with recurrent layers: same seed, same tokens, whatever happens to their states.

Few slots (preemption), small passes (chunks of prompts), repeats (cached prefixes), drafts that are
never and drafts that are always right. With OUTRIDER_ZOO=1 every family over 2,000 tokens.
"""

from __future__ import annotations

import copy
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from exactness.same_tokens import assert_same, run
from family_models import FAMILY_CONFIGS
from native_models import random_tokens
from outrider.engine.build import EngineConfig, build
from outrider.engine.engine import Engine
from outrider.model.torch_decoder import TorchDecoder
from outrider.sampling import SamplingParams
from outrider.testing import write_tiny_llama
from tiny_models import write

ZOO = bool(os.environ.get("OUTRIDER_ZOO"))
RECURRENT = ["lfm2", "granite4", "qwen3_5"]
if ZOO:
    RECURRENT += ["mamba2", "granite4 dense", "falcon_h1", "nemotron_h", "qwen3_next"]
GREEDY = SamplingParams(max_tokens=40, ignore_eos=True)
SEEDED = SamplingParams(temperature=1.0, top_p=0.95, seed=5, max_tokens=40, ignore_eos=True)
PROMPTS = [random_tokens(21, 64, seed) * repeats for seed, repeats in ((1, 1), (2, 2), (3, 3))]
CACHED = [16, 40, 56]  # the whole blocks of 8 before a prompt's last token
DRAFTING: dict[str, tuple[str, int, dict[str, Any]]] = {
    "look-up": ("suffix", 4, {}),
    "another model": ("draft-model", 4, {}),
    "itself": ("draft-model", 4, {"draft_model": "target"}),
    "trees of itself": ("draft-tree", 8, {"draft_model": "target"}),
    "its first layers": ("early-exit", 3, {}),
    "windows": ("lookahead", 8, {}),
    "few slots": ("draft-model", 4, {"draft_model": "target", "kv_tokens": 144}),
    "small passes": ("suffix", 5, {"max_step_tokens": 7}),
    "nothing cached": ("suffix", 4, {"prefix_caching": False}),
}


@pytest.fixture(scope="module", params=RECURRENT)
def folders(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("recurrent") / request.param
    target = write(folder / "target", FAMILY_CONFIGS[request.param])
    draft = write_tiny_llama(folder / "draft", num_layers=1, max_positions=128)
    shutil.copy(draft / "tokenizer.json", target)
    return {"target": target, "draft": draft}


def engine(folders: dict[str, Path], proposer: str, k: int, **options: Any) -> Engine:
    draft = folders[options.pop("draft_model", "draft")]
    config = EngineConfig(
        model=str(folders["target"]),
        draft_model=str(draft),
        proposer=proposer,
        num_draft_tokens=k,
        backend="torch",
        block_size=8,
        **options,
    )
    made = build(config)
    assert isinstance(made.target, TorchDecoder)
    assert made.target.states is not None
    made.target.states.poison = True
    return made


@pytest.fixture(scope="module")
def plain(folders: dict[str, Path]) -> Engine:
    return engine(folders, "ngram", 0)


@pytest.mark.parametrize("name", DRAFTING)
def test_drafts_change_no_token(name: str, folders: dict[str, Path], plain: Engine) -> None:
    """Decodes all prompts twice: the second time from cached prefixes."""
    proposer, k, options = DRAFTING[name]
    drafting = engine(folders, proposer, k, **options)
    for params in (GREEDY, SEEDED):
        expected = run(plain, PROMPTS, params)
        for _ in range(2):
            results = run(drafting, PROMPTS, params)
            assert sum(r.stats.num_drafted for r in results) > 0
            assert_same(drafting, results, expected, params, name)
            if "itself" in name and proposer == "draft-model":
                assert all(r.stats.num_accepted >= 30 for r in results)
    assert (drafting.scheduler.num_preemptions > 0) == (name == "few slots")


@pytest.mark.parametrize("name", ["plain", "look-up", "itself"])
def test_the_first_repeat_hits_the_prefix_cache(name: str, folders: dict[str, Path]) -> None:
    proposer, k, options = DRAFTING.get(name, ("ngram", 0, {}))
    made = engine(folders, proposer, k, **options)
    first, again = run(made, PROMPTS, GREEDY), run(made, PROMPTS, GREEDY)
    assert [r.num_cached_tokens for r in first] == [0, 0, 0]
    assert [r.num_cached_tokens for r in again] == CACHED
    assert [r.tokens for r in again] == [r.tokens for r in first]
    longer = [r.prompt_tokens + r.tokens + [1, 2, 3] for r in first]
    assert all(r.num_cached_tokens > 60 for r in run(made, longer[1:], GREEDY))
    assert isinstance(made.target, TorchDecoder)
    assert made.target.states is not None
    assert made.target.states.num_replayed == 0


@pytest.mark.parametrize("name", list(DRAFTING)[:6] if ZOO else ["itself"])
def test_long_texts(name: str, folders: dict[str, Path], tmp_path: Path) -> None:
    """States that drift apart show late."""
    config = copy.deepcopy(FAMILY_CONFIGS[folders["target"].parent.name])
    config.max_position_embeddings = 2304
    longer = folders | {"target": write(tmp_path / "target", config)}
    shutil.copy(longer["draft"] / "tokenizer.json", longer["target"])
    proposer, k, options = DRAFTING[name]
    plain, drafting = engine(longer, "ngram", 0), engine(longer, proposer, k, **options)
    for params in (GREEDY, SEEDED):
        many = replace(params, max_tokens=2000 if ZOO else 250)
        expected = run(plain, PROMPTS[:1], many)
        assert_same(drafting, run(drafting, PROMPTS[:1], many), expected, many, name)
