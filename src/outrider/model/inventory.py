"""The models on this machine: bundled, in packages, in the hub's cache, GGUF files in folders."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from outrider.errors import ModelError
from outrider.model.bundled import bundled_names, bundled_path
from outrider.model.gguf.files import SPLIT, is_gguf
from outrider.model.head_kinds import head_kind
from outrider.model.named import PACKAGED
from outrider.model.weights import read_config, read_json

WEIGHTS = (".safetensors", ".bin", ".pt", ".gguf")


@dataclass(slots=True)
class Found:
    """A model or a drafting head, by the name that every command takes."""

    name: str
    path: Path
    place: str
    num_bytes: int
    format: str
    context: int | None
    head: str | None  # the kind of heads; None: a language model
    sizes: tuple[Any, Any]  # of the hidden state and the vocabulary
    drafters: list[str] = field(default_factory=list)


def inventory(folders: Iterable[Path] = ()) -> list[Found]:
    """All that can be read; each model with the heads that fit it by their sizes."""
    found = []
    for name, path, place in _places(folders):
        try:
            found.append(_describe(name, path, place))
        except (ModelError, OSError):
            continue  # no model, or one that is not whole
    heads = [item for item in found if item.head is not None]
    models = [item for item in found if item.head is None]
    for item in models:
        item.drafters = [head.name for head in heads if head.sizes == item.sizes]
    return [*models, *heads]


def _places(folders: Iterable[Path]) -> Iterator[tuple[str, Path, str]]:
    for name in bundled_names():
        yield ("bundled" if name == "target" else f"bundled:{name}"), bundled_path(name), "bundled"
    for name, known in PACKAGED.items():
        path = known.find()
        if path is not None:
            yield name, path, f"package {known.package}"
    yield from _cached()
    for folder in folders:
        for path in sorted(folder.rglob("*.gguf")):
            part = SPLIT.fullmatch(path.name)
            if part is None or int(part[2]) == 1:
                yield str(path), path, "file"


def _cached() -> Iterator[tuple[str, Path, str]]:
    from huggingface_hub import CacheNotFound, scan_cache_dir

    try:
        repositories = scan_cache_dir().repos
    except CacheNotFound:
        return
    for repository in sorted(repositories, key=lambda repo: repo.repo_id):
        if repository.repo_type != "model" or not repository.revisions:
            continue
        newest = max(repository.revisions, key=lambda revision: revision.last_modified)
        root = newest.snapshot_path
        packed = sorted(root.rglob("*.gguf"))
        if not packed or any(root.glob("*.safetensors")):
            yield repository.repo_id, root, "hub cache"
        for path in packed:
            yield f"{repository.repo_id}/{path.relative_to(root)}", path, "hub cache"


def _describe(name: str, path: Path, place: str) -> Found:
    if is_gguf(path):
        split = SPLIT.fullmatch(path.name)
        files = [path] if split is None else sorted(path.parent.glob(f"{split[1]}-*.gguf"))
        head, config, form = None, read_config(path), "GGUF"
    else:
        files = [file for file in path.iterdir() if file.suffix in WEIGHTS]
        head = head_kind(path)
        config = read_config(path) if head is None else read_json(path / "config.json")
        form = files[0].suffix[1:] if files else ""
    if not files:
        raise ModelError(f"{path} holds no weights")
    return Found(
        name,
        path,
        place,
        sum(file.stat().st_size for file in files),
        form,
        config.get("max_position_embeddings"),
        head,
        (config.get("hidden_size"), config.get("vocab_size")),
    )
