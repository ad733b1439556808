"""Folders that are not what they should be: one line each, saying what to do."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.errors import ConfigError, ModelError, OutriderError
from outrider.model import load_model
from outrider.model.bundled import bundled_names, bundled_path
from outrider.model.driver import Driver
from outrider.model.families import read_decoder_config
from outrider.model.torch_decoder import TorchDecoder
from outrider.model.weights import Checkpoint, read_eos_ids
from outrider.testing import write_tiny_llama

NUM_MUTATIONS = 10_000 if "OUTRIDER_EXPLORE" in os.environ else 300


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in config.items() if v != "absent"}))


def edit_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def cut(path: Path, keep: int) -> None:
    path.write_bytes(path.read_bytes()[:keep])


def drop_norm(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["model.norm.weight"]


def widen_norm(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.norm.weight"] = torch.ones(33)


def quantize_norm(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.norm.weight"] = torch.ones(32, dtype=torch.int8)


def to_pickle(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def pickled(folder: Path, shards: int = 1) -> dict[str, torch.Tensor]:
    """The folder's tensors as pickles instead."""
    tensors: dict[str, torch.Tensor] = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names, weight_map = list(tensors), dict[str, str]()
    for i in range(shards):
        file = f"pytorch_model-{i}.bin" if shards > 1 else "pytorch_model.bin"
        torch.save({name: tensors[name] for name in names[i::shards]}, folder / file)
        weight_map |= dict.fromkeys(names[i::shards], file)
    if shards > 1:
        index = json.dumps({"weight_map": weight_map})
        (folder / "pytorch_model.bin.index.json").write_text(index)
    return tensors


@pytest.mark.parametrize("shards", [1, 3])
def test_pickled_tensors_are_read(shards: int, tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path / "model")
    tensors = pickled(folder, shards)
    checkpoint = Checkpoint(folder)
    assert set(checkpoint.names()) == set(tensors)
    for name, tensor in tensors.items():
        assert torch.equal(checkpoint.tensor(name, tensor.shape), tensor)
    load_model(folder)


class RunsCode:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.write_text, (self.path, "run"))


@pytest.mark.parametrize("content", ["code", "object", "list", "old form"])
def test_pickles_run_no_code(content: str, tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path / "model")
    tensors: dict[str, Any] = dict(pickled(folder))
    trace = tmp_path / "trace"
    if content == "code":
        tensors["model.norm.weight"] = RunsCode(trace)
    if content == "object":
        tensors["step"] = 3
    saved: Any = list(tensors.values()) if content == "list" else tensors
    new = content != "old form"
    torch.save(saved, folder / "pytorch_model.bin", _use_new_zipfile_serialization=new)
    if content == "old form":
        load_model(folder)
        return
    with pytest.raises(ModelError, match=r"more than tensors|other things than tensors") as caught:
        load_model(folder)
    assert "\n" not in str(caught.value)
    assert not trace.exists()


def broken_index(folder: Path, content: str) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(content)


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (lambda f: (f / "config.json").unlink(), "has no config.json"),
    "config not JSON": (lambda f: (f / "config.json").write_text("{"), "not readable JSON"),
    "config not text": (lambda f: (f / "config.json").write_bytes(b"\xff\xfe{"), "not readable"),
    "config a list": (lambda f: (f / "config.json").write_text("[]"), "not a JSON object"),
    "no model type": (lambda f: edit_config(f, model_type="absent"), "names no model_type"),
    "no such type": (lambda f: edit_config(f, model_type="nonesuch"), "cannot read"),
    "own code": (
        lambda f: edit_config(f, model_type="nonesuch", auto_map={"AutoModelForCausalLM": "m.M"}),
        "brings its own code",
    ),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "download the weights"),
    "pickles": (to_pickle, "convert them to safetensors"),
    "cut weights": (lambda f: cut(f / "model.safetensors", 20000), "cut short"),
    "cut header": (lambda f: cut(f / "model.safetensors", 40), "cut short"),
    "empty weights": (lambda f: cut(f / "model.safetensors", 0), "cut short"),
    "missing tensor": (lambda f: edit_tensors(f, drop_norm), "lacks the tensor model.norm.weight"),
    "misshapen tensor": (lambda f: edit_tensors(f, widen_norm), r"has shape \[33\]"),
    "quantized tensor": (lambda f: edit_tensors(f, quantize_norm), "stored as torch.int8"),
    "index without map": (lambda f: broken_index(f, "{}"), "no weight_map"),
    "index to nowhere": (
        lambda f: broken_index(f, '{"weight_map": {"model.embed_tokens.weight": "x.safetensors"}}'),
        "lacks x.safetensors|lacks the tensor",
    ),
    "index outside": (
        lambda f: broken_index(f, '{"weight_map": {"model.norm.weight": "../m.safetensors"}}'),
        "lacks",
    ),
    "zero layers": (lambda f: edit_config(f, num_hidden_layers=0), "positive integer"),
    "uneven heads": (lambda f: edit_config(f, num_key_value_heads=3), "divide evenly"),
    "text for a number": (lambda f: edit_config(f, hidden_size="big"), "positive integer"),
    "odd end of text": (lambda f: edit_config(f, eos_token_id="end"), "eos_token_id"),
    "tokenizer not JSON": (lambda f: (f / "tokenizer.json").write_text("no"), "not readable JSON"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_broken_folders(fault: str, tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path / "model")
    damage, message = FAULTS[fault]
    damage(folder)
    with pytest.raises(ModelError, match=message) as caught:
        load_model(folder)
    assert "\n" not in str(caught.value)


def test_mutated_headers_load_or_are_refused(tmp_path: Path) -> None:
    file = write_tiny_llama(tmp_path / "model", num_layers=1) / "model.safetensors"
    whole = file.read_bytes()
    end = 8 + int.from_bytes(whole[:8], "little")
    rng = random.Random(int(os.environ.get("OUTRIDER_EXPLORE_SEED", "0")))
    refused, lines = 0, set()
    for _ in range(NUM_MUTATIONS):
        raw = bytearray(whole)
        for _ in range(rng.randint(1, 3)):
            at = rng.randrange(8 if rng.random() < 0.7 else end)
            size = rng.choice([1, 1, 4, 8])
            fill = rng.choice([b"\xff", b"\0", b"\x7f", b"9", b'"', b"["])
            raw[at : at + size] = fill * size
        fresh = tmp_path / "fresh"
        fresh.write_bytes(raw[: len(whole)])
        fresh.replace(file)  # the last one may still be mapped
        try:
            Driver(load_model(file.parent)).forward({"a": [1, 2, 3]})
        except ModelError as error:
            refused += 1
            lines.add(str(error))
    assert refused > 0
    assert not [line for line in lines if "\n" in line]


def test_paths_that_are_no_folders(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "nowhere", tmp_path / "file", "./nowhere", "nowhere", "", "a/b/c"):
        with pytest.raises(ModelError) as caught:
            load_model(path)
        assert "\n" not in str(caught.value)


def test_options_are_checked(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path / "model")
    options: list[dict[str, Any]] = [
        {"backend": "pytorch"},
        {"dtype": "float64"},
        {"device": "gpu"},
        {"device": "cuda:99"} if not torch.cuda.is_available() else {"device": "quantum"},
    ]
    for option in options:
        with pytest.raises(ConfigError) as caught:
            load_model(folder, **option)
        assert "\n" not in str(caught.value)
    with pytest.raises(OutriderError, match="native step"):
        load_model(folder, backend="torch", dtype="int8")


def test_bundled_names() -> None:
    with pytest.raises(ModelError, match="no bundled model 'nonesuch'"):
        bundled_path("nonesuch")
    with pytest.raises(ModelError, match="no bundled model 'nonesuch'"):
        load_model("bundled:nonesuch")
    for name in bundled_names():
        assert (bundled_path(name) / "config.json").is_file()


def test_checkpoint_reads_only_what_is_asked(tmp_path: Path) -> None:
    checkpoint = Checkpoint(write_tiny_llama(tmp_path / "model"))
    assert "model.norm.weight" in checkpoint
    assert "lm_head.weight" not in checkpoint
    assert checkpoint.tensor("model.norm.weight", [32]).dtype == torch.float32
    assert len(checkpoint.names()) == 2 + 2 * 9


def test_end_of_text_ids(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path / "model")
    assert read_eos_ids(folder, {}) == ()
    assert read_eos_ids(folder, {"eos_token_id": 3}) == (3,)
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    assert read_eos_ids(folder, {"eos_token_id": 3}) == (1, 2)
    assert TorchDecoder.load(folder).spec.eos_ids == (1, 2)


def test_what_the_compact_decoder_supports() -> None:
    llama = {
        "model_type": "llama",
        "vocab_size": 8,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    config = read_decoder_config(llama)
    assert (config.num_kv_heads, config.head_dim, config.max_positions) == (2, 4, 2048)
    assert (config.dtype, config.tied, config.windows) == ("float32", False, (None,))
    for change in (
        {"model_type": "rwkv"},
        {"hidden_act": "laplace"},
        {"quantization_config": {"bits": 4}},
        {"architectures": ["LlamaForSequenceClassification"]},
        {"rope_scaling": {"type": "longrope", "factor": 2.0}},
        {"rope_scaling": {"type": "linear"}},
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
    ):
        with pytest.raises(ModelError):
            read_decoder_config(llama | change)
