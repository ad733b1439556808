"""The Python API: load a target and a proposer by name, generate, stream, read the figures.

from outrider import LLM

llm = LLM("bundled")                               # target and draft model that ship with us
result = llm.generate("def add(a, b):", max_tokens=64)
print(result.text, result.stats.acceptance_length)
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, overload

from outrider.engine.build import EngineConfig, build
from outrider.engine.engine import Engine, Result
from outrider.engine.request import Speculation
from outrider.errors import ConfigError
from outrider.events import StepEvent
from outrider.sampling import SamplingParams

Prompt = str | list[int]


class LLM:
    """A target with its proposers, ready to generate. Keyword arguments are EngineConfig's."""

    def __init__(self, model: str = "bundled", **config: Any) -> None:
        try:
            self.config = EngineConfig(model=str(model), **config)
        except TypeError as error:
            raise ConfigError(f"LLM: {error}".replace("EngineConfig.__init__() ", "")) from None
        self.engine: Engine = build(self.config)

    @overload
    def generate(
        self,
        prompts: Prompt,
        params: SamplingParams | None = ...,
        *,
        speculation: Speculation | None = ...,
        prediction: str = ...,
        **sampling: Any,
    ) -> Result: ...

    @overload
    def generate(
        self,
        prompts: list[str] | list[list[int]],
        params: SamplingParams | None = ...,
        *,
        speculation: Speculation | None = ...,
        prediction: str = ...,
        **sampling: Any,
    ) -> list[Result]: ...

    def generate(
        self,
        prompts: Prompt | list[str] | list[list[int]],
        params: SamplingParams | None = None,
        *,
        speculation: Speculation | None = None,
        prediction: str = "",
        **sampling: Any,
    ) -> Result | list[Result]:
        """One result per prompt, all decoded in one batch; a single prompt gives a single result.

        Sampling is a `SamplingParams` or its fields as keywords (`temperature=0.7, seed=1`).
        """
        single = isinstance(prompts, str) or (bool(prompts) and isinstance(prompts[0], int))
        batch: list[Any] = [prompts] if single else list(prompts)
        params = _params(params, sampling)
        ids: list[str] = []
        try:
            for prompt in batch:
                ids.append(
                    self.engine.add(prompt, params, speculation=speculation, prediction=prediction)
                )
            for _ in self.engine.run(ids):
                pass
        finally:
            for request_id in ids:
                self.engine.cancel(request_id)
            results = [self.engine.collect(request_id) for request_id in ids]
        return results[0] if single else results

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        speculation: Speculation | None = None,
        prediction: str = "",
        **sampling: Any,
    ) -> Iterator[StepEvent]:
        """Each step's confirmed tokens and text as they come; leaving early cancels the request."""
        request_id = self.engine.add(
            prompt, _params(params, sampling), speculation=speculation, prediction=prediction
        )
        try:
            for report in self.engine.run([request_id]):
                for event in report.events:
                    if event.request_id == request_id:
                        yield event
        finally:
            self.engine.cancel(request_id)
            self.engine.collect(request_id)


def _params(params: SamplingParams | None, sampling: dict[str, Any]) -> SamplingParams:
    if params is not None:
        if sampling:
            raise ConfigError(
                f"give sampling either as SamplingParams or as keywords ({', '.join(sampling)})"
            )
        return params
    try:
        return SamplingParams(**sampling)
    except TypeError as error:
        raise ConfigError(str(error).replace("SamplingParams.__init__() ", "sampling: ")) from None
