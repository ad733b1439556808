"""Prompts for models that can fill a gap between two texts."""

from __future__ import annotations

from outrider.server.asking import encode
from outrider.server.errors import ApiError
from outrider.server.service import Served

# Before the prefix, before the suffix, before the middle.
MARKS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),
)


async def infill(served: Served, prefix: str, suffix: str, param: str) -> list[int]:
    """The tokens of a prompt whose completion is the text between; ApiError if the model cannot."""
    known = {text: id for id, text in served.tokenizer.vocabulary.items()}
    found = next((marks for marks in MARKS if all(mark in known for mark in marks)), None)
    if found is None:
        raise ApiError(400, "this model has no tokens for filling a gap", param=param)
    before, after, middle = (known[mark] for mark in found)
    start = await encode(served, prefix, param, special=False)
    end = await encode(served, suffix, param, special=False)
    return [before, *start, after, *end, middle]
