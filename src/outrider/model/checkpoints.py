"""Opens the tensors of a model, whatever holds them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from outrider.model.gguf.files import is_gguf
from outrider.model.quantized.forms import METHODS, MXFP4
from outrider.model.weights import Checkpoint, read_json

if TYPE_CHECKING:
    from outrider.model.gguf.checkpoint import GgufCheckpoint


def open_checkpoint(folder: Path) -> Checkpoint | GgufCheckpoint:
    """The tensors of a folder or of a GGUF file."""
    if is_gguf(folder):
        from outrider.model.gguf.checkpoint import GgufCheckpoint
        from outrider.model.gguf.container import open_gguf

        return GgufCheckpoint(open_gguf(folder))
    quantisation = read_json(folder / "config.json").get("quantization_config")
    if not isinstance(quantisation, dict):
        return Checkpoint(folder)
    method = str(quantisation.get("quant_method"))
    if method == MXFP4:
        from outrider.model.quantized.mxfp4 import Mxfp4Checkpoint

        return Mxfp4Checkpoint(folder)
    if method in METHODS:
        from outrider.model.quantized.checkpoint import QuantizedCheckpoint

        return QuantizedCheckpoint(folder, quantisation)
    return Checkpoint(folder)
