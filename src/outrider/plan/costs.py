"""Seconds of a pass, and the K that pays at each batch size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from outrider.errors import ConfigError
from outrider.policy import measured
from outrider.policy.measured import StepCosts
from outrider.theory import expected_tokens

MOST_DRAFT_TOKENS = 8


class Costs(Protocol):
    """What a replica's passes cost."""

    def pass_s(self, num_tokens: int, context: float, num_sequences: int) -> float:
        """A pass over `num_tokens` new tokens with `context` cached ones read, all sequences."""
        ...

    def draft_s(self, num_sequences: int, num_draft_tokens: int) -> float:
        """Drafting so many tokens for each of so many sequences."""
        ...

    def read_s(self, num_tokens: int) -> float:
        """The drafter's own reading of a prompt, before its first draft."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """Limits of one device, and what share of them real kernels reach."""

    bandwidth: float  # bytes per second
    flops: float
    memory: float  # bytes
    efficiency: float = 0.7
    overhead_s: float = 0.0005  # of a pass, whatever is in it
    sync_s: float = 0.00002  # of one exchange between tensor-parallel devices

    def __post_init__(self) -> None:
        for name in ("bandwidth", "flops", "memory"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} must be positive")
        if not 0 < self.efficiency <= 1:
            raise ConfigError("efficiency must be in (0, 1]")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """A model as hardware sees it."""

    num_parameters: float
    bytes_per_parameter: float = 2.0
    kv_bytes_per_token: float = 0.0
    num_layers: int = 32

    @property
    def weight_bytes(self) -> float:
        return self.num_parameters * self.bytes_per_parameter


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """Costs from limits: a pass takes as long as the slower of reading and computing."""

    hardware: Hardware
    target: ModelSize
    draft: ModelSize | None = None
    degree: int = 1  # tensor-parallel devices

    def pass_s(self, num_tokens: int, context: float, num_sequences: int) -> float:
        return self._pass(self.target, num_tokens, context)

    def draft_s(self, num_sequences: int, num_draft_tokens: int) -> float:
        if self.draft is None or not num_draft_tokens:
            return 0.0
        return num_draft_tokens * self._pass(self.draft, num_sequences, 0.0)

    def read_s(self, num_tokens: int) -> float:
        return 0.0 if self.draft is None else self._pass(self.draft, num_tokens, 0.0)

    def _pass(self, model: ModelSize, num_tokens: int, context: float) -> float:
        hardware = self.hardware
        reach = hardware.efficiency * self.degree
        read = (model.weight_bytes + model.kv_bytes_per_token * context) / hardware.bandwidth
        compute = 2 * model.num_parameters * num_tokens / hardware.flops
        exchange = 2 * model.num_layers * hardware.sync_s if self.degree > 1 else 0.0
        return max(read, compute) / reach + hardware.overhead_s + exchange

    def capacity(self) -> float:
        """Tokens whose KV fits beside the weights; 0 or less where not even those do."""
        models = [self.target, *([self.draft] if self.draft is not None else [])]
        room = 0.9 * self.hardware.memory * self.degree - sum(m.weight_bytes for m in models)
        per_token = sum(m.kv_bytes_per_token for m in models)
        return room / per_token if per_token else float("inf") if room > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Curves:
    """Costs as `outrider doctor --json` measured them on a machine."""

    measured: StepCosts
    proposer: str

    @classmethod
    def read(cls, record: Mapping[str, Any], proposer: str) -> Curves:
        """From the doctor's record; ConfigError where it does not know the proposer.

        Records of older versions lack passes by batch size, or the reading of prompts.
        """
        try:
            passes = record.get("passes_s") or {"1": record["verify_s"]}
            costs = StepCosts(
                {int(n): _points(found) for n, found in passes.items()},
                _points(record["overhead_s"]),
                {proposer: {int(n): _points(c) for n, c in record["draft_s"][proposer].items()}},
                {name: _points(found) for name, found in record.get("reading_s", {}).items()},
            )
            return cls(costs, proposer)
        except (KeyError, TypeError, ValueError, AttributeError):
            raise ConfigError(
                f"these are not the doctor's curves of {proposer}: outrider doctor --json"
            ) from None

    def pass_s(self, num_tokens: int, context: float, num_sequences: int) -> float:
        width = num_tokens / max(1, num_sequences)
        costs = self.measured
        return costs.pass_s(num_sequences, width) + costs.overhead_s(num_sequences)

    def draft_s(self, num_sequences: int, num_draft_tokens: int) -> float:
        if not num_draft_tokens:
            return 0.0
        return self.measured.draft_s(self.proposer, num_sequences, num_draft_tokens)

    def read_s(self, num_tokens: int) -> float:
        return self.measured.read_s(self.proposer, num_tokens)


def _points(found: Mapping[str, Any]) -> dict[int, float]:
    return {int(n): float(seconds) for n, seconds in found.items()}


def best_k(
    costs: Costs, alpha: float, num_sequences: int, context: float, reading_s: float = 0.0
) -> int:
    """The K with the most tokens per second at this batch size; 0: plain decoding.

    `reading_s`: what the drafter's reading of a prompt costs for each token that comes out.
    """

    def rate(k: int) -> float:
        tokens = expected_tokens(alpha, k)
        seconds = costs.pass_s(num_sequences * (k + 1), context, num_sequences)
        if k:
            seconds += costs.draft_s(num_sequences, k) + num_sequences * tokens * reading_s
        return tokens / seconds

    return measured.best_k(rate, MOST_DRAFT_TOKENS)


def break_even_batch(
    costs: Costs, alpha: float, context_each: float, most: int, reading_s: float = 0.0
) -> int | None:
    """The first batch size at which no K pays; None: not up to `most`."""
    sizes = range(1, most + 1)
    return next(
        (n for n in sizes if not best_k(costs, alpha, n, n * context_each, reading_s)), None
    )
