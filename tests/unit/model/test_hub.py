"""Names of the hub, against a hub on this machine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import gguf_files
from fake_hub import FakeHub, fake_hub
from outrider.errors import ModelError, NoSuchModel
from outrider.model.bundled import find_folder
from outrider.model.hub import HubName
from outrider.model.load import load_model
from outrider.testing import write_tiny_llama

__all__ = ["fake_hub"]


def add_llama(hub: FakeHub, folder: Path, name: str = "owner/name", num_layers: int = 2) -> Path:
    folder = write_tiny_llama(folder, vocab_size=300, num_layers=num_layers)
    hub.add(name, folder)
    return folder


def add_shards(hub: FakeHub, folder: Path) -> None:
    """The model in two files, beside what nobody needs."""
    tensors = load_file(folder / "model.safetensors")
    files = {p.name: p.read_bytes() for p in folder.iterdir() if p.suffix == ".json"}
    weight_map: dict[str, str] = {}
    for number, names in enumerate((list(tensors)[::2], list(tensors)[1::2]), 1):
        shard = f"model-{number:05}-of-00002.safetensors"
        save_file({name: tensors[name] for name in names}, folder / shard)
        files[shard] = (folder / shard).read_bytes()
        weight_map |= dict.fromkeys(names, shard)
    files["model.safetensors.index.json"] = json.dumps({"weight_map": weight_map}).encode()
    unneeded = ("pytorch_model.bin", "consolidated.safetensors", "original/params.json")
    hub.add("owner/shards", files | dict.fromkeys((*unneeded, "README.md"), b"unneeded"))


def test_a_folder_is_downloaded_once(fake_hub: FakeHub, tmp_path: Path) -> None:
    folder = add_llama(fake_hub, tmp_path / "model")
    fake_hub.repositories["owner/name"].revisions["main"]["pytorch_model.bin"] = b"unneeded"
    model = load_model("owner/name")
    assert sorted(fake_hub.downloads) == sorted(path.name for path in folder.iterdir())
    assert model.spec.num_parameters == load_model(folder).spec.num_parameters
    asked = fake_hub.num_requests
    fake_hub.close()
    found = find_folder("owner/name")
    assert (found / "config.json").read_bytes() == (folder / "config.json").read_bytes()
    assert fake_hub.num_requests == asked


def test_shards_come_together_and_a_missing_one_is_fetched(
    fake_hub: FakeHub, tmp_path: Path
) -> None:
    add_shards(fake_hub, write_tiny_llama(tmp_path / "model", vocab_size=300))
    found = find_folder("owner/shards")
    load_model(found)
    assert not {"README.md", "consolidated.safetensors"} & set(fake_hub.downloads)
    shard = found / "model-00002-of-00002.safetensors"
    shard.resolve().unlink()
    shard.unlink()
    fake_hub.downloads.clear()
    assert find_folder("owner/shards") == found
    assert fake_hub.downloads == [shard.name]


def test_a_download_that_was_cut_is_completed(fake_hub: FakeHub, tmp_path: Path) -> None:
    folder = add_llama(fake_hub, tmp_path / "model")
    fake_hub.cut_after = 5000
    load_model("owner/name")
    assert fake_hub.downloads.count("model.safetensors") == 2
    stored = (find_folder("owner/name") / "model.safetensors").read_bytes()
    assert stored == (folder / "model.safetensors").read_bytes()


def test_a_revision_is_another_model(fake_hub: FakeHub, tmp_path: Path) -> None:
    add_llama(fake_hub, tmp_path / "main", num_layers=1)
    old = write_tiny_llama(tmp_path / "old", vocab_size=300, num_layers=2)
    fake_hub.add("owner/name", old, "v1")
    assert load_model("owner/name").spec.num_layers == 1
    assert load_model("owner/name@v1").spec.num_layers == 2
    commit = fake_hub.repositories["owner/name"].commit("v1")
    assert load_model(f"owner/name@{commit}").spec.num_layers == 2
    with pytest.raises(NoSuchModel, match="has no revision v2"):
        load_model("owner/name@v2")


def test_files_of_several_types(fake_hub: FakeHub, tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path / "model", vocab_size=300)
    names = ("tiny-Q4_K_M.gguf", "tiny-Q4_K_S.gguf", "BF16/tiny-BF16.gguf", "mmproj-tiny.gguf")
    files = {}
    for name in names:
        path = gguf_files.from_folder(folder, tmp_path / "m.gguf", **{"general.name": name})
        files[name] = path.read_bytes()
    fake_hub.add("owner/tiny-gguf", {**files, "config.json": b"{}"})
    assert load_model("owner/tiny-gguf").spec.name == "tiny-Q4_K_M"
    assert fake_hub.downloads == ["tiny-Q4_K_M.gguf"]
    assert load_model("owner/tiny-gguf:q4_k_s").spec.name == "tiny-Q4_K_S"
    assert load_model("owner/tiny-gguf@main:BF16").spec.name == "tiny-BF16"
    assert load_model("owner/tiny-gguf/BF16/tiny-BF16.gguf").spec.name == "tiny-BF16"
    assert len(fake_hub.downloads) == 3
    with pytest.raises(NoSuchModel, match=r"of the type Q2_K; choose .* tiny-Q4_K_M\.gguf"):
        load_model("owner/tiny-gguf:Q2_K")
    with pytest.raises(NoSuchModel, match=r"no file other\.gguf"):
        load_model("owner/tiny-gguf/other.gguf")


def test_all_parts_of_a_split_file() -> None:
    parts = [f"Q8_0/big-Q8_0-{i:05}-of-00003.gguf" for i in (1, 2, 3)]
    name = HubName.parse("owner/big:Q8_0")
    assert name is not None
    assert name.choose(parts) == parts
    assert HubName("owner/big").choose(parts) == parts
    with pytest.raises(NoSuchModel, match="00003-of-00003"):
        name.choose(parts[:2])


def test_quantised_folders_and_pickled_weights(fake_hub: FakeHub, tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path / "model", vocab_size=300)
    files = {p.name: p.read_bytes() for p in folder.iterdir() if p.suffix == ".json"}
    torch.save(load_file(folder / "model.safetensors"), tmp_path / "pytorch_model.bin")
    files["pytorch_model.bin"] = (tmp_path / "pytorch_model.bin").read_bytes()
    fake_hub.add("owner/pickled", files)
    spec = load_model("owner/pickled").spec
    assert spec.num_parameters == load_model(folder).spec.num_parameters


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("owner/nothing", "is not on the hub, or private"),
        ("owner/gated", "accept its conditions"),
        ("owner/empty", "no safetensors and no GGUF file"),
    ],
)
def test_what_the_hub_does_not_give(
    fake_hub: FakeHub, tmp_path: Path, name: str, line: str
) -> None:
    add_llama(fake_hub, tmp_path / "model", "owner/gated")
    fake_hub.repositories["owner/gated"].gated = True
    fake_hub.add("owner/empty", {"README.md": b""})
    with pytest.raises(ModelError, match=line) as caught:
        load_model(name)
    assert "\n" not in str(caught.value)


def test_without_a_network(fake_hub: FakeHub) -> None:
    fake_hub.close()
    with pytest.raises(NoSuchModel, match="check the name and the network"):
        load_model("owner/name")


@pytest.mark.parametrize("text", ["name", "a/b/c", "./a/b", "a/../b.gguf", "a/b@", "a/b:", "/a/b"])
def test_what_is_no_name_of_the_hub(text: str) -> None:
    assert HubName.parse(text) is None
