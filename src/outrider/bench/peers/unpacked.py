"""A target and a drafter as the other programs read them: folders, in a temporary place."""

from __future__ import annotations

import shutil
import weakref
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from outrider.model.gguf.files import is_gguf
from outrider.model.head_kinds import head_kind

NUM_DRAFTS = 4


class Unpacked:
    """Written when first asked for; removed with this object."""

    def __init__(self, target: Path, drafter: Path | None) -> None:
        self.given, self.drafter = target, drafter
        self.kind = None if drafter is None else head_kind(drafter)
        self._place = Path(mkdtemp(prefix="outrider-peers-"))
        weakref.finalize(self, shutil.rmtree, self._place, ignore_errors=True)

    def target(self) -> str:
        """The target as a folder; a GGUF file is dequantised, and stored as bfloat16."""
        if not is_gguf(self.given):
            return str(self.given)
        folder = self._place / "target"
        if not folder.exists():
            from outrider.train.models import load_model, load_tokenizer, save_model

            save_model(load_model(self.given), folder, load_tokenizer(self.given))
        return str(folder)

    def vllm_drafter(self) -> dict[str, Any] | None:
        """What vLLM drafts with, as its --speculative-config; None without a drafter."""
        if self.drafter is None:
            return None
        if self.kind is None:
            found: dict[str, Any] = {"method": "draft_model", "model": str(self.drafter)}
        else:
            from outrider.export.vllm import export_vllm

            found = export_vllm(self.drafter, self.given, self._place / "head")
        return found | {"num_speculative_tokens": NUM_DRAFTS}
