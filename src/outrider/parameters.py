"""What a declared parameter is: `config.py` and `server_config.py` declare them with `param`.

Standard library only, so that `outrider --help` starts at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from functools import cache
from typing import Any, Literal

from outrider.errors import ConfigError, UnknownName

# The groups of `--help`, in the order in which it shows them.
DATA = "Data"
RECIPE = "Recipe"
RUN = "Run"
INPUT = "Input"
NETWORK = "Network"
WORK = "What is measured"
SPECULATION = "Speculation"
SAMPLING = "Sampling"
STOPPING = "Length and stopping"
LIMITS = "Limits"
PRIVACY = "Privacy"
MACHINE = "Machine"
VLLM = "With --backend vllm"
PEERS = "Peers"
LOAD = "Load and goal"
MODELS = "Models"
HARDWARE = "Hardware"
MONEY = "Money"
OUTPUT = "Output"
ENDPOINT = "A server instead of a model"
PANELS = (
    *(DATA, RECIPE, RUN, INPUT, NETWORK, WORK, SPECULATION, SAMPLING, STOPPING, LIMITS, PRIVACY),
    *(MACHINE, VLLM, PEERS, LOAD, MODELS, HARDWARE, MONEY, OUTPUT, ENDPOINT),
)


@dataclass(frozen=True, slots=True)
class Vllm:
    """What `outrider serve --backend vllm` does with a parameter."""

    fate: Literal["passed", "ours", "refused"]  # to vLLM; done by our front; an error
    text: str  # vLLM's name for it; what the front does; why it is refused


@dataclass(frozen=True, slots=True, kw_only=True)
class Param:
    """What users see of a parameter besides its name, type and default."""

    help: str
    cli: str = ""  # "--name -n METAVAR" for an option, "METAVAR" for an argument, "": neither
    aliases: tuple[str, ...] = ()  # names of other tools for the option, without "--"
    panel: str = ""  # group of `--help`
    none: str = ""  # what None means; `--help` shows it as the default
    choices: tuple[str, ...] = ()
    suggestions: tuple[str, ...] = ()  # for the shell's completion, where others are possible
    low: float | None = None  # at least
    above: float | None = None  # more than
    high: float | None = None  # at most
    http: str = ""  # name in HTTP bodies, "": none
    http_default: Any = None  # where HTTP has another default
    http_low: float | None = None  # where HTTP has other limits
    http_high: float | None = None
    http_help: str = ""  # where HTTP needs another text
    vllm: Vllm | None = None  # None: no option of `outrider serve`

    @property
    def names(self) -> list[str]:
        """The option's names on the command line."""
        return [word for word in self.cli.split() if word.startswith("-")]

    @property
    def metavar(self) -> str | None:
        words = [word for word in self.cli.split() if not word.startswith("-")]
        return words[0] if words else None

    @property
    def flag(self) -> str:
        """The option as an error message names it."""
        return (self.names or [self.metavar or ""])[0].partition("/")[0]


def passed(text: str) -> Vllm:
    return Vllm("passed", text)


def ours(text: str) -> Vllm:
    return Vllm("ours", text)


def refused(text: str) -> Vllm:
    return Vllm("refused", text)


def param(default: Any, help: str, cli: str = "", panel: str = "", **more: Any) -> Any:
    """A dataclass field with its `Param`. A callable `default` makes the default value."""
    metadata = {"param": Param(help=help, cli=cli, panel=panel, **more)}
    if callable(default):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


@cache
def params(config: type) -> Mapping[str, Param]:
    """Field name -> declaration, in the order of the class."""
    return {f.name: f.metadata["param"] for f in fields(config) if "param" in f.metadata}


def default_of(config: type, name: str) -> Any:
    found = next(f for f in fields(config) if f.name == name)
    return found.default if found.default_factory is MISSING else found.default_factory()


def check(config: object, error: Callable[[str, str], Exception]) -> None:
    """Raises `error(message, name)` or UnknownName for a value outside its declared limits."""
    kind: Any = type(config)
    for name, declared in params(kind).items():
        value = getattr(config, name)
        if value is None or value == "auto":
            continue
        if declared.choices and value not in declared.choices:
            raise UnknownName(name.replace("_", " "), str(value), declared.choices)
        if declared.low is not None or declared.above is not None:
            _check_number(name, value, declared, error)


def _check_number(
    name: str, value: Any, declared: Param, error: Callable[[str, str], Exception]
) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise error(f"{name} must be a number, not {value!r}", name)
    if not math.isfinite(value):
        raise error(f"{name} must be a finite number, not {value}", name)
    low, above, high = declared.low, declared.above, declared.high
    too_low = value <= above if above is not None else low is not None and value < low
    if not too_low and (high is None or value <= high):
        return
    if high is None:
        wanted = "a positive number" if above is not None else f"at least {low:g}"
    else:
        wanted = f"in {f'[{low:g}' if above is None else f'({above:g}'}, {high:.10g}]"
    raise error(f"{name} must be {wanted}, not {value:g}", name)


def config_error(message: str, name: str) -> ConfigError:
    return ConfigError(message)
