"""Models of the Hugging Face hub: what a name means, and which files of its repository we need.

    owner/name             safetensors, else pickled tensors, else the GGUF file (Q4_K_M of several)
    owner/name:Q8_0        the GGUF file of this type
    owner/name/FILE.gguf   this GGUF file
    owner/name@REVISION    any of these at a branch, tag or commit: owner/name@v1:Q8_0

What is in the cache needs no network. `outrider` never looks for a newer version by itself.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from outrider.errors import ModelError, NoSuchModel
from outrider.model.gguf.files import SPLIT, split_names

_NAME = re.compile(
    r"(?P<repo>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w.-]+))?"
    r"(?::(?P<kind>[\w-]+)|/(?P<file>.+\.gguf))?",
    re.IGNORECASE,
)
_BESIDE = (".json", ".jinja")
_USUAL = "Q4_K_M"


@dataclass(frozen=True, slots=True)
class HubName:
    repo: str
    revision: str | None = None
    kind: str | None = None  # of a GGUF file
    file: str | None = None  # a GGUF file's path in the repository

    @classmethod
    def parse(cls, text: str) -> HubName | None:
        """None if no hub name is spelled like this."""
        match = _NAME.fullmatch(text)
        return None if match is None or "/." in text or text[0] == "." else cls(**match.groupdict())

    def choose(self, files: Iterable[str]) -> list[str]:
        """The files of a repository that the name means; `ModelError` if it holds none."""
        files = list(files)
        packed = sorted(f for f in files if f.lower().endswith(".gguf") and "mmproj" not in f)
        if self.file is not None:
            return self._with_parts(self.file, files)
        if self.kind is not None:
            return self._of_kind(packed, self.kind)
        here = [f for f in files if "/" not in f]
        weights = [f for f in here if f.endswith(".safetensors")]
        if any(f.startswith("model") for f in weights):  # not the same weights in another form
            weights = [f for f in weights if not f.startswith("consolidated")]
        weights = weights or [f for f in here if re.fullmatch(r"pytorch_model.*\.bin", f)]
        weights = weights or [f for f in here if f == "medusa_lm_head.pt"]
        if weights:
            return [*(f for f in here if f.endswith(_BESIDE)), *weights]
        firsts = [f for f in packed if (m := SPLIT.fullmatch(f)) is None or int(m[2]) == 1]
        if len(firsts) == 1:
            return self._with_parts(firsts[0], files)
        return self._of_kind(packed, _USUAL)

    def _of_kind(self, packed: list[str], kind: str) -> list[str]:
        """The file with this word in its path: `model-Q8_0.gguf`, `Q8_0/model-00001-of-00002`."""
        word = re.compile(rf"(?<![A-Za-z0-9]){re.escape(kind)}(?![A-Za-z0-9_])", re.IGNORECASE)
        for file in packed:
            if word.search(file):
                return self._with_parts(file, packed)
        if not packed:
            raise ModelError(
                f"{self.repo} holds no safetensors and no GGUF file; use another repository"
            )
        some = ", ".join(Path(file).name for file in packed[:8])
        raise NoSuchModel(
            f"{self.repo} holds no single GGUF file of the type {kind}; choose one as "
            f"{self.repo}/FILE (there are: {some}{', ...' if len(packed) > 8 else ''})"
        )

    def _with_parts(self, file: str, files: list[str]) -> list[str]:
        folder, _, name = file.rpartition("/")
        parts = [f"{folder}/{part}" if folder else part for part in split_names(name)]
        missing = [part for part in parts if part not in files]
        if missing:
            raise NoSuchModel(f"{self.repo} has no file {missing[0]}; check the name")
        return parts

    def find_cached(self) -> Path | None:
        """The folder or GGUF file in the cache; None if it, or a part of it, is not there."""
        from huggingface_hub import snapshot_download

        try:
            root = Path(
                snapshot_download(
                    self.repo, revision=self.revision, local_files_only=True, allow_patterns=[]
                )
            )
            held = [str(f.relative_to(root)) for f in root.rglob("*") if f.is_file()]
            return self._place(root, held) if _is_whole(root, self.choose(held)) else None
        except Exception:  # of the library: there is no such snapshot; ours: not these files
            return None

    def download(self) -> Path:
        """The folder or GGUF file, of which the files that the cache lacks are downloaded."""
        from huggingface_hub import HfApi, snapshot_download

        try:
            found = HfApi().model_info(self.repo, revision=self.revision)
            files = self.choose(file.rfilename for file in found.siblings or [])
            patterns = [re.sub(r"([\[*?])", r"[\1]", file) for file in files]
            root = snapshot_download(self.repo, revision=self.revision, allow_patterns=patterns)
        except ModelError:
            raise
        except Exception as error:
            raise NoSuchModel(self._reason(error)) from error
        return self._place(Path(root), files)

    def _place(self, root: Path, files: list[str]) -> Path:
        packed = [file for file in self.choose(files) if file.lower().endswith(".gguf")]
        return root / packed[0] if packed else root

    def _reason(self, error: Exception) -> str:
        known = {
            "GatedRepoError": "wants you to accept its conditions; do so on its page and set "
            "HF_TOKEN",
            "RepositoryNotFoundError": "is not on the hub, or private; check the name, or set "
            "HF_TOKEN",
            "RevisionNotFoundError": f"has no revision {self.revision}; check it",
        }
        for kind in type(error).__mro__:
            if kind.__name__ in known:
                return f"{self.repo} {known[kind.__name__]}"
        return (
            f"no folder {self.repo}, and the hub did not provide it ({type(error).__name__}); "
            "check the name and the network, or give a local folder"
        )


def _is_whole(root: Path, files: list[str]) -> bool:
    """Whether no shard is missing that an index names."""
    named = set()
    for file in files:
        if file.endswith((".safetensors.index.json", ".bin.index.json")):
            weight_map = json.loads((root / file).read_text(encoding="utf-8"))["weight_map"]
            whole = file.replace(".index.json", "")
            named |= set() if whole in files else set(weight_map.values())
    return named <= set(files)
