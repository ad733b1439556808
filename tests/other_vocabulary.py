"""The same model under other ids: what two families with alike tokenizers look like to us."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file


def write_with_other_ids(source: Path, folder: Path) -> Path:
    """Copies a model with tied embeddings; id i becomes n - 1 - i. Returns `folder`."""
    shutil.copytree(source, folder)
    tokenizer = json.loads((source / "tokenizer.json").read_text(encoding="utf-8"))
    weights = load_file(source / "model.safetensors")
    embedding = weights["model.embed_tokens.weight"]
    last = len(embedding) - 1
    vocabulary = tokenizer["model"]["vocab"]
    tokenizer["model"]["vocab"] = {token: last - id for token, id in vocabulary.items()}
    for added in tokenizer["added_tokens"]:
        added["id"] = last - added["id"]
    weights["model.embed_tokens.weight"] = embedding.flip(0).contiguous()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    _write(folder / "tokenizer.json", tokenizer)
    for name in ("config.json", "generation_config.json"):
        if (source / name).is_file():
            config = json.loads((source / name).read_text(encoding="utf-8"))
            for key in ("bos_token_id", "eos_token_id"):
                config[key] = last - config[key]
            _write(folder / name, config)
    return folder


def _write(path: Path, value: object) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")
