"""One declaration per parameter: what is derived from it agrees with it."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest

from outrider.config import EngineConfig, SamplingParams, ServerConfig, Speculation, VllmConfig
from outrider.errors import ConfigError, RequestError, UnknownName
from outrider.llm import LLM
from outrider.parameters import PANELS, default_of, params

CONFIGS = (EngineConfig, Speculation, SamplingParams, ServerConfig, VllmConfig)
# A request's own arguments, beside the sampling.
BESIDE = {"self", "prompt", "prompts", "params", "speculation", "prediction", "unknown"}


def declared(config: type) -> dict[str, tuple[str, object]]:
    """Field -> its type as written, and its default."""
    return {f.name: (str(f.type), default_of(config, f.name)) for f in fields(config)}


def keywords(function: Callable[..., Any]) -> dict[str, tuple[str, object]]:
    """Keyword -> its type as written, and its default."""
    found = inspect.signature(function).parameters.values()
    return {p.name: (p.annotation, p.default) for p in found if p.name not in BESIDE}


def test_an_editor_shows_every_parameter_of_an_engine() -> None:
    assert keywords(LLM.__init__) == declared(EngineConfig)


@pytest.mark.parametrize("function", [*typing.get_overloads(LLM.generate), LLM.stream])
def test_an_editor_shows_every_parameter_of_a_request(function: Callable[..., Any]) -> None:
    assert keywords(function) == declared(SamplingParams)


@pytest.mark.parametrize("config", CONFIGS)
def test_every_field_is_declared_with_a_help_text(config: type) -> None:
    found = params(config)
    assert list(found) == [field.name for field in fields(config)]
    for name, param in found.items():
        assert param.help.endswith("."), name
        assert (param.panel in PANELS) == any(param.names), name


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
