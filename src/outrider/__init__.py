"""Exact speculative decoding for every causal language model.

from outrider import LLM

llm = LLM("bundled")
print(llm.generate("def add(a, b):", max_tokens=64).text)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from outrider.engine.async_engine import AsyncEngine
    from outrider.engine.build import EngineConfig, build
    from outrider.engine.engine import Completion, Engine, Result
    from outrider.engine.request import Speculation
    from outrider.errors import OutriderError
    from outrider.events import StepEvent, StepReport
    from outrider.llm import LLM
    from outrider.registry import register
    from outrider.sampling import SamplingParams
    from outrider.statistics import SpeculationStats

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "AsyncEngine",
    "Completion",
    "Engine",
    "EngineConfig",
    "OutriderError",
    "Result",
    "SamplingParams",
    "Speculation",
    "SpeculationStats",
    "StepEvent",
    "StepReport",
    "build",
    "register",
]

# Imported on first use: `outrider --help` must not wait for torch.
_HOMES = {
    "outrider.engine.async_engine": ["AsyncEngine"],
    "outrider.engine.build": ["EngineConfig", "build"],
    "outrider.engine.engine": ["Completion", "Engine", "Result"],
    "outrider.engine.request": ["Speculation"],
    "outrider.errors": ["OutriderError"],
    "outrider.events": ["StepEvent", "StepReport"],
    "outrider.llm": ["LLM"],
    "outrider.registry": ["register"],
    "outrider.sampling": ["SamplingParams"],
    "outrider.statistics": ["SpeculationStats"],
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> object:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'outrider' has no attribute {name!r}")
    return getattr(import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
