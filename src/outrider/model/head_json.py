"""The fields of a head's config.json that describe its layers, as transformers names them."""

from __future__ import annotations

from typing import Any, Protocol

from outrider.model.rope import RopeConfig, rope_json


class Layers(Protocol):
    """What the configs of heads with Llama's or Qwen3's layers share."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def num_attention_heads(self) -> int: ...
    @property
    def num_key_value_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def max_position_embeddings(self) -> int: ...
    @property
    def rms_norm_eps(self) -> float: ...
    @property
    def rope(self) -> RopeConfig: ...
    @property
    def windows(self) -> tuple[int | None, ...]: ...
    @property
    def attention_bias(self) -> bool: ...


_PLAIN = (
    *("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("intermediate_size", "max_position_embeddings", "rms_norm_eps", "attention_bias"),
)


def layers_json(config: Layers) -> dict[str, Any]:
    written = {name: getattr(config, name) for name in _PLAIN} | rope_json(config.rope)
    written["hidden_act"] = "silu"
    if any(config.windows):
        written |= {
            "sliding_window": max(window or 0 for window in config.windows),
            "use_sliding_window": True,
            "layer_types": [
                "sliding_attention" if window else "full_attention" for window in config.windows
            ],
        }
    return written
