"""A request, and the sequences it becomes: one per sample, each with its own history and KV."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

from outrider.config import Speculation as Speculation
from outrider.contracts import Draw, Edits, StopRule
from outrider.engine.stops import StopScanner
from outrider.events import TokenLogprob
from outrider.grammar import Grammar
from outrider.model.tokenizer import ByteTextStream, TextStream
from outrider.policy import MAX_AUTO_DRAFT_TOKENS
from outrider.sampling import LogitEdits, SamplingParams

_ids = itertools.count()


@dataclass(frozen=True, slots=True)
class Request:
    id: str
    prompt: list[int]
    params: SamplingParams
    speculation: Speculation
    seed: int  # resolved
    prediction: list[int] = field(default_factory=list)
    salt: str = ""
    grammar: Grammar | None = None
    queue_deadline: float | None = None  # of the monotonic clock: fails if not admitted by then


class Sequence:
    """One sample of a request. Only the engine changes it."""

    def __init__(
        self,
        request: Request,
        sample_index: int,
        draw: Draw,
        finish_ids: frozenset[int],
        text: TextStream | ByteTextStream,
        edits: LogitEdits | None,
        drafts_early: bool = False,
    ) -> None:
        """`drafts_early`: see contracts.Needs."""
        grammar = request.grammar
        self.id = next(_ids)
        self.request = request
        self.request_id = request.id
        self.verifier = request.speculation.verifier
        self.sample_index = sample_index
        self.tokens = list(request.prompt)
        self.num_prompt_tokens = len(request.prompt)
        self.params = request.params
        self.seed = request.seed
        self.draw = draw
        self.drafts_early = drafts_early
        self.prediction = request.prediction
        self.salt = request.salt
        self.proposer = request.speculation.proposer  # None once switched off
        num_draft_tokens = request.speculation.num_draft_tokens
        self.adaptive = num_draft_tokens == "auto"
        self.max_draft_tokens = (
            MAX_AUTO_DRAFT_TOKENS if num_draft_tokens == "auto" else num_draft_tokens
        )
        self.finish_ids = finish_ids
        self.matcher = None if grammar is None else grammar.matcher(len(request.prompt), edits)
        self.edits: Edits | None = self.matcher or edits
        self.text = text
        self.scanner = StopScanner(list(request.params.stop))
        self.stop_rule: StopRule | None = None
        self.num_computed = 0  # tokens whose K/V the target holds
        self.num_steps = 0
        self.finish_reason: str | None = None
        self.output_text: list[str] = []
        self.logprobs: list[TokenLogprob] = []
        self.prompt_logprobs: list[TokenLogprob] = []  # of tokens 1, 2, ... as far as computed
        self.admitted_s: float | None = None  # first time it ran, on the monotonic clock
        self.num_cached_tokens = 0  # of the prompt, found in the prefix cache then

    @property
    def output(self) -> list[int]:
        return self.tokens[self.num_prompt_tokens :]

    @property
    def num_output_tokens(self) -> int:
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def scores_prompt(self) -> bool:
        """Whether the prompt's own log-probabilities are wanted: once, whatever n is."""
        return self.params.prompt_logprobs is not None and self.sample_index == 0

    @property
    def num_pending(self) -> int:
        """Committed tokens the target has not seen yet; 1 while decoding."""
        return len(self.tokens) - self.num_computed
