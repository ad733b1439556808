"""Quantised folders that the libraries owning the forms wrote, against what these read."""

from __future__ import annotations

import json
import shutil
import tarfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from native_models import random_tokens
from outrider import native
from outrider.errors import ModelError
from outrider.model.checkpoints import open_checkpoint
from outrider.model.driver import Driver
from outrider.model.load import load_model
from owned_folders import ARCHIVE, FORMS, LIBRARIES, digest

TOKENS = random_tokens(24, 32)
# What the native executor computes in blocks. So it does with an act-order within one group.
PACKED = ["gptq", "gptq 8 bit", "gptq whole rows", "int4", "int8"]
WIDE = "model.layers.0.self_attn.q_proj.weight"  # two groups, in all forms but gpt-oss's


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("owned")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(place, filter="data")
    return place


def read_by_owner(folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Some matrices, and the digests of all."""
    with safe_open(folder / "read.safetensors", "pt") as held:
        return {key: held.get_tensor(key) for key in held.offset_keys()}, held.metadata()


def shapes(folder: Path) -> dict[str, torch.Size]:
    """Of every tensor, as transformers implies them from config.json."""
    config = transformers.AutoConfig.from_pretrained(folder)
    config.quantization_config = None
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    return {key: value.shape for key, value in model.state_dict().items()}


def read_here(folder: Path, key: str, shape: torch.Size) -> torch.Tensor:
    """float32. Experts of gpt-oss, which Outrider reads one by one, as transformers stacks them."""
    read = open_checkpoint(folder).tensor
    if len(shape) == 2:
        return read(key, shape).float()
    stem, _, part = key.rpartition(".")
    count, inputs, outputs = shape
    experts = []
    for expert in range(count):
        of = f"{stem}.{expert}"
        if part == "down_proj":
            whole = read(f"{of}.down_proj.weight", (outputs, inputs))
        else:
            half = (outputs // 2, inputs)
            gate, up = (read(f"{of}.{name}_proj.weight", half) for name in ("gate", "up"))
            whole = torch.stack([gate, up], 1).flatten(0, 1)
        experts.append(whole.t())
    return torch.stack(experts).float()


def test_the_archive_is_complete(folders: Path) -> None:
    assert {place.name for place in folders.iterdir() if place.is_dir()} == set(FORMS)
    origin = json.loads((folders / "origin.json").read_text())
    assert set(origin) == {*LIBRARIES, "triton_kernels"}


@pytest.mark.parametrize("name", FORMS)
def test_every_matrix_as_its_owner_reads_it(name: str, folders: Path) -> None:
    """In the type that the owner computes in, to the last bit."""
    kept, digests = read_by_owner(folders / name)
    sizes = shapes(folders / name)
    assert kept.keys() <= digests.keys() <= sizes.keys()
    if name != "mxfp4":  # of experts alone
        assert digests.keys() == {key for key in sizes if key.endswith("_proj.weight")}
    (dtype,) = {weight.dtype for weight in kept.values()}
    for key, expected in digests.items():
        found = read_here(folders / name, key, sizes[key]).to(dtype)
        if key in kept:
            assert torch.equal(found, kept[key]), key
        assert digest(found) == expected, key


@pytest.mark.parametrize("name", FORMS)
def test_a_model_of_every_form(name: str, folders: Path) -> None:
    """Logits of transformers, which has the weights as they are read here, as plain numbers."""
    folder = folders / name
    config = transformers.AutoConfig.from_pretrained(folder)
    config.quantization_config = None
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    _, digests = read_by_owner(folder)
    stored = load_file(folder / "model.safetensors")
    model.load_state_dict(
        {
            key: read_here(folder, key, value.shape) if key in digests else stored[key].float()
            for key, value in model.state_dict().items()
        }
    )
    with torch.no_grad():
        expected = model(torch.tensor([TOKENS])).logits[0]
    for backend in ("torch", "native") if native.available() else ("torch",):
        loaded = load_model(folder, backend=backend, dtype="float32")
        found = Driver(loaded).forward({"a": TOKENS}).logits["a"]
        torch.testing.assert_close(found, expected, atol=3e-5, rtol=1e-4)
    whole = Driver(load_model(folder)).forward({"a": TOKENS}).logits["a"]
    assert 0 < float((whole - expected).square().mean().sqrt() / expected.std()) < 0.05


@pytest.mark.parametrize("name", sorted(FORMS.keys() - {"mxfp4"}))
def test_blocks_hold_what_the_owner_reads(name: str, folders: Path) -> None:
    checkpoint: Any = open_checkpoint(folders / name)
    kind = checkpoint.kind_of(WIDE) - native.PACKED
    assert (kind >= 0) == (name in PACKED)
    if name in PACKED:
        expected = read_by_owner(folders / name)[0][WIDE]
        with checkpoint.blocks(WIDE, expected.shape) as (blocks, _):
            found = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType(kind))
        assert torch.equal(torch.from_numpy(np.array(found)).to(expected.dtype), expected)


def test_bits_whose_packing_varies_are_refused(folders: Path, tmp_path: Path) -> None:
    config = json.loads((folders / "int4" / "config.json").read_text())
    config["quantization_config"]["config_groups"]["group_0"]["weights"]["num_bits"] = 3
    (tmp_path / "config.json").write_text(json.dumps(config))
    shutil.copy(folders / "int4" / "model.safetensors", tmp_path)
    with pytest.raises(ModelError, match="compressed-tensors with 3 bits"):
        load_model(tmp_path)


@pytest.mark.parametrize("kind", ["one scale", "exponents"])
def test_scales_of_fp8_that_no_tiny_folder_has(kind: str, tmp_path: Path) -> None:
    """One scale for a matrix that is larger than a block, and powers of two as plain bytes."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    code = torch.randn(256, 256, generator=torch.Generator().manual_seed(1))
    code = code.to(torch.float8_e4m3fn)
    scale = torch.full((1, 1), 0.37)
    if kind == "exponents":
        scale = torch.tensor([[120, 121], [119, 127]], dtype=torch.uint8)
    about = {"quant_method": "fp8", "weight_block_size": None if kind == "one scale" else [128] * 2}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": about}))
    save_file({"a.weight": code, "a.weight_scale_inv": scale}, tmp_path / "model.safetensors")
    read = Fp8Dequantize(None).convert({"weight": code, "weight_scale_inv": scale})["weight"]
    found = open_checkpoint(tmp_path).tensor("a.weight", (256, 256))
    assert torch.equal(found.to(read.dtype), read)
