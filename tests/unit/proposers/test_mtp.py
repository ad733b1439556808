"""MTP layers, in the target's files or apart, draft what their formulas say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from exactness.same_tokens import assert_same, run
from native_models import needs_native
from outrider.engine.build import EngineConfig, build
from outrider.engine.request import Speculation
from outrider.errors import ConfigError, ModelError
from outrider.model.head_kinds import head_kind
from outrider.sampling import SamplingParams
from outrider.testing import write_tiny_llama
from published import mtp
from published.comparing import PROMPTS, K, Seen, compare
from published.record import keep

SAMPLINGS = [
    SamplingParams(max_tokens=32, ignore_eos=True),
    SamplingParams(max_tokens=32, ignore_eos=True, temperature=1.0, seed=5),
    SamplingParams(max_tokens=32, ignore_eos=True, temperature=0.8, seed=6, presence_penalty=0.7),
]
RUNS = [
    *((name, "torch") for name in mtp.CASES),
    *(
        pytest.param(name, "native", marks=needs_native)
        for name, case in mtp.CASES.items()
        if case().native
    ),
]


@pytest.mark.parametrize(("name", "backend"), RUNS)
def test_drafts_are_the_reference(name: str, backend: str, tmp_path: Path) -> None:
    """Chosen by the folder alone: a target with such a layer drafts with it by default."""
    target, apart, reference = mtp.write(name, tmp_path)
    assert head_kind(target) is None
    assert apart is None or head_kind(apart) == "mtp"
    engine = build(
        EngineConfig(
            model=str(target),
            draft_model=None if apart is None else str(apart),
            proposer_options={"mtp": {"weights": "float32"}},
            num_draft_tokens=K,
            kv_tokens=512,
            block_size=4,
            backend=backend,  # type: ignore[arg-type]
        )
    )
    assert engine.default.proposer == "mtp"
    count = compare(engine, reference, Seen(target))
    assert count["steps"] >= 20, count
    assert count["whole drafts"] >= 10, count
    assert count["same"] == count["drafts"], count
    assert count["accepted"] > 0, count
    assert count["rejecting steps"] > 0, count
    keep(f"mtp_{name}", "mtp", "torch" if backend == "torch" else "float32", count)


TREES = [
    *((name, "torch") for name in ("deepseek_v3", "qwen3_next", "mimo", "ernie4_5", "speculators")),
    *(pytest.param(name, "native", marks=needs_native) for name in ("glm4_moe", "mimo", "nextn")),
]


@pytest.mark.parametrize(("name", "backend"), TREES)
def test_trees_go_down_the_chain(name: str, backend: Any, tmp_path: Path) -> None:
    """First children are the reference's drafts, and the text is that without drafts."""
    target, apart, reference = mtp.write(name, tmp_path)
    engine = build(
        EngineConfig(
            model=str(target),
            draft_model=None if apart is None else str(apart),
            proposer_options={"mtp": {"weights": "float32", "children": 3}},
            num_draft_tokens=K,
            kv_tokens=512,
            block_size=4,
            backend=backend,
        )
    )
    count = compare(engine, reference, Seen(target), trees=True)
    assert count["drafts"] > 2 * count["steps"], "the trees have no depth"
    assert count["branches"] > 0, "nothing but the main line was compared"
    assert count["same"] == count["drafts"], count
    assert count["accepted"] > 0, count
    for params in SAMPLINGS:
        drafted = run(engine, PROMPTS, params)
        plain = run(engine, PROMPTS, params, Speculation(proposer=None))
        assert_same(engine, drafted, plain, params, name, bitwise=backend == "native")
    # A ratio rule needs chains, which the same engine drafts beside the trees.
    edited = SamplingParams(max_tokens=16, ignore_eos=True, temperature=1.0, seed=5)
    with pytest.raises(ConfigError, match="tree"):
        run(engine, PROMPTS, edited, Speculation(proposer="mtp", verifier="token"))


@pytest.mark.parametrize("backend", ["torch", pytest.param("native", marks=needs_native)])
def test_a_layer_in_a_gguf_file_drafts(backend: Any, tmp_path: Path) -> None:
    target, _, reference = mtp.write("glm4_moe", tmp_path)
    file = mtp.as_gguf(target)
    engine = build(
        EngineConfig(
            model=str(file),
            proposer_options={"mtp": {"weights": "float32"}},
            num_draft_tokens=K,
            kv_tokens=512,
            backend=backend,
        )
    )
    assert engine.default.proposer == "mtp"
    count = compare(engine, reference, Seen(file))
    assert count["same"] == count["drafts"] > 0, count
    for params in SAMPLINGS:
        plain = run(engine, PROMPTS, params, Speculation(proposer=None))
        assert_same(engine, run(engine, PROMPTS, params), plain, params, "gguf")


FORMS = [
    ("qwen3_next", {"backend": "torch"}),
    *(
        pytest.param(name, {"dtype": dtype}, marks=needs_native)
        for name, dtype in (("mimo", "int8"), ("glm4_moe", "int4"), ("deepseek_v3", "bfloat16"))
    ),
]


@pytest.mark.parametrize(("name", "options"), FORMS)
def test_the_text_is_the_same(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    """With and without drafts, whatever the target's weights are."""
    target, _, _ = mtp.write(name, tmp_path)
    engine = build(EngineConfig(model=str(target), kv_tokens=512, num_draft_tokens=4, **options))
    for params in SAMPLINGS:
        drafted = run(engine, PROMPTS, params)
        plain = run(engine, PROMPTS, params, Speculation(proposer=None))
        assert_same(engine, drafted, plain, params, name, bitwise="dtype" in options)
        assert all(result.stats.num_drafted > 0 for result in drafted)
    # The rule of drafts that are drawn from their own distribution.
    ratio = Speculation(proposer="mtp", num_draft_tokens=4, verifier="token")
    assert run(engine, PROMPTS, SAMPLINGS[1], ratio)[0].stats.num_accepted > 0


def test_bad_layers_are_one_line_before_the_first_token(tmp_path: Path) -> None:
    target, _, _ = mtp.write("mimo", tmp_path)
    stored = load_file(target / "model.safetensors")
    at = "model.mtp_layers.0."
    wide = {f"{at}hidden_layernorm.weight": torch.ones(48)}
    for change, message in (
        ({f"{at}input_proj.weight": torch.full((32, 64), torch.nan)}, "no numbers"),
        ({f"{at}mlp.up_proj.weight": torch.full((48, 32), torch.nan)}, "no numbers"),
        (wide, r"shape \[48\]"),
        ({f"{at}self_attn.q_proj.weight": None}, "lacks the tensor model.mtp_layers.0.self_attn"),
    ):
        tensors = {name: x for name, x in (stored | change).items() if x is not None}
        save_file(tensors, target / "model.safetensors")
        with pytest.raises(ModelError, match=message) as raised:
            build(EngineConfig(model=str(target), num_draft_tokens=2))
        assert "\n" not in str(raised.value)


def test_a_layer_of_another_target_is_refused(tmp_path: Path) -> None:
    _, apart, _ = mtp.write("nextn", tmp_path)
    plain = write_tiny_llama(tmp_path / "plain")
    with pytest.raises(ModelError, match="lacks the tensor"):
        build(EngineConfig(model=str(plain), draft_model=str(apart), num_draft_tokens=2))
    with pytest.raises(ModelError, match="holds no MTP layer"):
        build(EngineConfig(model=str(plain), proposer="mtp", num_draft_tokens=2))
