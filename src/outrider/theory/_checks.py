"""One-line errors for impossible numbers."""

from __future__ import annotations

import math

from outrider.errors import ConfigError


def check_probability(name: str, value: float) -> None:
    if not 0.0 <= value <= 1.0:  # NaN fails too
        raise ConfigError(f"{name} must be a probability between 0 and 1, not {value:g}")


def check_not_negative(name: str, value: float) -> None:
    if not (math.isfinite(value) and value >= 0):
        raise ConfigError(f"{name} must be a finite number of at least 0, not {value:g}")


def check_count(name: str, value: int, most: int = 1_000_000) -> None:
    if not 0 <= value <= most:
        raise ConfigError(f"{name} must be between 0 and {most}, not {value}")
