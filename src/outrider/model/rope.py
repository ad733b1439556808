"""Rotary positions: the frequencies of all rope variants of Llama-shaped configs.

    default   f_i = theta^(-2i/D)
    linear    f_i / factor                                   (Chen et al. 2023)
    dynamic   the default up to max_positions, our limit: beyond it the frequencies of *old* keys
              would change with the length, so that no KV cache could be exact
    llama3    low frequencies divided by factor, high ones kept, a linear ramp in the wavelength
              between them
    yarn      the same idea with the ramp over the dimension, and cos/sin scaled
              (Peng et al. 2023, eq. 17-25)
    longrope  f_i / factors_i, and cos/sin scaled. Two lists of factors exist, for texts up to the
              original length and for longer ones. A text that grew past it would change all stored
              keys, so an engine has one list for all texts: the second, if it is to reach further
    factors   f_i / factors_i, one number per pair, as GGUF files store it
    proportional  f_i / factor for the leading share of the pairs, 0 for the others

All arithmetic is float32 in torch, in the same order as in transformers: at position 10^5 an angle
depends on the last bit of its frequency.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from outrider.errors import ModelError

KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "factors", "proportional")


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """A variant and its parameters; unused fields keep their defaults."""

    kind: str = "default"
    theta: float = 10_000.0
    factor: float = 1.0
    original_positions: int = 0  # the length the model was first trained for
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0  # multiplies cos and sin
    truncate: bool = True
    factors: tuple[float, ...] = ()  # one per pair
    long_factors: tuple[float, ...] = ()  # of longrope: those past the original length
    share: float = 1.0  # of the pairs that rotate; only "proportional"

    @property
    def ends_early(self) -> bool:
        """Whether these factors are right up to the original length only."""
        return self.kind == "longrope" and self.long_factors != self.factors

    def frequencies(self, head_dim: int) -> torch.Tensor:
        """[head_dim / 2] float32: the radians per position of each pair.

        `head_dim` is the number of dimensions that rotate.
        """
        powers = self.theta ** (torch.arange(0, head_dim, 2).float() / head_dim)
        if self.kind == "longrope":
            return 1.0 / (torch.tensor(self.factors) * powers)
        freqs = 1.0 / powers
        if self.kind == "proportional":
            freqs[int(self.share * head_dim // 2) :] = 0
        if self.kind in ("linear", "proportional"):
            return freqs / self.factor
        if self.kind == "factors":
            return freqs / torch.tensor(self.factors)
        if self.kind == "llama3":
            return self._llama3(freqs)
        if self.kind == "yarn":
            return self._yarn(freqs, head_dim)
        return freqs

    def _llama3(self, freqs: torch.Tensor) -> torch.Tensor:
        wavelengths = 2 * math.pi / freqs
        ramp = (self.original_positions / wavelengths - self.low_freq_factor) / (
            self.high_freq_factor - self.low_freq_factor
        )
        mixed = (1 - ramp) * freqs / self.factor + ramp * freqs
        mixed = torch.where(ramp < 0, freqs / self.factor, mixed)
        return torch.where(ramp > 1, freqs, mixed)

    def _yarn(self, freqs: torch.Tensor, head_dim: int) -> torch.Tensor:
        def dim_of(rotations: float) -> float:
            """The dimension with this number of rotations over the original length."""
            turns = self.original_positions / (rotations * 2 * math.pi)
            return head_dim * math.log(turns) / (2 * math.log(self.theta))

        low, high = dim_of(self.beta_fast), dim_of(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        width = high - low if high != low else 0.001
        ramp = ((torch.arange(head_dim // 2).float() - low) / width).clamp(0, 1)
        return freqs / self.factor * ramp + freqs * (1 - ramp)


PLAIN_ROPE = RopeConfig()
LONGROPE_ENDS = "its longrope has other factors past this length: a longer max_model_len takes them"


def sinusoids(rows: int, width: int) -> torch.Tensor:
    """[rows, width]: the sines of a position's angles, then their cosines."""
    half = width // 2
    powers = torch.exp(torch.arange(half).float() * -(math.log(10000) / (half - 1)))
    angles = torch.arange(rows).float()[:, None] * powers
    return torch.cat([angles.sin(), angles.cos()], dim=1)


def read_rope(
    config: Mapping[str, Any],
    max_positions: int,
    *,
    params: Mapping[str, Any] | None = None,
    partial: bool = False,
) -> RopeConfig:
    """The rope of a config.json, written by any release of transformers.

    Old releases write `rope_theta` and `rope_scaling` {"type" or "rope_type", ...}, new ones write
    `rope_parameters`; `params` are given instead where a config has several. `partial`: whether the
    caller can rotate a part of a head. Raises `ModelError` for an unknown variant or a missing
    number.
    """
    given = rope_parameters(config) if params is None else params
    found = {"rope_theta": config.get("rope_theta") or 10_000.0, **given}
    kind = found.get("rope_type") or found.get("type") or "default"
    if kind not in KINDS:
        raise ModelError(f"rope variant {kind!r} is not one of {', '.join(KINDS)}")
    try:
        if kind == "proportional":
            partial = True
        if not partial and float(found.get("partial_rotary_factor") or 1.0) != 1.0:
            raise ModelError("rope over a part of the head is not supported")
        original = int(
            config.get("original_max_position_embeddings")
            or found.get("original_max_position_embeddings")
            or max_positions
        )
        return RopeConfig(
            kind=kind,
            theta=float(found["rope_theta"]),
            original_positions=original,
            **_numbers(kind, found, max_positions, original),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(
            f"the rope parameters of config.json are incomplete for {kind!r}: {error}"
        ) from error


def rope_parameters(config: Mapping[str, Any]) -> Mapping[str, Any]:
    found: Mapping[str, Any] = config.get("rope_scaling") or config.get("rope_parameters") or {}
    return found


def with_long_factors(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json whose longrope has the factors of long texts for texts of every length."""
    found = dict(config)
    for key in ("rope_scaling", "rope_parameters"):
        rope = config.get(key) or {}
        if rope.get("long_factor"):
            found[key] = {**rope, "short_factor": rope["long_factor"]}
    return found


def _numbers(
    kind: str, found: Mapping[str, Any], max_positions: int, original: int
) -> dict[str, Any]:
    """The fields of a variant besides base and original length."""
    if kind == "longrope":
        return {
            "factors": tuple(float(value) for value in found["short_factor"]),
            "long_factors": tuple(float(value) for value in found.get("long_factor") or ()),
            "attention_factor": _longrope_scale(found, max_positions / original, original),
        }
    if kind == "factors":
        return {"factors": tuple(float(value) for value in found["factors"])}
    if kind == "default":
        return {}
    if kind == "proportional":
        share = float(found.get("partial_rotary_factor") or 1.0)
        return {"share": share, "factor": float(found.get("factor") or 1.0)}
    if kind == "yarn" and "factor" in found and found["factor"] is None:
        factor = max_positions / original
    else:
        factor = float(found["factor"])
    if kind == "llama3":
        keys = ("low_freq_factor", "high_freq_factor")
        return {"factor": factor} | {key: float(found[key]) for key in keys}
    if kind == "yarn":
        return {
            "factor": factor,
            "beta_fast": float(found.get("beta_fast") or 32),
            "beta_slow": float(found.get("beta_slow") or 1),
            "attention_factor": _yarn_scale(found, factor),
            "truncate": bool(found.get("truncate", True)),
        }
    return {"factor": factor}


def _longrope_scale(params: Mapping[str, Any], ratio: float, original: int) -> float:
    if params.get("attention_factor") is not None:
        return float(params["attention_factor"])
    factor = float(params.get("factor") or ratio)
    return math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0


def rope_json(rope: RopeConfig) -> dict[str, Any]:
    """The fields of a config.json that `read_rope` reads back; the form that all releases know."""
    if rope.kind == "default":
        return {"rope_theta": rope.theta}
    scaling: dict[str, Any] = {"rope_type": rope.kind, "factor": rope.factor}
    scaling["original_max_position_embeddings"] = rope.original_positions
    names: tuple[str, ...] = ()
    if rope.kind == "llama3":
        names = ("low_freq_factor", "high_freq_factor")
    elif rope.kind == "yarn":
        names = ("beta_fast", "beta_slow", "attention_factor", "truncate")
    elif rope.kind == "longrope":
        names = ("attention_factor",)
        scaling |= {"short_factor": list(rope.factors), "long_factor": list(rope.long_factors)}
    elif rope.kind == "factors":
        scaling["factors"] = list(rope.factors)
    elif rope.kind == "proportional":
        scaling["partial_rotary_factor"] = rope.share
    scaling |= {name: getattr(rope, name) for name in names}
    return {"rope_theta": rope.theta, "rope_scaling": scaling}


def _yarn_scale(params: Mapping[str, Any], factor: float) -> float:
    if params.get("attention_factor") is not None:
        return float(params["attention_factor"])

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if params.get("mscale") and params.get("mscale_all_dim"):
        return mscale(params["mscale"]) / mscale(params["mscale_all_dim"])
    return mscale(1.0)
