"""Models with recurrent layers: same seed, same tokens, whatever happens to their states.

Few slots (preemption), small passes (chunks of prompts), repeats (cached prefixes), drafts that are
never and drafts that are always right. With OUTRIDER_ZOO=1 every family over 2,000 tokens.
"""

from __future__ import annotations

import copy
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import pytest

from exactness.same_tokens import assert_same, run
from family_models import FAMILY_CONFIGS
from native_models import ZOO, families, random_tokens
from outrider import native
from outrider.engine.build import EngineConfig, build
from outrider.engine.engine import Engine, Result
from outrider.errors import ConfigError
from outrider.model.native_decoder import NativeDecoder
from outrider.model.torch_decoder import TorchDecoder
from outrider.sampling import SamplingParams
from outrider.testing import write_tiny_llama
from tiny_models import write

ONLY_TORCH = ["mamba", "falcon_mamba", "jamba"]
RECURRENT, NATIVE = ["lfm2", "qwen3_5"], ["lfm2", "granite4", "qwen3_5"]
if ZOO:
    RECURRENT = families(recurrent=True)
    NATIVE = families(native_step=True, recurrent=True)
CASES = [(name, "torch") for name in RECURRENT]
CASES += [(name, "native") for name in NATIVE if native.available()]
GREEDY = SamplingParams(max_tokens=40, ignore_eos=True)
SEEDED = SamplingParams(temperature=1.0, top_p=0.95, seed=5, max_tokens=40, ignore_eos=True)
PROMPTS = [random_tokens(21, 64, seed) * repeats for seed, repeats in ((1, 1), (2, 2), (3, 3))]
CACHED = [16, 40, 56]  # the whole blocks of 8 before a prompt's last token
NARROW = {"draft-tree": {"width": 1, "children": 2}}  # several passes of one node each
DRAFTING: dict[str, tuple[str, int, dict[str, Any]]] = {
    "look-up": ("suffix", 4, {}),
    "another model": ("draft-model", 4, {}),
    "itself": ("draft-model", 4, {"draft_model": "target"}),
    "trees of itself": ("draft-tree", 8, {"draft_model": "target"}),
    "narrow trees": ("draft-tree", 4, {"draft_model": "target", "proposer_options": NARROW}),
    "its first layers": ("early-exit", 3, {}),
    "windows": ("lookahead", 8, {}),
    "itself in int8": ("quantized", 4, {}),
    "few slots": ("draft-model", 4, {"draft_model": "target", "kv_tokens": 144}),
    "small passes": ("suffix", 5, {"max_step_tokens": 7}),
    "nothing cached": ("suffix", 4, {"prefix_caching": False}),
}


@dataclass
class Models:
    family: str
    backend: Literal["torch", "native"]
    folder: Path
    max_positions: int = 128

    def __post_init__(self) -> None:
        config = copy.deepcopy(FAMILY_CONFIGS[self.family])
        config.max_position_embeddings = self.max_positions
        self.target = write(self.folder / "target", config)
        self.draft = write_tiny_llama(self.folder / "draft", num_layers=1, max_positions=128)
        shutil.copy(self.draft / "tokenizer.json", self.target)

    def engine(self, proposer: str, k: int, **options: Any) -> Engine:
        drafts = options.pop("draft_model", "") == "target"
        config = EngineConfig(
            model=str(self.target),
            draft_model=str(self.target if drafts else self.draft),
            proposer=proposer,
            num_draft_tokens=k,
            backend=self.backend,
            block_size=8,
            **options,
        )
        made = build(config)
        if isinstance(made.target, TorchDecoder):
            assert made.target.states is not None
            made.target.states.poison = True
        elif isinstance(made.target, NativeDecoder):
            made.target.states(native.STATES_POISON)
        return made

    def assert_same(self, *arguments: Any) -> None:
        """The native step gives the same bits with drafts and without."""
        assert_same(*arguments, bitwise=self.backend == "native")


@pytest.fixture(scope="module", params=CASES, ids=" ".join)
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Models:
    family, backend = request.param
    return Models(family, backend, tmp_path_factory.mktemp("recurrent"))


@pytest.fixture(scope="module")
def plain(models: Models) -> Engine:
    return models.engine("ngram", 0)


@pytest.mark.parametrize("name", DRAFTING)
def test_drafts_change_no_token(name: str, models: Models, plain: Engine) -> None:
    """Decodes all prompts twice: the second time from cached prefixes."""
    proposer, k, options = DRAFTING[name]
    if proposer == "quantized" and models.family in ONLY_TORCH:
        with pytest.raises(ConfigError, match="needs the native step"):
            models.engine(proposer, k)
        return
    drafting = models.engine(proposer, k, **options)
    for params in (GREEDY, SEEDED):
        expected = run(plain, PROMPTS, params)
        for _ in range(2):
            results = run(drafting, PROMPTS, params)
            assert sum(r.stats.num_drafted for r in results) > 0
            models.assert_same(drafting, results, expected, params, name)
            if name == "itself" and proposer == "draft-model":
                # In int8, a native drafter does not always agree with itself.
                assert all(r.stats.num_accepted >= 25 for r in results)
    assert (drafting.scheduler.num_preemptions > 0) == (name == "few slots")


@pytest.mark.parametrize("name", ["plain", "look-up", "itself"])
def test_the_first_repeat_hits_the_prefix_cache(name: str, models: Models) -> None:
    proposer, k, options = DRAFTING.get(name, ("ngram", 0, {}))
    made = models.engine(proposer, k, **options)
    first, again = run(made, PROMPTS, GREEDY), run(made, PROMPTS, GREEDY)
    assert [r.num_cached_tokens for r in first] == [0, 0, 0]
    assert [r.num_cached_tokens for r in again] == CACHED
    assert [r.tokens for r in again] == [r.tokens for r in first]
    longer = [r.prompt_tokens + r.tokens + [1, 2, 3] for r in first]
    assert all(r.num_cached_tokens > 60 for r in run(made, longer[1:], GREEDY))
    if isinstance(made.target, TorchDecoder):
        assert made.target.states is not None
        assert made.target.states.num_replayed == 0
    elif models.family != "lfm2":
        assert isinstance(made.target, NativeDecoder)
        assert made.target.states(native.STATES_REPLAYED) == 0


@pytest.fixture(scope="module")
def longer(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Models:
    folder = tmp_path_factory.mktemp("longer")
    return Models(models.family, models.backend, folder, max_positions=2304)


@pytest.fixture(scope="module")
def long_texts(longer: Models) -> list[tuple[SamplingParams, list[Result]]]:
    """Of plain decoding, greedy and seeded."""
    plain = longer.engine("ngram", 0)
    params = [replace(each, max_tokens=2000 if ZOO else 200) for each in (GREEDY, SEEDED)]
    return [(each, run(plain, PROMPTS[:1], each)) for each in params]


@pytest.mark.parametrize("name", DRAFTING if ZOO else ["itself"])
def test_long_texts(
    name: str, longer: Models, long_texts: list[tuple[SamplingParams, list[Result]]]
) -> None:
    """States that drift apart show late."""
    proposer, k, options = DRAFTING[name]
    if proposer == "quantized" and longer.family in ONLY_TORCH:
        return
    options = {key: value for key, value in options.items() if key != "kv_tokens"}
    drafting = longer.engine(proposer, k, **options)
    for params, expected in long_texts:
        results = run(drafting, PROMPTS[:1], params)
        longer.assert_same(drafting, results, expected, params, name)
        assert all(len(r.tokens) == params.max_tokens for r in results)
