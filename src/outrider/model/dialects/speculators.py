"""The `speculators` format: a config with the layers in an object of its own, one for all kinds.

Translated into the fields of each kind, whose own dialect then reads it. Taps are taps here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outrider.errors import ModelError
from outrider.model.dialects.dflash import read_dflash
from outrider.model.dialects.eagle import read_eagle
from outrider.model.dialects.eagle3 import read_eagle3
from outrider.model.dialects.folder import Fields, Tensors
from outrider.model.head_base import Head
from outrider.model.head_kinds import SPECULATORS

_OURS = ("transformer_layer_config", "speculators_config", "speculators_model_type",
         "speculators_version", "auto_map", "embed_requires_grad", "architectures")  # fmt: skip


def read_speculators(fields: Fields, tensors: Tensors, num_layers: int | None) -> Head:
    kind = fields.values["speculators_model_type"]
    flat = Fields(_flattened(fields), fields.folder)
    if kind in ("dflash", "dspark"):
        head: Head = read_dflash(flat, tensors, num_layers)
    elif kind in ("eagle3", "peagle"):
        head = read_eagle3(flat, tensors, num_layers)
    elif kind == "eagle":
        head = _read_eagle(flat, tensors, num_layers)
    else:
        raise ModelError(
            f"{fields.folder} holds a {kind} speculator, which is not supported: "
            f"give one of {', '.join(SPECULATORS)}"
        )
    flat.finish()
    fields.ignore(*fields.values)
    head.num_draft_tokens = num_draft_tokens(fields.values)
    return head


def _read_eagle(flat: Fields, tensors: Tensors, num_layers: int | None) -> Head:
    """Its layers' config is the verifier's: there is one layer, whatever that says."""
    tensors.rename("fusion_fc.", "fc.")
    tensors.rename("transformer.", "layers.0.")
    flat.must_be("layernorms", False)
    flat.ignore("transformer_layer_architecture")
    flat.values["bias"] = flat.get("fusion_bias", False)
    flat.values["num_hidden_layers"] = 1
    return read_eagle(flat, tensors, num_layers)


def _flattened(fields: Fields) -> dict[str, Any]:
    """The fields as other dialects name them; those of the draft's layers come first."""
    inner = fields.inner("transformer_layer_config")
    top = {name: value for name, value in fields.values.items() if name not in _OURS}
    # The draft's own switch is at the top: that of the layers is copied from the target.
    tied = {"tie_word_embeddings": bool(top.get("tie_word_embeddings"))}
    kind = {"speculators_model_type": fields.values["speculators_model_type"]}
    return inner.values | top | tied | kind


def num_draft_tokens(config: Mapping[str, Any]) -> int | None:
    """The tokens a step that a config of this format proposes."""
    methods = (config.get("speculators_config") or {}).get("proposal_methods") or [{}]
    found = methods[0].get("speculative_tokens")
    return int(found) if isinstance(found, int) else None
