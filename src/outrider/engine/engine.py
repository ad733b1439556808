"""The synchronous engine: requests in, confirmed tokens out, one `step()` at a time."""

from __future__ import annotations

import ctypes
import itertools
import secrets
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from time import monotonic
from typing import TYPE_CHECKING

from outrider.contracts import Draw, Model, Proposer, ReplacesWeights, Verifier
from outrider.engine.commit import release_drafts
from outrider.engine.request import Request, Sequence, Speculation
from outrider.engine.scheduler import Scheduler
from outrider.engine.step import ReadySteps, run_step
from outrider.errors import ConfigError, EngineError, Overloaded, RequestError, UnknownName
from outrider.events import StepReport, StepTiming, TokenLogprob
from outrider.executors import Executors
from outrider.grammar import Grammar
from outrider.kv.cache import KVCache
from outrider.model.capabilities import PrefersThinPasses
from outrider.model.tokenizer import Tokenizer
from outrider.policy.base import Policy
from outrider.sampling import LogitEdits, SamplingParams
from outrider.statistics import SpeculationStats
from outrider.verifiers import exact_pairing

if TYPE_CHECKING:
    import torch

Observer = Callable[[StepReport], None]


@dataclass(slots=True)
class Completion:
    """One finished sample."""

    text: str
    tokens: list[int]
    finish_reason: str  # "stop", "length", "cancelled" or "error"
    logprobs: list[TokenLogprob] | None = None


@dataclass(slots=True)
class RequestTimes:
    """When a request reached which stage, on the monotonic clock. None: it never did."""

    arrived_s: float
    admitted_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None


@dataclass(slots=True)
class Result:
    """A finished request: its n completions and what speculation did for them."""

    request_id: str
    prompt_tokens: list[int]
    completions: list[Completion]
    seed: int
    stats: SpeculationStats = field(default_factory=SpeculationStats)
    times: RequestTimes = field(default_factory=lambda: RequestTimes(monotonic()))
    prompt_logprobs: list[TokenLogprob] | None = None  # of every prompt token but the first
    num_cached_tokens: int = 0  # of the prompt, found in the prefix cache

    @property
    def text(self) -> str:
        return self.completions[0].text

    @property
    def tokens(self) -> list[int]:
        return self.completions[0].tokens


class Engine:
    """Not thread-safe: one thread drives it (see `AsyncEngine` for many clients)."""

    def __init__(
        self,
        target: Model,
        kv: KVCache,
        scheduler: Scheduler,
        policy: Policy,
        proposers: MutableMapping[str, Proposer],
        verifiers: Mapping[str, Verifier],
        executors: Executors,
        tokenizer: Tokenizer,
        default: Speculation,
        max_steps: int = 1,
    ) -> None:
        """`default`: for requests that do not choose; `max_steps`: computed in one call."""
        self.target = target
        self.kv = kv
        self.scheduler = scheduler
        self.policy = policy
        self.proposers = proposers
        self.drafters: tuple[
            str, ...
        ] = ()  # proposers of further draft models, which requests name
        self.verifiers = verifiers
        self.tokenizer = tokenizer
        self.default = default
        self.executors = executors
        self.max_steps = max_steps
        self.ready_steps: ReadySteps | None = None  # of the last call
        self.interrupted = ctypes.c_int32()  # native code reads it, too
        # Looked up once: a protocol's check is slow.
        self.thin_passes = target if isinstance(target, PrefersThinPasses) else None
        self.observers: list[Observer] = []
        self._request_ids = itertools.count()
        self._live: dict[str, list[Sequence]] = {}
        self._stats: dict[str, SpeculationStats] = {}
        self._times: dict[str, RequestTimes] = {}

    def fork(self, policy: Policy | None = None) -> Engine:
        """An engine over the same models and KV pool, with a schedule of its own.

        The two must not step at the same time. `policy`: None shares this one's.
        """
        return Engine(
            self.target,
            self.kv,
            Scheduler(self.kv, self.scheduler.max_positions, self.scheduler.config),
            policy or self.policy,
            self.proposers,
            self.verifiers,
            self.executors,
            self.tokenizer,
            self.default,
            self.max_steps,
        )

    def interrupt(self) -> None:
        """Ends the call under way after its current step, until `resume`. For any thread."""
        self.interrupted.value = 1

    def resume(self) -> None:
        """Lets calls compute several steps again."""
        self.interrupted.value = 0

    @property
    def has_ready_steps(self) -> bool:
        """Whether `step` only has to commit a step that an earlier call has computed."""
        return self.ready_steps is not None and bool(self.ready_steps.results)

    def add(
        self,
        prompt: str | list[int],
        params: SamplingParams | None = None,
        *,
        speculation: Speculation | None = None,
        prediction: str | list[int] = "",
        salt: str = "",
        grammar: Grammar | None = None,
        request_id: str | None = None,
        queue_timeout_s: float | None = None,
    ) -> str:
        """Queues a request, returns its id; raises RequestError or ConfigError, queueing nothing.

        A request that does not get to run within `queue_timeout_s` fails with Overloaded.
        """
        now = monotonic()
        params = params or SamplingParams()
        speculation = speculation or self.default
        tokens = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        self.check_prompt(tokens)
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
            grammar=grammar,
            queue_deadline=None if queue_timeout_s is None else now + queue_timeout_s,
        )
        if request.id in self._live:
            raise RequestError(f"request id {request.id!r} is already in use", "request_id")
        sequences = [self.make_sequence(request, i) for i in range(params.n)]
        self._live[request.id] = sequences
        self._stats[request.id] = SpeculationStats()
        self._times[request.id] = RequestTimes(now)
        for sequence in sequences:
            self.scheduler.add(sequence)
        return request.id

    def check_prompt(self, tokens: list[int], param: str = "prompt") -> None:
        """Raises RequestError for a prompt that cannot run; `param` is its name in the message."""
        num_tokens = self.target.spec.num_tokens
        if not tokens:
            raise RequestError("the prompt is empty: give at least one token", param)
        if len(tokens) >= self.scheduler.max_positions:
            raise self.prompt_too_long(str(len(tokens)), param)
        if not 0 <= min(tokens) <= max(tokens) < num_tokens:
            raise RequestError(
                f"a token id is out of vocabulary: they must be in 0..{num_tokens - 1}", param
            )

    def prompt_too_long(self, num_tokens: str, param: str = "prompt") -> RequestError:
        """The error for a prompt of `num_tokens` tokens, in the words that API clients search."""
        limit, spec = self.scheduler.max_positions, self.target.spec
        why = f" ({spec.shortened})" if spec.shortened and limit == spec.max_positions else ""
        return RequestError(
            f"this model's maximum context length is {limit} tokens{why}, and "
            f"your {param} {'have' if param == 'messages' else 'has'} {num_tokens}: "
            f"shorten the {param}",
            param,
            "context_length_exceeded",
        )

    def make_sequence(self, request: Request, sample_index: int) -> Sequence:
        """A sample's sequence, not queued yet; refuses what no engine step could do exactly."""
        spec, params, speculation = self.target.spec, request.params, request.speculation
        if speculation.verifier not in self.verifiers:
            raise UnknownName("verifier", speculation.verifier, self.verifiers)
        limit, wanted = self.scheduler.max_positions, speculation.num_draft_tokens
        if wanted != "auto" and not (isinstance(wanted, int) and 0 <= wanted < limit):
            raise RequestError(
                f"num_draft_tokens must be 'auto' or in 0..{limit - 1}, not {wanted!r}",
                "num_draft_tokens",
            )
        verifier, drafts_early = self.verifiers[speculation.verifier], False
        if speculation.proposer is None:
            draw = next(iter(verifier.draws))
        else:
            proposer = self.proposers[speculation.proposer]
            draw = exact_pairing(proposer.draws, proposer.trees, verifier)
            drafts_early = proposer.needs.early or draw is Draw.DETERMINISTIC
        finish_ids = frozenset(params.stop_ids)
        if not params.ignore_eos or request.grammar is not None:  # a grammar ends with one
            finish_ids |= frozenset(spec.eos_ids)
        edits = None
        if params.edits_logits:
            edits = LogitEdits(params, len(request.prompt), spec.num_tokens, finish_ids)
        text = self.tokenizer.stream(request.prompt, special=not params.skip_special_tokens)
        return Sequence(request, sample_index, draw, finish_ids, text, edits, drafts_early)

    @property
    def has_work(self) -> bool:
        return bool(self.scheduler.running or self.scheduler.waiting)

    def step(self) -> StepReport | None:
        """One pass of the target. None when there is nothing to do.

        Requests in the report's `failures` have ended; the tokens of others are unaffected.
        """
        expired = self._expired()
        report = run_step(self)
        if report is None and expired:
            report = StepReport([], StepTiming(0.0, 0.0, 0.0, 0, 0))
        if report is None:
            return None
        report.failures.update(expired)
        now = monotonic()
        for event in report.events:
            self._stats[event.request_id].add(event, report.timing)
            times = self._times[event.request_id]
            times.last_token_s = now
            if times.first_token_s is None:
                times.first_token_s = now
        for request_id in report.failures:
            self._end(request_id, "error")
        for observer in self.observers:
            observer(report)
        return report

    def _expired(self) -> dict[str, EngineError]:
        """Takes requests that waited too long out of the queue: they are never computed."""
        if not self.scheduler.waiting:
            return {}
        now = monotonic()
        late = {
            s.request.id
            for s in self.scheduler.waiting
            if s.admitted_s is None and s.request.queue_deadline and now > s.request.queue_deadline
        }
        for request_id in late:
            self._end(request_id, "error")
        return {name: Overloaded("the request waited too long in the queue") for name in late}

    def replace_weights(self, proposer: str, weights: Mapping[str, torch.Tensor]) -> None:
        """Gives a proposer other trained weights, for all drafts from the next step on.

        Sequences go on with the keys and values that the old weights left: drafts may be less often
        right for the rest of such a sequence, never invalid.
        """
        drafter = self.proposers[proposer]
        if not isinstance(drafter, ReplacesWeights):
            raise ConfigError(f"the weights of proposer {proposer!r} cannot be replaced")
        drafter.replace_weights(weights)

    def cancel(self, request_id: str) -> None:
        """Ends a request now and frees what it holds. Unknown or finished ids are fine."""
        self._end(request_id, "cancelled")

    def _end(self, request_id: str, reason: str) -> None:
        for sequence in self._live.get(request_id, ()):
            if sequence.finish_reason is None:
                sequence.finish_reason = reason
                # The K/V of a failed request must not be shared.
                self.kv.free(sequence.id, keep=reason != "error")
                self.scheduler.remove(sequence)
                release_drafts(self, sequence)

    def is_finished(self, request_id: str) -> bool:
        return all(s.finish_reason is not None for s in self._live[request_id])

    def collect(self, request_id: str) -> Result:
        """The result of a finished request, which the engine then forgets."""
        sequences = self._live.pop(request_id)
        request, first = sequences[0].request, sequences[0]
        times = self._times.pop(request_id)
        times.admitted_s = first.admitted_s
        return Result(
            request_id,
            request.prompt,
            [
                Completion(
                    "".join(s.output_text),
                    s.output,
                    s.finish_reason or "cancelled",
                    s.logprobs if s.params.logprobs is not None else None,
                )
                for s in sequences
            ],
            request.seed,
            self._stats.pop(request_id),
            times,
            first.prompt_logprobs if first.scores_prompt else None,
            first.num_cached_tokens,
        )

    def run(self, request_ids: list[str]) -> Iterator[StepReport]:
        """Steps until all of these are finished; cancels the rest if the caller stops iterating.

        Raises the EngineError that one of them failed with.
        """
        try:
            while not all(self.is_finished(i) for i in request_ids):
                report = self.step()
                if report is not None:
                    for request_id, failure in report.failures.items():
                        if request_id in request_ids:
                            raise failure
                    yield report
        finally:
            for request_id in request_ids:
                self.cancel(request_id)
