"""The Python API: load a target and a proposer by name, generate, stream, read the figures.

from outrider import LLM

llm = LLM("bundled")                               # target and draft model that ship with us
result = llm.generate("def add(a, b):", max_tokens=64)
print(result.text, result.stats.acceptance_length)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from typing import Any, Literal, Never, overload

from outrider.config import EngineConfig, NumDraftTokens, SamplingParams, Speculation
from outrider.engine.build import build
from outrider.engine.engine import Engine, Result
from outrider.engine.lane import Group
from outrider.errors import ConfigError, UnknownName
from outrider.events import StepEvent

Prompt = str | list[int]


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
        prefix_caching: bool = True,
        max_sequences: int = 64,
        max_step_tokens: int = 512,
        max_ahead_steps: int = 16,
        buckets: tuple[tuple[int, int], ...] | None = None,
        # end
        **unknown: Never,
    ) -> None:
        given = _given(locals())
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
        # fields of SamplingParams, written by `make reference`
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        repetition_penalty: float = 1.0,
        logit_bias: Mapping[int, float] = {},
        banned_ids: tuple[int, ...] = (),
        seed: int | None = None,
        n: int = 1,
        max_tokens: int = 128,
        min_tokens: int = 0,
        stop: tuple[str, ...] = (),
        stop_ids: tuple[int, ...] = (),
        ignore_eos: bool = False,
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
        # end
    ) -> Result: ...

    @overload
    def generate(
        self,
        prompts: list[str] | list[list[int]],
        params: SamplingParams | None = None,
        *,
        speculation: Speculation | None = None,
        prediction: str = "",
        # fields of SamplingParams, written by `make reference`
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        repetition_penalty: float = 1.0,
        logit_bias: Mapping[int, float] = {},
        banned_ids: tuple[int, ...] = (),
        seed: int | None = None,
        n: int = 1,
        max_tokens: int = 128,
        min_tokens: int = 0,
        stop: tuple[str, ...] = (),
        stop_ids: tuple[int, ...] = (),
        ignore_eos: bool = False,
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
        # end
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
        # fields of SamplingParams, written by `make reference`
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        repetition_penalty: float = 1.0,
        logit_bias: Mapping[int, float] = {},
        banned_ids: tuple[int, ...] = (),
        seed: int | None = None,
        n: int = 1,
        max_tokens: int = 128,
        min_tokens: int = 0,
        stop: tuple[str, ...] = (),
        stop_ids: tuple[int, ...] = (),
        ignore_eos: bool = False,
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
        # end
        **unknown: Never,
    ) -> Iterator[StepEvent]:
        """Each step's confirmed tokens and text as they come; leaving early cancels the request."""
        sampling = _given(locals()) | unknown
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


def _given(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a configuration among a method's arguments."""
    own = ("self", "prompt", "params", "speculation", "prediction", "unknown")
    return {name: value for name, value in arguments.items() if name not in own}


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
    usual = SamplingParams()
    changed = [name for name, value in sampling.items() if value != getattr(usual, name)]
    if changed:
        raise ConfigError(
            f"give sampling either as SamplingParams or as keywords ({', '.join(changed)})"
        )
    return params
