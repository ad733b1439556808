"""One declaration per parameter: what is derived from it agrees with it."""

from __future__ import annotations

import importlib.util
import inspect
import typing
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from pydantic import ValidationError, create_model
from typer.testing import CliRunner

from outrider.config import EngineConfig, SamplingParams, Speculation
from outrider.errors import ConfigError, RequestError, UnknownName
from outrider.integrations.vllm.mapping import options
from outrider.llm import LLM, SamplingKeywords
from outrider.options import (
    Options,
    expanded,
    http_fields,
    http_given,
    of,
)
from outrider.parameters import PANELS, SAMPLING, default_of, param, params, refused
from outrider.server.schema import Body
from outrider.server_config import ServerConfig, VllmConfig

CONFIGS = (EngineConfig, Speculation, SamplingParams, ServerConfig, VllmConfig)


def declared(config: type) -> dict[str, tuple[str, object]]:
    """Field -> its type as written, and its default."""
    return {f.name: (str(f.type), default_of(config, f.name)) for f in fields(config)}


def test_an_editor_shows_every_parameter_of_an_engine() -> None:
    found = inspect.signature(LLM.__init__).parameters.values()
    beside = ("self", "unknown")
    shown = {p.name: (p.annotation, p.default) for p in found if p.name not in beside}
    assert shown == declared(EngineConfig)


@pytest.mark.parametrize("function", [*typing.get_overloads(LLM.generate), LLM.stream])
def test_an_editor_shows_every_parameter_of_a_request(function: Callable[..., Any]) -> None:
    assert function.__annotations__["sampling"] == "Unpack[SamplingKeywords]"
    types = {name: kind for name, (kind, _) in declared(SamplingParams).items()}
    shown = {name: ref.__forward_arg__ for name, ref in SamplingKeywords.__annotations__.items()}
    assert shown == types


@pytest.mark.parametrize("config", CONFIGS)
def test_every_field_is_declared_with_a_help_text(config: type) -> None:
    found = params(config)
    assert list(found) == [field.name for field in fields(config)]
    for name, declared in found.items():
        assert declared.help.endswith("."), name
        assert (declared.panel in PANELS) == any(declared.names), name


def test_limits_are_checked_and_named() -> None:
    with pytest.raises(ConfigError, match="max_sequences must be at least 1, not 0"):
        EngineConfig(max_sequences=0)
    with pytest.raises(UnknownName, match="Did you mean 'bfloat16'"):
        EngineConfig(dtype="bfloat")
    with pytest.raises(ConfigError, match=r"port must be in \[0, 65535\], not 70000"):
        ServerConfig(port=70000)
    with pytest.raises(ConfigError, match="queue_timeout_s must be a positive number, not 0"):
        ServerConfig(queue_timeout_s=0)
    with pytest.raises(RequestError, match=r"top_p must be in \(0, 1\], not 0") as caught:
        SamplingParams(top_p=0)
    assert caught.value.param == "top_p"


@dataclass(frozen=True, kw_only=True)
class Wider(SamplingParams):
    """A copy of a configuration with one more parameter: one declaration, nothing else."""

    typical_p: float = param(
        *(1.0, "Keep the most typical tokens.", "--typical-p P", SAMPLING),
        above=0,
        high=1,
        http="typical_p",
        vllm=refused("vLLM has no such filter"),
    )


def test_a_new_parameter_is_an_option_of_the_command_line() -> None:
    taken: list[Options] = []

    @expanded
    def ask(*, sampling: Annotated[Options, of(Wider)]) -> None:
        """Shows what it is given."""
        taken.append(sampling)

    app = typer.Typer()
    app.command()(ask)
    shown = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "100"})
    assert "--typical-p" in shown.output
    assert "Keep the most typical tokens." in shown.output
    assert CliRunner().invoke(app, ["--typical-p", "0.5"]).exit_code == 0
    assert CliRunner().invoke(app, []).exit_code == 0
    assert [Wider(**values).typical_p for values in taken] == [0.5, 1.0]


def test_a_new_parameter_is_a_field_of_http_bodies() -> None:
    body: Any = create_model("Body", __base__=Body, **http_fields(Wider, {"stop": Any}))
    assert http_given(Wider, body(typical_p=0.5))["typical_p"] == 0.5
    assert "typical_p" not in http_given(Wider, body())
    with pytest.raises(ValidationError, match="less than or equal to 1"):
        body(typical_p=2.0)
    assert tool("parameter_rows").http_notes(Wider)["typical_p"] == "keep the most typical tokens"


def test_a_new_parameter_has_rows_and_an_argument() -> None:
    assert [
        "`typical_p`",
        "`--typical-p`",
        "`float`",
        "`1.0`",
        "keep the most typical tokens",
    ] in tool("parameter_rows").docs_rows(Wider)
    assert ("--typical-p", "refused") in [(o.flag, o.fate) for o in options(Wider)]
    assert "    typical_p: float = 1.0,\n" in tool("keywords").keywords(
        Wider, "    ", defaults=True
    )


def tool(name: str) -> Any:
    """A module of docs/tools."""
    file = Path(__file__).parents[2] / "docs" / "tools" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_sampling_is_given_once() -> None:
    llm = LLM("bundled", proposer="ngram")
    with pytest.raises(ConfigError, match=r"as keywords \(temperature\)"):
        llm.stream("a", SamplingParams(), temperature=0.5)


def test_a_misspelt_keyword_is_refused_with_a_suggestion() -> None:
    with pytest.raises(UnknownName, match="Did you mean 'draft_model'"):
        LLM("bundled", draftmodel="x")  # type: ignore[arg-type]
    llm = LLM("bundled", proposer="ngram")
    functions: list[Callable[..., object]] = [llm.generate, llm.stream]
    for ask in functions:
        with pytest.raises(UnknownName, match="Did you mean 'temperature'"):
            ask("a", temprature=1)
