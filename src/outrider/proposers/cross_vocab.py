"""A draft model of another family, with another tokenizer. There are two methods:

text          it drafts text, which the target's tokenizer cuts into tokens. The draft is its
              greedy continuation, a function of the text alone: one-hot for every rule, and exact
              under all of them however the two tokenizers differ. What does not align (half a
              character, special tokens) is not drafted.
intersection  it drafts tokens that both have, drawn from its distribution over these. Drafts can be
              sampled, and coupled ones share the target's noise. Good if most tokens are common.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import torch

from outrider.contracts import (
    Draw,
    Model,
    Needs,
    Observation,
    Proposal,
    ProposerContext,
    SequenceView,
)
from outrider.errors import UnknownName
from outrider.layout import Slice
from outrider.model.tokenizer import Tokenizer, load_tokenizer
from outrider.proposers._autoregressive import AutoregressiveDrafter
from outrider.proposers._common_vocabulary import CommonVocabulary
from outrider.proposers._draft_memory import DraftMemory
from outrider.proposers.draft_model import chosen_drafter
from outrider.proposers.ngram_index import up_to_finish
from outrider.proposers.options import read_options
from outrider.proposers.retokenize import Follower, continuation
from outrider.sampling import SamplingParams

_METHODS = ("text", "intersection")
_GREEDY = SamplingParams()
_OPEN = 4  # tokens at the end of the drafter's text that later text may still cut differently


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossVocabConfig:
    """`method`: "text" or "intersection"; the drafter is the engine's draft model."""

    method: str = "text"

    def __post_init__(self) -> None:
        if self.method not in _METHODS:
            raise UnknownName("method of proposer 'cross-vocab'", str(self.method), _METHODS)


@dataclass(slots=True)
class _Translated:
    """The sequence in the drafter's tokens. Satisfies SequenceView; drafts greedily.

    Unlike a sequence's own tokens, the last ones may change: see `_OpenEnded`.
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
    stop_rule: None = None


class _OpenEnded:
    """`Memory` over a DraftMemory that commits all but the last tokens of each text.

    The last tokens may still change. They are fed with the drafts, and kept or dropped like drafts.
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
        """Called when only the first `num_stayed` tokens are unchanged."""
        settled = self._settled.get(sequence_id)
        if settled is not None and len(settled.tokens) > num_stayed:
            self.release(sequence_id)

    def release(self, sequence_id: int) -> None:
        self._memory.release(sequence_id)
        self._settled.pop(sequence_id, None)


class _TargetMemory:
    """`Memory` for the target's views: translates each text into the drafter's ids.

    It translates token by token, so that both texts end at the same place and no token changes.
    """

    def __init__(self, memory: DraftMemory, common: CommonVocabulary) -> None:
        self._memory = memory
        self._common = common
        self._translated: dict[int, _Translated] = {}

    @property
    def model(self) -> Model:
        return self._memory.model

    def room(self, view: SequenceView) -> int:
        return self._memory.room(self._follow(view))

    def catch_up(self, view: SequenceView, num_drafts: int) -> Slice | None:
        translated = self._translated[view.id]
        return self._memory.catch_up(translated, num_drafts) if translated.tokens else None

    def drafted(self, view: SequenceView, tokens: list[int]) -> None:
        ids = [self._common.fed(token) for token in tokens]
        self._memory.drafted(self._translated[view.id], ids)

    def release(self, sequence_id: int) -> None:
        self._memory.release(sequence_id)
        self._translated.pop(sequence_id, None)

    def _follow(self, view: SequenceView) -> _Translated:
        translated = self._translated.get(view.id)
        if translated is None:
            translated = _Translated(view.id, [], view.salt, frozenset())
            self._translated[view.id] = translated
        for token in view.tokens[translated.num_computed :]:
            translated.tokens += self._common.translate(token)
        translated.num_computed = len(view.tokens)
        self._memory.settle(translated)
        return translated


class _CommonDrafter(AutoregressiveDrafter):
    """Draws tokens of the common vocabulary, by the target's ids; step by step."""

    def __init__(
        self, memory: _TargetMemory, common: CommonVocabulary, num_tokens: int, name: str
    ) -> None:
        super().__init__(memory, num_tokens, name)
        self._common = common

    def _draft_chains(
        self, views: list[SequenceView], budgets: list[int], slices: list[Slice]
    ) -> list[Proposal]:
        return self._draft_stepwise(views, budgets, slices)

    def _dists(self, logits_RD: torch.Tensor) -> torch.Tensor:
        return self._common.dists(logits_RD)

    def _fed(self, token: int) -> int:
        return self._common.fed(token)


class CrossVocabProposer:
    name = "cross-vocab"
    trees = False
    needs = Needs()

    def __init__(
        self,
        target: Tokenizer,
        drafter: Tokenizer,
        memory: DraftMemory,
        common: CommonVocabulary | None = None,
    ) -> None:
        """`common`: draft these tokens instead of text."""
        self._target = target
        self._tokenizer = drafter
        self._memory = _OpenEnded(memory)
        num_tokens = memory.model.spec.num_tokens
        self._drafter = AutoregressiveDrafter(self._memory, num_tokens, self.name)
        self._target_memory: _TargetMemory | None = None
        self.draws = frozenset({Draw.DETERMINISTIC})
        if common is not None:
            self.draws = frozenset({Draw.COUPLED, Draw.SAMPLED})
            self._target_memory = _TargetMemory(memory, common)
            self._drafter = _CommonDrafter(
                self._target_memory, common, common.num_tokens, self.name
            )
        self._followers: dict[int, Follower] = {}

    @classmethod
    def build(cls, context: ProposerContext) -> CrossVocabProposer:
        config = read_options(CrossVocabConfig, cls.name, context.options)
        chosen = chosen_drafter(context, cls.name)
        tokenizer = load_tokenizer(chosen)
        model = context.load_model(chosen)
        common = None
        if config.method == "intersection":
            common = CommonVocabulary(
                context.tokenizer,
                tokenizer,
                context.target.spec.num_tokens,
                model.spec.num_tokens,
            )
        memory = DraftMemory(model, context.make_kv(model))
        return cls(context.tokenizer, tokenizer, memory, common)

    def propose(self, views: Seq[SequenceView], budgets: Seq[int]) -> list[Proposal]:
        if self._target_memory is not None:
            return self._drafter.draft(views, budgets)
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
        """Nothing to do: the next draft reads the committed text."""

    def release(self, sequence_id: int) -> None:
        if self._target_memory is not None:
            self._target_memory.release(sequence_id)
            return
        self._memory.release(sequence_id)
        self._followers.pop(sequence_id, None)
