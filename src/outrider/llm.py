"""The Python API: load a target and a proposer by name, generate, stream, read the figures.

from outrider import LLM

llm = LLM("bundled")                               # target and draft model that ship with us
result = llm.generate("def add(a, b):", max_tokens=64)
print(result.text, result.stats.acceptance_length)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from typing import Any, Literal, Never, TypedDict, Unpack, overload

from outrider.config import EngineConfig, NumDraftTokens, SamplingParams, Speculation
from outrider.engine.build import build
from outrider.engine.engine import Engine, Result
from outrider.engine.lane import Group
from outrider.errors import ConfigError, UnknownName
from outrider.events import StepEvent

Prompt = str | list[int]


class SamplingKeywords(TypedDict, total=False):
    """The fields of `SamplingParams` as keyword arguments; one that is left out has its default."""

    # types of SamplingParams, written by `make reference`
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: Mapping[int, float]
    banned_ids: tuple[int, ...]
    seed: int | None
    n: int
    max_tokens: int
    min_tokens: int
    stop: tuple[str, ...]
    stop_ids: tuple[int, ...]
    ignore_eos: bool
    skip_special_tokens: bool
    logprobs: int | None
    prompt_logprobs: int | None
    logprob_ids: tuple[int, ...]
    # end


class LLM:
    """A target with its proposers, ready to generate.

    The keyword arguments are the fields of `EngineConfig`.
    """

    def __init__(
        self,
        model: str = "bundled",
        *,
        # fields of EngineConfig, written by `make reference`
        draft_model: str | None = None,
        other_drafters: tuple[str, ...] = (),
        proposer: str | None = None,
        proposer_options: Mapping[str, Mapping[str, object]] = {},
        num_draft_tokens: NumDraftTokens = "auto",
        verifier: str = "coupled",
        device: str = "cpu",
        dtype: str = "auto",
        backend: Literal["auto", "native", "torch", "transformers"] = "auto",
        threads: int | None = None,
        tensor_parallel_size: int = 1,
        block_size: int = 16,
        kv_tokens: int | None = None,
        kv_memory: int | None = None,
        kv_dtype: str = "auto",
        max_model_len: int | None = None,
        prefix_caching: bool = True,
        max_sequences: int = 64,
        max_step_tokens: int = 512,
        max_ahead_steps: int = 16,
        buckets: tuple[tuple[int, int], ...] | None = None,
        # end
        **unknown: Never,
    ) -> None:
        given = {k: v for k, v in locals().items() if k not in ("self", "unknown")}
        _refuse("LLM", unknown, EngineConfig)
        self.config = EngineConfig(**given | {"model": str(model)})
        self.engine: Engine = build(self.config)

    @overload
    def generate(
        self,
        prompts: Prompt,
        params: SamplingParams | None = None,
        *,
        speculation: Speculation | None = None,
        prediction: str = "",
        **sampling: Unpack[SamplingKeywords],
    ) -> Result: ...

    @overload
    def generate(
        self,
        prompts: list[str] | list[list[int]],
        params: SamplingParams | None = None,
        *,
        speculation: Speculation | None = None,
        prediction: str = "",
        **sampling: Unpack[SamplingKeywords],
    ) -> list[Result]: ...

    def generate(
        self,
        prompts: Prompt | list[str] | list[list[int]],
        params: SamplingParams | None = None,
        *,
        speculation: Speculation | None = None,
        prediction: str = "",
        **sampling: Unpack[SamplingKeywords],
    ) -> Result | list[Result]:
        """One result per prompt, all decoded in one batch; a single prompt gives a single result.

        Sampling is a `SamplingParams` or its fields as keywords (`temperature=0.7, seed=1`).
        """
        single = isinstance(prompts, str) or (bool(prompts) and isinstance(prompts[0], int))
        batch: list[Any] = [prompts] if single else list(prompts)
        params = _params(params, sampling)
        with Group(self.engine) as group:
            for prompt in batch:
                group.add(prompt, params, speculation=speculation, prediction=prediction)
            for _ in group:
                pass
        return group.results[0] if single else group.results

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        speculation: Speculation | None = None,
        prediction: str = "",
        **sampling: Unpack[SamplingKeywords],
    ) -> Iterator[StepEvent]:
        """Each step's confirmed tokens and text as they come; leaving early cancels the request."""
        return self._stream(prompt, _params(params, sampling), speculation, prediction)

    def _stream(
        self, prompt: Prompt, params: SamplingParams, speculation: Speculation | None, guess: str
    ) -> Iterator[StepEvent]:
        with Group(self.engine) as group:
            request_id = group.add(prompt, params, speculation=speculation, prediction=guess)
            for report in group:
                for event in report.events:
                    if event.request_id == request_id:
                        yield event


def _refuse(what: str, names: Iterable[str], config: type) -> None:
    """Raises UnknownName for the first name that is no field of `config`."""
    known = [field.name for field in fields(config)]
    for name in names:
        if name not in known:
            raise UnknownName(f"argument of {what}", name, known)


def _params(params: SamplingParams | None, sampling: Mapping[str, Any]) -> SamplingParams:
    _refuse("generate", sampling, SamplingParams)
    if params is None:
        return SamplingParams(**sampling)
    if sampling:
        raise ConfigError(
            f"give sampling either as SamplingParams or as keywords ({', '.join(sampling)})"
        )
    return params
