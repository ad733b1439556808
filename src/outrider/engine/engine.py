"""The synchronous engine: requests in, confirmed tokens out, one `step()` at a time."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from outrider.engine.request import Request, Sequence, Speculation, TokenLogprob
from outrider.engine.step import Parts, release_drafts, run_step
from outrider.errors import RequestError, UnknownName
from outrider.events import StepReport
from outrider.model.tokenizer import Tokenizer
from outrider.sampling import LogitEdits, SamplingParams
from outrider.statistics import SpeculationStats
from outrider.verifiers import exact_pairing

Observer = Callable[[StepReport], None]


@dataclass(slots=True)
class Completion:
    """One finished sample."""

    text: str
    tokens: list[int]
    finish_reason: str  # "stop", "length" or "cancelled"
    logprobs: list[TokenLogprob] | None = None


@dataclass(slots=True)
class Result:
    """A finished request: its n completions and what speculation did for them."""

    request_id: str
    prompt_tokens: list[int]
    completions: list[Completion]
    seed: int
    stats: SpeculationStats = field(default_factory=SpeculationStats)

    @property
    def text(self) -> str:
        return self.completions[0].text

    @property
    def tokens(self) -> list[int]:
        return self.completions[0].tokens


class Engine:
    """Not thread-safe: one thread drives it (see `AsyncEngine` for many clients)."""

    def __init__(self, parts: Parts, tokenizer: Tokenizer, default: Speculation) -> None:
        self.parts = parts
        self.tokenizer = tokenizer
        self.default = default
        self.observers: list[Observer] = []
        self._request_ids = itertools.count()
        self._live: dict[str, list[Sequence]] = {}
        self._stats: dict[str, SpeculationStats] = {}

    def add(
        self,
        prompt: str | list[int],
        params: SamplingParams | None = None,
        *,
        speculation: Speculation | None = None,
        prediction: str | list[int] = "",
        salt: str = "",
        request_id: str | None = None,
    ) -> str:
        """Queues a request and returns its id; raises RequestError or ConfigError, queueing nothing."""
        params = params or SamplingParams()
        speculation = speculation or self.default
        tokens = self._encode_prompt(prompt)
        if isinstance(prediction, str):
            prediction = self.tokenizer.encode(prediction, special=False) if prediction else []
        request = Request(
            id=request_id or f"req-{next(self._request_ids)}",
            prompt=tokens,
            params=params,
            speculation=speculation,
            seed=secrets.randbits(63) if params.seed is None else params.seed,
            prediction=prediction,
            salt=salt,
        )
        if request.id in self._live:
            raise RequestError(f"request id {request.id!r} is already in use", "request_id")
        sequences = [self.make_sequence(request, i) for i in range(params.n)]
        self._live[request.id] = sequences
        self._stats[request.id] = SpeculationStats()
        for sequence in sequences:
            self.parts.scheduler.add(sequence)
        return request.id

    def _encode_prompt(self, prompt: str | list[int]) -> list[int]:
        tokens = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        spec = self.parts.target.spec
        limit = self.parts.scheduler.max_positions
        if not tokens:
            raise RequestError("the prompt is empty: give at least one token", "prompt")
        if len(tokens) >= limit:
            raise RequestError(
                f"the prompt has {len(tokens)} tokens, but the context holds {limit} "
                "and at least one must be left to generate: shorten the prompt",
                "prompt",
            )
        if not 0 <= min(tokens) <= max(tokens) < spec.num_tokens:
            raise RequestError(f"prompt ids must be in 0..{spec.num_tokens - 1}", "prompt")
        return tokens

    def make_sequence(self, request: Request, sample_index: int) -> Sequence:
        """A sample's sequence, not queued yet; refuses what no engine step could do exactly."""
        spec, params, speculation = self.parts.target.spec, request.params, request.speculation
        if speculation.verifier not in self.parts.verifiers:
            raise UnknownName("verifier", speculation.verifier, self.parts.verifiers)
        limit, wanted = self.parts.scheduler.max_positions, speculation.num_draft_tokens
        if wanted != "auto" and not (isinstance(wanted, int) and 0 <= wanted < limit):
            raise RequestError(
                f"num_draft_tokens must be 'auto' or in 0..{limit - 1}, not {wanted!r}",
                "num_draft_tokens",
            )
        verifier = self.parts.verifiers[speculation.verifier]
        if speculation.proposer is None:
            draw = next(iter(verifier.draws))
        else:
            proposer = self.parts.proposers[speculation.proposer]
            draw = exact_pairing(proposer.draws, proposer.trees, verifier)
            self.parts.taps = tuple(sorted({*self.parts.taps, *proposer.needs.taps}))
        finish_ids = frozenset(params.stop_ids) | (
            frozenset() if params.ignore_eos else frozenset(spec.eos_ids)
        )
        edits = None
        if params.edits_logits:
            edits = LogitEdits(params, len(request.prompt), spec.num_tokens, finish_ids)
        text = self.tokenizer.stream(request.prompt)
        return Sequence(request, sample_index, draw, finish_ids, text, edits)

    @property
    def has_work(self) -> bool:
        return bool(self.parts.scheduler.running or self.parts.scheduler.waiting)

    def step(self) -> StepReport | None:
        """One pass of the target. None when there is nothing to do."""
        report = run_step(self.parts)
        if report is not None:
            for event in report.events:
                self._stats[event.request_id].add(event, report.timing)
            for observer in self.observers:
                observer(report)
        return report

    def cancel(self, request_id: str) -> None:
        """Ends a request now and frees what it holds. Unknown or finished ids are fine."""
        for sequence in self._live.get(request_id, ()):
            if sequence.finish_reason is None:
                sequence.finish_reason = "cancelled"
                self.parts.scheduler.remove(sequence)
                release_drafts(self.parts, sequence)

    def is_finished(self, request_id: str) -> bool:
        return all(s.finish_reason is not None for s in self._live[request_id])

    def collect(self, request_id: str) -> Result:
        """The result of a finished request, which the engine then forgets."""
        sequences = self._live.pop(request_id)
        first = sequences[0].request
        return Result(
            request_id,
            first.prompt,
            [
                Completion(
                    "".join(s.output_text),
                    s.output,
                    s.finish_reason or "cancelled",
                    s.logprobs if s.params.logprobs is not None else None,
                )
                for s in sequences
            ],
            first.seed,
            self._stats.pop(request_id),
        )

    def run(self, request_ids: list[str]) -> Iterator[StepReport]:
        """Steps until all of these are finished; cancels what is left if the caller walks away."""
        try:
            while not all(self.is_finished(i) for i in request_ids):
                report = self.step()
                if report is not None:
                    yield report
        finally:
            for request_id in request_ids:
                self.cancel(request_id)
