"""Decides, before any weight is read, whether decoding with an architecture can be exact."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from outrider.errors import ModelError
from outrider.model.rope import LONGROPE_ENDS

_ATTENTION_TYPES = {"full_attention", "sliding_attention", "chunked_attention"}
_DEFAULT_POSITIONS = 2048  # of configs without a limit


def check_architecture(folder: Path, raw: Mapping[str, Any]) -> Any:
    """The folder's config as transformers reads it; `ModelError` for a model we cannot serve.

    Code inside a folder (`auto_map`) is never run: transformers' own class serves the model types
    that it knows, and every other type is refused.
    """
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING as MAPPING

    kind = raw["model_type"]
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises all kinds
        if raw.get("auto_map"):
            raise ModelError(
                f"{folder} brings its own code for {kind!r}, which we do not run; "
                "use a model that transformers knows"
            ) from error
        line = " ".join(str(error).split())[:200]
        raise ModelError(
            f"transformers cannot read {folder / 'config.json'} ({line}); "
            "update transformers or use another model"
        ) from error
    not_causal = ModelError(
        f"{folder} holds a {_architecture(raw)}, not a causal language model; "
        "use a model whose architecture ends in ForCausalLM"
    )
    if config.is_encoder_decoder or type(config) not in MAPPING:
        raise not_causal
    model_class = MAPPING[type(config)]
    classes = model_class if isinstance(model_class, tuple) else (model_class,)
    stated = {str(name).lower() for name in raw.get("architectures") or []}  # PhiMoE or Phimoe
    fitting = [c for c in classes if c.__name__.lower() in stated]
    if stated and not fitting:
        raise not_causal
    model_class = (fitting or classes)[0]
    _refuse_state(model_class, config, kind)
    return config


def _architecture(raw: Mapping[str, Any]) -> str:
    return str((raw.get("architectures") or [raw["model_type"]])[0])


def _refuse_state(model_class: Any, config: Any, kind: str) -> None:
    types = set(getattr(config.get_text_config(), "layer_types", None) or [])
    others = types - _ATTENTION_TYPES
    selective = sorted(t for t in others if t.endswith("_attention") and t != "linear_attention")
    if selective:
        raise ModelError(
            f"{kind!r} models choose or compress the keys they see, by an indexer or in groups "
            f"({selective[0]}), which our KV store does not keep; "
            "use a model with full or sliding attention"
        )
    # A class that can keep a state keeps none if all of its layers are attention.
    if others or (getattr(model_class, "_is_stateful", False) and not types):
        raise ModelError(
            f"Outrider has no description of the recurrent layers of {kind!r} models yet, and the "
            "recurrent state of transformers cannot go back when drafts are refused; use a model "
            "type that docs/reference/models.md lists with a path"
        )
    if not model_class.is_backend_compatible():
        raise ModelError(
            f"{kind!r} models in transformers ignore the attention setting that our KV store "
            "needs; use another architecture"
        )


def max_positions(
    config: Any, windows: Sequence[int | None], masked: Iterable[int] = ()
) -> tuple[int, str]:
    """The longest sequence for which every layer computes what it was trained for, and why it is
    shorter than the config says, if it is.

    `windows` are the sliding windows that the layers request, `masked` those that the model's own
    masks would have. The result is below the configured limit if a rope changes its frequencies
    with the length (stored keys would become wrong), or if a window or chunk stands only in the
    config or in a mask and no layer requests it.
    """
    limits = [(int(getattr(config, "max_position_embeddings", None) or _DEFAULT_POSITIONS), "")]
    for rope in _ropes(config):
        if rope.get("rope_type") == "longrope" and rope["short_factor"] != rope["long_factor"]:
            original = int(rope.get("original_max_position_embeddings") or limits[0][0])
            limits.append((original, LONGROPE_ENDS))
    in_mask = "a window of this length stands in its mask only, which its attention does not see"
    limits += [(size, in_mask) for size in masked if size not in windows]
    types = getattr(config, "layer_types", None) or ["full_attention"] * len(windows)
    window = getattr(config, "sliding_window", None)
    for kind, seen in zip(types, windows, strict=True):
        if kind == "sliding_attention" and seen is None and window:
            limits.append((int(window), in_mask))
        if kind == "chunked_attention":
            limits.append((int(config.attention_chunk_size), in_mask))
    return min(limits, key=lambda limit: limit[0])


def reach_length(config: Any, length: int | None) -> None:
    """Gives a longrope that ends below `length` its long factors for all texts, in place."""
    for rope in _ropes(config):
        original = rope.get("original_max_position_embeddings")
        if length and original and length > int(original) and rope.get("long_factor"):
            rope["short_factor"] = rope["long_factor"]


def _ropes(config: Any) -> list[dict[str, Any]]:
    """The rope parameters: one set, or one per layer type."""
    parameters = getattr(config, "rope_parameters", None) or {}
    nested: list[dict[str, Any]] = [v for v in parameters.values() if isinstance(v, dict)]
    return nested or [parameters]
