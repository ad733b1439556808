"""What follows from the declarations in `config.py` and `server_config.py`: options of the command
line, fields of HTTP bodies, rows of the reference pages.

A command names the parameters it takes as one keyword-only argument:

    @expanded
    def generate(*, engine: Annotated[Options, of(EngineConfig, SPECULATION, MACHINE)]) -> None:

`expanded` replaces this argument by an option for each parameter; the command receives a dictionary
of the values that were given, ready for `EngineConfig(**engine)`.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, replace
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from outrider.errors import ConfigError
from outrider.parameters import PANELS, Param, default_of, params
from outrider.registry import proposer_names

KEY_VARIABLE = "OUTRIDER_API_KEY"
Options = dict[str, Any]


# --- the command line: texts that are more than a word or a number --------------------------------


def read_count(text: str) -> int | Literal["auto"]:
    if text == "auto":
        return "auto"
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"--num-draft-tokens is a number or auto, not {text!r}") from None


def read_proposer_options(texts: Sequence[str]) -> dict[str, dict[str, object]]:
    """NAME.KEY=VALUE, by name and key. A value is JSON where it can be read as such, else text.

    Names, keys and types are checked where the proposer is built.
    """
    options: dict[str, dict[str, object]] = {}
    for text in texts:
        path, equals, value = text.partition("=")
        name, dot, key = path.partition(".")
        if not (equals and dot and name and key):
            raise ConfigError(
                f"--proposer-option takes NAME.KEY=VALUE, such as eagle3.passes=6, not {text!r}"
            )
        try:
            options.setdefault(name, {})[key.replace("-", "_")] = json.loads(value)
        except json.JSONDecodeError:
            options.setdefault(name, {})[key.replace("-", "_")] = value
    return options


def read_sampling(texts: Sequence[str]) -> dict[str, object]:
    """NAME=VALUE by name, with values in JSON; the configuration checks them."""
    found: dict[str, object] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        try:
            given = json.loads(value)
        except json.JSONDecodeError:
            equals = ""
        if not equals:
            raise ConfigError(f"--sampling takes NAME=VALUE, such as temperature=0.7, not {text!r}")
        found[name.replace("-", "_")] = tuple(given) if isinstance(given, list) else given
    return found


def read_size(text: str) -> int:
    """ "2GiB" or "500MB" or a number of bytes."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?", text.strip(), re.IGNORECASE)
    if found is None:
        raise ConfigError(f"a size is a number such as 2GiB or 500MB, not {text!r}")
    base = 1024 if found.group(3) else 1000
    power = "KMGT".find(found.group(2).upper()) + 1 if found.group(2) else 0
    return int(float(found.group(1)) * base**power)


def read_buckets(text: str) -> tuple[tuple[int, int], ...]:
    """ "1x4,16x1": (sequences, drafts of each)."""
    parts = [part.split("x") for part in text.split(",")]
    if not all(len(part) == 2 and part[0].isdigit() and part[1].isdigit() for part in parts):
        raise ConfigError(f"--buckets takes sequences x drafts, such as 1x4,16x1, not {text!r}")
    return tuple((int(size), int(k)) for size, k in parts)


def read_layers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"--taps is {text!r}; give layer numbers like 2,4,6") from None


def read_optimiser(text: str) -> bool:
    """Whether it is Muon."""
    if text not in ("muon", "adamw"):
        raise ConfigError(f"optimiser {text!r} is neither muon nor adamw")
    return text == "muon"


def read_names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def read_numbers(text: str, what: str) -> list[float]:
    """ "0.4,1" -> [0.4, 1.0]; `what` is for the message."""
    try:
        return [float(word) for word in read_names(text)]
    except ValueError:
        raise ConfigError(f"{what}: numbers with commas between them, not {text!r}") from None


def read_keys(file: Path | None) -> tuple[str, ...]:
    """The keys of a file, else the one of the environment; no argument, which others could list."""
    if file is None:
        key = os.environ.get(KEY_VARIABLE, "")
        return (key,) if key else ()
    try:
        lines = file.read_text(encoding="ascii").splitlines()
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not ASCII text"
        raise ConfigError(f"cannot read keys from {file}: {reason}") from None
    keys = tuple(line.strip() for line in lines if line.strip())
    if not keys:
        raise ConfigError(f"{file} holds no key")
    return keys


def read_template(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise ConfigError(f"cannot read the chat template from {file}: {reason}") from None


# Field -> what the command line takes, and how it becomes the field's value.
READERS: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "num_draft_tokens": (str, read_count),
    "proposer_options": (list[str] | None, read_proposer_options),
    "sampling": (list[str] | None, read_sampling),
    "kv_memory": (str | None, read_size),
    "models_memory": (str | None, read_size),
    "buckets": (str | None, read_buckets),
    "proposers": (str, read_names),
    "api_keys": (Path | None, read_keys),
    "chat_template": (Path | None, read_template),
    "draft_table": (str | None, str),
    "taps": (str | None, read_layers),
    "muon": (str, read_optimiser),
}


# --- the command line: options --------------------------------------------------------------------


def option(panel: str, help: str, *names: str, metavar: str | None = None, **more: Any) -> Any:
    """An option of one command only."""
    import typer

    return typer.Option(*names, help=help, metavar=metavar, rich_help_panel=panel, **more)


def among(names: Iterable[str]) -> Callable[[str], list[str]]:
    """For the shell's completion: the names that begin as typed."""
    return lambda incomplete: [name for name in names if name.startswith(incomplete)]


@dataclass(frozen=True, slots=True)
class Group:
    """Parameters of one configuration that a command takes; `changes` are of this command."""

    config: type
    names: tuple[str, ...]
    changes: Mapping[str, Mapping[str, Any]]

    def options(self) -> list[inspect.Parameter]:
        return [self._option(name) for name in self.names]

    def values(self, given: dict[str, Any]) -> Options:
        """Takes the group's options out of `given`; what was not given is left to the default."""
        found = {}
        for name in self.names:
            text = given.pop(name)
            if name == "api_keys":  # the environment may hold one
                found[name] = read_keys(text)
            elif text is not None:
                read = READERS[name][1] if name in READERS else _as_tuple
                found[name] = read(text)
        return found

    def _option(self, name: str) -> inspect.Parameter:
        import typer

        changes = dict(self.changes.get(name, {}))
        default = changes.pop("default", default_of(self.config, name))
        kind = changes.pop("kind", _typed(self.config, name))
        declared = replace(params(self.config)[name], **changes)
        if isinstance(default, tuple | Mapping):
            default = ",".join(default) or None
        if default is MISSING:
            default = inspect.Parameter.empty
        common: dict[str, Any] = {
            "help": declared.help,
            "metavar": declared.metavar,
            "autocompletion": _completion(name, declared),
            "show_default": declared.none if default is None and declared.none else True,
        }
        if declared.names:
            shown = option(declared.panel, common.pop("help"), *declared.names, **common)
        else:
            shown = typer.Argument(**common)
        if default is None and isinstance(kind, type):
            kind = kind | None
        annotation: Any = Annotated[kind, shown]
        return inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
        )


def of(
    config: type, *wanted: str, without: Sequence[str] = (), **changes: Mapping[str, Any]
) -> Group:
    """The command-line parameters of `config`: those of the panels or names in `wanted`, else all.

    `changes` are by field: `default`, `kind` (the type on the command line) or what is declared
    otherwise for this command.
    """
    declared = {name: param for name, param in params(config).items() if param.cli}
    names = [] if wanted else list(declared)
    for key in wanted:
        assert key in declared or key in PANELS, key
        names += [name for name, param in declared.items() if key in (name, param.panel)]
    return Group(config, tuple(name for name in names if name not in without), changes)


def expanded(command: Callable[..., None], more: Mapping[str, Group] = {}) -> Callable[..., None]:
    """`command` with an option for each parameter of its groups, ordered by panel as `PANELS`.

    `more` are groups that it takes as `**given`.
    """
    groups = dict(more)
    shown = [parameter for group in more.values() for parameter in group.options()]
    for name, parameter in inspect.signature(command, eval_str=True).parameters.items():
        extra = getattr(parameter.annotation, "__metadata__", ())
        group = next((item for item in extra if isinstance(item, Group)), None)
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            continue
        if group is None:
            shown.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
        else:
            groups[name] = group
            shown += group.options()
    shown.sort(key=_panel)

    @functools.wraps(command)
    def call(**given: Any) -> None:
        for name, group in groups.items():
            given[name] = group.values(given)
        command(**given)

    del call.__wrapped__  # typer would look at its signature
    call.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in shown}
    return call


def _panel(parameter: inspect.Parameter) -> int:
    for item in getattr(parameter.annotation, "__metadata__", ()):
        panel = getattr(item, "rich_help_panel", None)
        if panel:
            return PANELS.index(panel)
    return -1


def _typed(config: type, name: str) -> Any:
    """The type of a field as the command line reads it."""
    if name in READERS:
        return READERS[name][0]
    hint = _hints(config)[name]
    if get_origin(hint) is Literal:
        return str
    if get_origin(hint) is tuple:
        member: Any = get_args(hint)[0]
        return list[member] | None
    return hint


@functools.cache
def _hints(config: type) -> dict[str, Any]:
    return get_type_hints(config)  # evaluates the text of every annotation


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _completion(name: str, declared: Param) -> Any:
    if name == "proposer":
        return lambda incomplete: among(proposer_names())(incomplete)
    names = declared.choices or declared.suggestions
    return among(names) if names else None


def given_names(context: Any) -> set[str]:
    """The parameters that the user wrote on the command line."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return {name for name, source in sources.items() if source and source.name != "DEFAULT"}


# --- HTTP bodies ----------------------------------------------------------------------------------


def http_fields(config: type, types: Mapping[str, Any] = {}) -> dict[str, Any]:
    """Fields for pydantic's `create_model`: name in the body -> (type with its limits, None).

    `types` are by field of `config`, where the type of the body is another. None means left out.
    """
    hints = _hints(config)
    found = {}
    for name, declared in params(config).items():
        if declared.http:
            kind = types.get(name) or _limited(hints[name], declared)
            found[declared.http] = (kind | None, None)
    return found


def _limited(hint: Any, declared: Param) -> Any:
    """`hint` with the limits that a number has in HTTP bodies."""
    from pydantic import Field

    if isinstance(hint, UnionType) or get_origin(hint) is Union:
        members = [
            _limited(member, declared) for member in get_args(hint) if member is not NoneType
        ]
        return functools.reduce(lambda one, other: one | other, members)
    if hint not in (int, float):
        return hint
    low = declared.low if declared.http_low is None else declared.http_low
    high = declared.high if declared.http_high is None else declared.http_high
    return Annotated[hint, Field(ge=low, gt=declared.above, le=high)]


def http_given(config: type, body: object) -> Options:
    """The fields of `config` that a body gives."""
    found = {}
    for name, declared in params(config).items():
        if declared.http:
            value = getattr(body, declared.http)
            if value is not None:
                found[name] = value
    return found


def http_defaults(config: type) -> Options:
    """The fields of `config` with another default in HTTP."""
    declared = params(config).items()
    return {name: p.http_default for name, p in declared if p.http_default is not None}
