"""The memory of a second model, weights and KV, relative to the target."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.errors import ConfigError
from outrider.theory._checks import check_not_negative


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """The sizes of one model that determine its memory."""

    num_parameters: float
    bytes_per_parameter: float = 2.0
    kv_bytes_per_token: float = 0.0

    def weight_bytes(self) -> float:
        return self.num_parameters * self.bytes_per_parameter

    def bytes(self, num_tokens: float) -> float:
        """Weights and the KV of `num_tokens` cached tokens (all sequences together)."""
        return self.weight_bytes() + self.kv_bytes_per_token * num_tokens


@dataclass(frozen=True, slots=True)
class Overhead:
    """The drafter's bytes, and their fraction of the target's."""

    weight_bytes: float
    kv_bytes: float
    fraction: float


def kv_bytes_per_token(
    num_layers: int, num_kv_heads: int, head_dim: int, bytes_per_value: float = 2.0
) -> float:
    """K and V of every layer."""
    return 2.0 * num_layers * num_kv_heads * head_dim * bytes_per_value


def memory_overhead(target: Footprint, drafter: Footprint, num_tokens: float) -> Overhead:
    """The overhead of `drafter` with `target`, with `num_tokens` cached in both."""
    check_not_negative("num_tokens", num_tokens)
    for name, model in (("target", target), ("drafter", drafter)):
        check_not_negative(f"parameters of the {name}", model.num_parameters)
        check_not_negative(f"bytes per parameter of the {name}", model.bytes_per_parameter)
        check_not_negative(f"KV bytes per token of the {name}", model.kv_bytes_per_token)
    alone = target.bytes(num_tokens)
    if alone == 0:
        raise ConfigError("the target must have parameters")
    kv_bytes = drafter.kv_bytes_per_token * num_tokens
    weight_bytes = drafter.weight_bytes()
    return Overhead(weight_bytes, kv_bytes, (weight_bytes + kv_bytes) / alone)
