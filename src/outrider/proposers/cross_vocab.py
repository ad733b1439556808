"""A draft model of another family: it drafts text, which the target's tokenizer cuts into tokens.

The draft is its greedy continuation, a function of the text alone: one-hot for every rule, and
exact under all of them however the two tokenizers differ. What does not align (half a character,
special tokens) is not drafted.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from outrider.contracts import (
    Draw,
    Model,
    Needs,
    Observation,
    Proposal,
    ProposerContext,
    SequenceView,
)
from outrider.errors import ConfigError
from outrider.layout import Slice
from outrider.model.tokenizer import Tokenizer, load_tokenizer
from outrider.proposers._autoregressive import AutoregressiveDrafter
from outrider.proposers._draft_memory import DraftMemory
from outrider.proposers._ngram_index import up_to_finish
from outrider.proposers._options import read_options
from outrider.proposers._retokenize import Follower, continuation
from outrider.sampling import SamplingParams

_GREEDY = SamplingParams()
_OPEN = 4  # tokens at the end of the drafter's text that later text may still cut differently


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossVocabConfig:
    """No options of its own: the drafter is the engine's draft model."""


@dataclass(slots=True)
class _Translated:
    """The sequence in the drafter's tokens. Satisfies SequenceView; drafts greedily.

    Its tokens may change at the end, unlike a sequence's own: see `_OpenEnded`.
    """

    id: int
    tokens: list[int]
    salt: str
    finish_ids: frozenset[int]
    num_prompt_tokens: int = 0
    num_computed: int = 0
    params: SamplingParams = _GREEDY
    seed: int = 0
    sample_index: int = 0
    draw: Draw = Draw.COUPLED
    edits: None = None
    prediction: list[int] = field(default_factory=list)


class _OpenEnded:
    """`Memory` over a DraftMemory that commits all but the open end of each text.

    The open end is fed along with the drafts and kept or dropped as they are.
    """

    def __init__(self, memory: DraftMemory) -> None:
        self._memory = memory
        self._settled: dict[int, _Translated] = {}

    @property
    def model(self) -> Model:
        return self._memory.model

    def room(self, view: SequenceView) -> int:
        return self._memory.room(view)

    def catch_up(self, view: SequenceView, num_drafts: int) -> Slice | None:
        settled = self._settled.get(view.id)
        if settled is None:
            settled = _Translated(view.id, view.tokens[:1], view.salt, view.finish_ids)
            self._settled[view.id] = settled
        size = len(settled.tokens)
        settled.tokens += view.tokens[size : max(size, len(view.tokens) - _OPEN)]
        self._memory.settle(settled)
        open_end = view.tokens[len(settled.tokens) :]
        slice_ = self._memory.catch_up(settled, len(open_end) + num_drafts)
        if slice_ is not None:
            slice_.tokens += open_end
        return slice_

    def drafted(self, view: SequenceView, tokens: list[int]) -> None:
        settled = self._settled[view.id]
        self._memory.drafted(settled, view.tokens[len(settled.tokens) :] + tokens)

    def changed(self, sequence_id: int, num_stayed: int) -> None:
        """Says that only the first `num_stayed` tokens are still what they were."""
        settled = self._settled.get(sequence_id)
        if settled is not None and len(settled.tokens) > num_stayed:
            self.release(sequence_id)

    def release(self, sequence_id: int) -> None:
        self._memory.release(sequence_id)
        self._settled.pop(sequence_id, None)


class CrossVocabProposer:
    name = "cross-vocab"
    draws = frozenset({Draw.DETERMINISTIC})
    trees = False
    needs = Needs()

    def __init__(self, target: Tokenizer, drafter: Tokenizer, memory: DraftMemory) -> None:
        self._target = target
        self._tokenizer = drafter
        self._memory = _OpenEnded(memory)
        num_tokens = memory.model.spec.num_tokens
        self._drafter = AutoregressiveDrafter(self._memory, num_tokens, self.name)
        self._followers: dict[int, Follower] = {}

    @classmethod
    def build(cls, context: ProposerContext) -> CrossVocabProposer:
        read_options(CrossVocabConfig, cls.name, context.options)
        if context.drafter is None:
            raise ConfigError(
                "proposer 'cross-vocab' needs a draft model: pass --draft-model FOLDER "
                "(draft_model= in Python)"
            )
        tokenizer = load_tokenizer(context.drafter)
        model = context.load_model(context.drafter)
        return cls(context.tokenizer, tokenizer, DraftMemory(model, context.make_kv(model)))

    def propose(self, views: Seq[SequenceView], budgets: Seq[int]) -> list[Proposal]:
        followers = [self._follow(view) for view in views]
        proposals = [Proposal(source=self.name) for _ in views]
        asked = [i for i, follower in enumerate(followers) if follower.ids]
        translated = [
            _Translated(
                views[i].id,
                followers[i].ids,
                views[i].salt,
                self._tokenizer.special_ids,
            )
            for i in asked
        ]
        drafts = self._drafter.draft(translated, [budgets[i] for i in asked])
        for i, draft in zip(asked, drafts, strict=True):
            view = views[i]
            ids = continuation(self._target, view.tokens, followers[i].text_of(draft.tokens))
            proposals[i].tokens = up_to_finish(ids[: budgets[i]], view.finish_ids)
        return proposals

    def _follow(self, view: SequenceView) -> Follower:
        follower = self._followers.get(view.id)
        if follower is None:
            follower = Follower(self._target, self._tokenizer, view.tokens)
            self._followers[view.id] = follower
        else:
            self._memory.changed(view.id, follower.read(view.tokens))
        return follower

    def observe(self, views: Seq[SequenceView], seen: Seq[Observation]) -> None:
        """Nothing to do: committed text is read when the next draft is asked for."""

    def release(self, sequence_id: int) -> None:
        self._memory.release(sequence_id)
        self._followers.pop(sequence_id, None)
