"""Entries of a file's metadata under its architecture's name, checked as they are read."""

from __future__ import annotations

from typing import Any

import numpy as np

from outrider.errors import ModelError
from outrider.model.gguf.container import Container

_ROPE_FREQS = "rope_freqs.weight"
_LONG, _SHORT = "rope_factors_long.weight", "rope_factors_short.weight"


class Metadata:
    def __init__(self, container: Container) -> None:
        self.container = container
        self.architecture = str(container.metadata.get("general.architecture"))
        self.layers = self.number("block_count") - self.count("nextn_predict_layers")
        if not 1 <= self.layers <= len(container.tensors):
            raise self.missing(f"tensors for {self.layers} layers")
        self.heads = self.number("attention.head_count")
        self.kv_heads = self.number("attention.head_count_kv", self.heads)
        self.hidden = self.number("embedding_length")
        self.head_dim = self.number("attention.key_length", self.hidden // self.heads)
        self.rotated = self.number("rope.dimension_count", self.head_dim)

    def missing(self, what: str) -> ModelError:
        return ModelError(f"{self.container.path} lacks {what}; download the file again")

    def refuse(self, what: str) -> ModelError:
        return ModelError(f"{self.container.path} {what}, which we do not run; use another model")

    def get(self, key: str, default: Any = None) -> Any:
        return self.container.metadata.get(f"{self.architecture}.{key}", default)

    def holds(self, *names: str) -> bool:
        """Whether one of these tensors is there."""
        return any(name in self.container.tensors for name in names)

    def width(self, suffix: str, default: int) -> int:
        """The outputs of a matrix in the first layer that has it."""
        for layer in range(self.layers):
            found = self.container.tensors.get(f"blk.{layer}.{suffix}")
            if found is not None:
                return found.shape[-2]
        return default

    def number(self, key: str, default: int | None = None) -> int:
        value = self.get(key, default)
        if value is None:
            raise self.missing(f"the metadata entry {self.architecture}.{key}")
        if isinstance(value, np.ndarray) and len(value) and (value == value[0]).all():
            value = int(value[0])  # one per layer
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < 1 << 31:
            raise ModelError(
                f"{self.container.path} has {self.architecture}.{key} = {str(value)[:80]!r}; "
                "it must be a positive integer"
            )
        return value

    def count(self, key: str, default: int = 0) -> int:
        """A number that may be 0."""
        value = self.get(key, default)
        return 0 if type(value) is int and value == 0 else self.number(key, default)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise self.refuse(f"has {self.architecture}.{key} = {str(value)[:80]!r}")
        return value

    def cap(self, key: str) -> float | None:
        return None if self.get(key) is None else self.real(key, 0.0)

    def real(self, key: str, default: float) -> float:
        value = self.get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise ModelError(
                f"{self.container.path} has {self.architecture}.{key} = {str(value)[:80]!r}; "
                "it must be a number"
            )
        return float(value)

    def positive(self, key: str, default: float) -> float:
        value = self.real(key, default)
        if not 0 < value < 1e15:
            raise ModelError(
                f"{self.container.path} has {self.architecture}.{key} = {value:g}; "
                "it must be a positive number"
            )
        return value

    @property
    def inner(self) -> int:
        return self.number("feed_forward_length")

    @property
    def experts(self) -> int:
        """As many as a tensor of the file has."""
        found = self.number("expert_count")
        held = max(
            (t.shape[0] for t in self.container.tensors.values() if len(t.shape) == 3), default=0
        )
        if found > held:
            raise self.missing(f"tensors of {found} experts")
        return found

    def theta(self, default: float = 10_000.0) -> float:
        return self.positive("rope.freq_base", default)

    def rope(self, theta: float = 10_000.0) -> dict[str, Any]:
        """As `rope_parameters` in a config.json."""
        kind = str(self.get("rope.scaling.type", "none"))
        factor = self.real("rope.scaling.factor", self.real("rope.scale_linear", 1.0))
        plain: dict[str, Any] = {"rope_type": "default", "rope_theta": self.theta(theta)}
        if self.rotated != self.head_dim:
            plain["partial_rotary_factor"] = self.rotated / self.head_dim
        if self.holds(_ROPE_FREQS):
            return plain | {"rope_type": "factors", "factors": self._factors(_ROPE_FREQS)}
        if self.holds(_SHORT):
            return plain | {
                "rope_type": "longrope",
                "short_factor": self._factors(_SHORT),
                "long_factor": self._factors(_LONG) if self.holds(_LONG) else [],
                "original_max_position_embeddings": self._original(),
            }
        if kind == "none" or factor in (0.0, 1.0):
            return plain
        self.positive("rope.scaling.factor", factor)
        if kind == "linear":
            return plain | {"rope_type": "linear", "factor": factor}
        if kind != "yarn":
            raise ModelError(
                f"{self.container.path} has the rope scaling {kind!r}, not none, linear or yarn; "
                "use another model"
            )
        scaled = plain | {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": self._original(),
            "beta_fast": self.positive("rope.scaling.yarn_beta_fast", 32.0),
            "beta_slow": self.positive("rope.scaling.yarn_beta_slow", 1.0),
        }
        if self.get("rope.scaling.attn_factor") is not None:
            given = self.positive("rope.scaling.attn_factor", 1.0)
            scaled["attention_factor"] = given * float(1 + 0.1 * np.log(factor))
        return scaled

    def _original(self) -> int:
        return self.number("rope.scaling.original_context_length", self.number("context_length"))

    def _factors(self, name: str) -> list[float]:
        tensor, path = self.container.tensors[name], self.container.path
        if tensor.type.name != "F32" or tensor.shape != (self.rotated // 2,):
            raise ModelError(
                f"{path} has a {name} of {tensor.type.name} {list(tensor.shape)}, not F32 "
                f"[{self.rotated // 2}]; download the file again"
            )
        found = [float(value) for value in self.container.raw(tensor).view("<f4").ravel()]
        if not all(0 < value < 1e9 for value in found):
            raise ModelError(f"{path} has a damaged {name}; download the file again")
        return found
