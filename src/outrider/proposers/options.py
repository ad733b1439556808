"""Reads a proposer's options into its config."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, TypeVar, get_args, get_origin, get_type_hints

from outrider.errors import ConfigError, UnknownName

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Config = TypeVar("Config", bound="DataclassInstance")

_SPOKEN = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    Sequence: "a list of names",
    Mapping: "an object of options",
    NoneType: "null",
}


def read_options(config: type[Config], proposer: str, options: Mapping[str, Any]) -> Config:
    """`config(**options)`. UnknownName for an unknown option, ConfigError for an impossible value.

    A list of names may be given as one text with commas.
    """
    known = [field.name for field in fields(config)]
    hints = get_type_hints(config)
    values = {}
    for name, value in options.items():
        if name not in known:
            raise UnknownName(f"option of proposer {proposer!r}", name, known)
        hint = hints[name]
        members = get_args(hint) if isinstance(hint, UnionType) else [hint]
        kinds = [get_origin(member) or member for member in members]
        if Sequence in kinds and isinstance(value, str):
            value = value.split(",")
        if not any(_fits(value, kind) for kind in kinds):
            wanted = " or ".join(_SPOKEN.get(kind, kind.__name__) for kind in kinds)
            raise ConfigError(
                f"option {name!r} of proposer {proposer!r} must be {wanted}, not {value!r}"
            )
        values[name] = value
    return config(**values)


def _fits(value: object, kind: type) -> bool:
    if isinstance(value, bool):
        return kind is bool
    if kind is Sequence:
        return isinstance(value, Sequence) and all(isinstance(name, str) for name in value)
    return isinstance(value, (int, float) if kind is float else kind)
