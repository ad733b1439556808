"""A model from one file: the same numbers as from a folder, on every path."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import gguf_files
import tiny_models
from gguf_files import plain
from outrider import LLM, Speculation
from outrider.errors import ConfigError, ModelError
from outrider.model.driver import Driver
from outrider.model.gguf.checkpoint import GgufCheckpoint
from outrider.model.gguf.container import open_gguf
from outrider.model.load import load_model
from outrider.model.weights import read_config, read_generation_config
from outrider.testing import write_tiny_llama
from tiny_models import SMALL

OFF = Speculation(num_draft_tokens=0)
TOKENS = [int(t) for t in np.random.default_rng(0).integers(0, 64, size=24)]
CONFIGS: dict[str, Any] = {
    "llama": transformers.LlamaConfig(**SMALL),
    "llama tied": transformers.LlamaConfig(**SMALL, tie_word_embeddings=True),
    "llama biased": transformers.LlamaConfig(**SMALL, attention_bias=True, mlp_bias=True),
    "llama wide heads": transformers.LlamaConfig(**SMALL, head_dim=16),
    "qwen2": transformers.Qwen2Config(**SMALL),
    "qwen3": transformers.Qwen3Config(**SMALL, head_dim=16),
}
BACKENDS = ("torch", "native")


def logits(path: Path, backend: Any) -> torch.Tensor:
    driver = Driver(load_model(path, backend=backend, dtype="float32"))
    return driver.forward({"a": TOKENS}).logits["a"]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["F32", "BF16", "F16"])
@pytest.mark.parametrize("name", CONFIGS)
def test_the_same_logits_as_from_a_folder(
    tmp_path: Path, name: str, kind: str, backend: str
) -> None:
    dtype = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}[kind]
    folder = tiny_models.write(tmp_path / "folder", CONFIGS[name], dtype=dtype)
    path = gguf_files.from_folder(folder, tmp_path / "model.gguf", kind)
    assert torch.equal(logits(path, backend), logits(folder, backend))


def test_rope_factors_of_the_file_are_those_of_llama3(tmp_path: Path) -> None:
    rope = {"rope_theta": 10000.0, "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}
    rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 32}
    config = transformers.LlamaConfig(**SMALL, rope_parameters=rope)
    folder = tiny_models.write(tmp_path / "folder", config)
    from outrider.model.families import read_decoder_config

    parsed = read_decoder_config(read_config(folder))
    plain_ = 10000.0 ** (-torch.arange(0, 8, 2).float() / 8)
    factors = plain_ / parsed.rope.frequencies(8)
    assert factors.max() > 2
    path = gguf_files.from_folder(folder, tmp_path / "model.gguf")
    assert not torch.allclose(logits(path, "torch"), logits(folder, "torch"), atol=1e-3)
    container_tensors = {"rope_freqs.weight": plain(factors)}
    rewrite(path, container_tensors)
    assert torch.allclose(logits(path, "torch"), logits(folder, "torch"), atol=1e-4)


def rewrite(path: Path, more: dict[str, gguf_files.Stored], **metadata: Any) -> None:
    """The file with more tensors and metadata."""
    from outrider.model.gguf.container import read_container

    old = read_container(path)
    tensors = {
        name: gguf_files.Stored(t.type, t.shape, old.raw(t).tobytes())
        for name, t in old.tensors.items()
    }
    kept = {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in old.metadata.items()}
    gguf_files.write(path.with_suffix(".new"), kept | metadata, tensors | more)
    path.with_suffix(".new").replace(path)


def test_drafts_do_not_change_the_output(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path / "target", vocab_size=300)
    small = write_tiny_llama(tmp_path / "draft", vocab_size=300, num_layers=1)
    target = str(gguf_files.from_folder(folder, tmp_path / "target.gguf"))
    draft = str(gguf_files.from_folder(small, tmp_path / "draft.gguf"))
    for temperature in (0.0, 0.8):
        given: dict[str, Any] = {"max_tokens": 40, "temperature": temperature, "seed": 3}
        plain_text = LLM(target).generate("def add(", speculation=OFF, **given)
        from_folder = LLM(str(folder)).generate("def add(", speculation=OFF, **given)
        assert plain_text.tokens == from_folder.tokens
        drafted = LLM(target, draft_model=draft, num_draft_tokens=3).generate("def add(", **given)
        assert drafted.tokens == plain_text.tokens
        assert drafted.stats.num_accepted > 0


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_tiny_llama(tmp_path_factory.mktemp("tiny"), vocab_size=300)
    return gguf_files.from_folder(folder, folder / "tiny.gguf")


def changed(tiny: Path, path: Path, more: dict[str, gguf_files.Stored], **metadata: Any) -> Path:
    path.write_bytes(tiny.read_bytes())
    rewrite(path, more, **metadata)
    return path


@pytest.mark.parametrize(
    ("key", "value", "line"),
    [
        ("general.architecture", "mamba", "architecture 'mamba'; of GGUF files we run"),
        ("llama.expert_count", 1 << 30, "lacks tensors of 1073741824 experts"),
        ("llama.expert_count", "8", "must be a positive integer"),
        ("llama.rope.dimension_count", 4, "use a model where the two are equal"),
        ("llama.rope.scaling.type", "longrope", "rope scaling 'longrope'"),
        ("llama.block_count", 0, "must be a positive integer"),
        ("llama.attention.head_count", [4, 2], "must be a positive integer"),
    ],
)
def test_a_model_of_another_shape_is_refused_by_name(
    tiny: Path, tmp_path: Path, key: str, value: Any, line: str
) -> None:
    extra = {"llama.rope.scaling.factor": 2.0} if "scaling" in key else {}
    path = changed(tiny, tmp_path / "m.gguf", {}, **{key: value, **extra})
    with pytest.raises(ModelError, match=line):
        load_model(path)


def test_a_tensor_without_a_place_is_refused(tiny: Path, tmp_path: Path) -> None:
    more = {"blk.0.ffn_gate_inp.weight": plain(torch.ones(4, 32))}
    with pytest.raises(ModelError, match=r"has the tensor blk\.0\.ffn_gate_inp\.weight"):
        load_model(changed(tiny, tmp_path / "m.gguf", more))


def test_a_missing_or_misshapen_tensor_is_refused(tiny: Path, tmp_path: Path) -> None:
    more = {"blk.0.attn_q.weight": plain(torch.ones(8, 32))}
    with pytest.raises(ModelError, match=r"blk\.0\.attn_q\.weight in .* has the shape \[8, 32\]"):
        load_model(changed(tiny, tmp_path / "m.gguf", more))
    with pytest.raises(ModelError, match=r"lacks the tensor model\.layers\.2\."):
        load_model(changed(tiny, tmp_path / "n.gguf", {}, **{"llama.block_count": 3}))


def test_a_tensor_that_holds_other_heads_is_refused(tiny: Path, tmp_path: Path) -> None:
    path = changed(tiny, tmp_path / "m.gguf", {}, **{"llama.attention.head_count": 132})
    name = "model.layers.0.self_attn.q_proj.weight"
    held = open_gguf(tiny).tensors["blk.0.attn_q.weight"].shape
    with pytest.raises(ModelError, match="does not hold 132 heads"):
        GgufCheckpoint(open_gguf(path)).tensor(name, held)


def test_sampling_parameters_come_out_of_the_file(tiny: Path, tmp_path: Path) -> None:
    found = {"general.sampling.temp": 0.25, "general.sampling.top_k": 40}
    path = changed(tiny, tmp_path / "m.gguf", {}, **found)
    assert read_generation_config(path) == {"temperature": 0.25, "top_k": 40}
    assert read_generation_config(tiny) == {}


def test_transformers_does_not_run_a_file(tiny: Path) -> None:
    with pytest.raises(ConfigError, match="leave the backend out"):
        load_model(tiny, backend="transformers")


def test_the_name_is_the_files(tiny: Path) -> None:
    assert load_model(tiny).spec.name == "tiny"
    assert json.dumps(read_config(tiny))  # plain data, as from a config.json
