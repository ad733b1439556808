"""A proposer's options, as the user wrote them, to its config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any, TypeVar

from outrider.errors import ConfigError, UnknownName

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Config = TypeVar("Config", bound="DataclassInstance")


def read_options(config: type[Config], proposer: str, options: Mapping[str, Any]) -> Config:
    """`config(**options)`. UnknownName for an option it does not have, ConfigError for a value."""
    known = [field.name for field in fields(config)]
    for name in options:
        if name not in known:
            raise UnknownName(f"option of proposer {proposer!r}", name, known)
    try:
        return config(**options)
    except TypeError as error:
        raise ConfigError(f"proposer {proposer!r}: {error}") from None
