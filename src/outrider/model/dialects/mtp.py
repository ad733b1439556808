"""The layer for multi-token prediction (MTP) that many targets hold after their last one.

Its tensors are in the target's own files or in a folder of their own. The decoder layer inside is
of the target's kind: the target's description reads it. Here are the names of what is around it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from outrider.errors import ModelError
from outrider.model.families.description import DecoderConfig
from outrider.model.stored import Blocks
from outrider.model.tensors import Source, Weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """Modules of an MTP layer; @ stands for its number. `layer` is what the names of the decoder
    layer's tensors begin with."""

    layer: str
    embedding_norm: str
    hidden_norm: str
    projection: str  # of embedding and hidden state, side by side
    final_norm: str = ""  # "": none
    hidden_first: bool = False  # the hidden state is the first of the two
    feeds_normed: bool = True  # the next row reads the output as the last norm leaves it

    def numbered(self, number: int) -> Names:
        """The names of one layer."""
        found: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        named = {k: v.replace("@", str(number)) for k, v in found.items() if isinstance(v, str)}
        return replace(self, **(found | named))


def _inside(layer: str, embedding: str, hidden: str, projection: str, last: str) -> Names:
    """Everything is a module of the layer."""
    return Names(
        layer=layer,
        embedding_norm=layer + embedding,
        hidden_norm=layer + hidden,
        projection=layer + projection,
        final_norm=layer + last,
    )


_NORMS = ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")
_DIALECTS = (
    _inside("model.layers.@.", "enorm", "hnorm", "eh_proj", "shared_head.norm"),  # DeepSeek, GLM
    Names(  # Qwen
        layer="mtp.layers.@.",
        embedding_norm="mtp.pre_fc_norm_embedding",
        hidden_norm="mtp.pre_fc_norm_hidden",
        projection="mtp.fc",
        final_norm="mtp.norm",
    ),
    Names(  # Ernie
        layer="model.mtp_block.@.",
        embedding_norm="model.mtp_emb_norm.@",
        hidden_norm="model.mtp_hidden_norm.@",
        projection="model.mtp_linear_proj.@",
        feeds_normed=False,
    ),
    replace(_inside("model.mtp_layers.@.", *_NORMS), hidden_first=True),  # MiMo
    _inside("mtp_layers.@.", *_NORMS),  # speculators
)
_FEED_OUTPUTS = ("glm4_moe", "glm4_moe_lite")  # families that feed back what no norm has changed


def find_mtp(stored: Iterable[str], family: str = "") -> Names | None:
    """The names of the first MTP layer, by the names of all tensors; None: there is none.

    `family` is the target's: two that share names feed back different states.
    """
    norms = [name for name in stored if "norm" in name]
    for names in _DIALECTS:
        pattern = re.compile(re.escape(names.hidden_norm).replace("@", r"(\d+)") + r"\.weight")
        found = [match for name in norms if (match := pattern.fullmatch(name))]
        if found:
            number = min(int(match[1]) if pattern.groups else 0 for match in found)
            feeds_normed = names.feeds_normed and family not in _FEED_OUTPUTS
            return replace(names.numbered(number), feeds_normed=feeds_normed)
    return None


class Spliced:
    """A target's tensors whose layer 0 and last norm are those of an MTP layer."""

    def __init__(self, target: Source, own: Source, names: Names, config: DecoderConfig) -> None:
        """`own` holds the MTP layer; `config` describes the decoder of one layer."""
        self._target, self._own = target, own
        places = Weights(target, config)
        self._moved = [(places.prefix_of(0), names.layer)]
        if names.final_norm:
            self._moved.append((f"{places.final_norm_name}.", f"{names.final_norm}."))

    def _find(self, name: str) -> tuple[Source, str]:
        for here, there in self._moved:
            if name.startswith(here):
                return self._own, there + name.removeprefix(here)
        return self._target, name

    def __contains__(self, name: str) -> bool:
        source, stored = self._find(name)
        return stored in source

    def tensor(self, name: str, shape: Sequence[int]) -> torch.Tensor:
        source, stored = self._find(name)
        tensor = source.tensor(stored, shape)
        if stored != name and not bool(torch.isfinite(tensor).all()):
            raise ModelError(f"{stored} has values that are no numbers: the file is damaged")
        return tensor

    def kind_of(self, name: str) -> int:
        source, stored = self._find(name)
        return source.kind_of(stored)

    def blocks(
        self, name: str, shape: Sequence[int]
    ) -> AbstractContextManager[tuple[Blocks, bool]]:
        source, stored = self._find(name)
        return source.blocks(stored, shape)
