"""The target's first layers draft for all of them: no second model, no second KV.

Drafting runs layers 1..E of the target, then its norm and head, and writes their K/V into the
sequence's own lookahead slots. The verifying pass starts from the same tokens at the same slots
and writes the same values there again, above them those of the other layers: nothing needs to be
kept in step, and nothing is left over when a draft is refused.

That pass runs the first E layers of the drafts again. Going on from layer E instead would need the
last draft's first E layers all the same, since nobody feeds it while drafting: D drafts read these
layers' weights D + 1 times either way. Where weights are what a pass waits for (one or a few
sequences) there is nothing to save; where arithmetic is, there are better proposers.

Good drafts need a target that was trained with early-exit losses, as the bundled one is.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

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
from outrider.kv.cache import KVCache
from outrider.layout import Slice
from outrider.proposers._autoregressive import AutoregressiveDrafter
from outrider.proposers._options import read_options

_SHARE = 0.4  # of the target's layers, where the user does not say
_MAX_PENDING = 8  # tokens the target has yet to see; more are the end of a prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlyExitConfig:
    """`exit_layer`: how many layers draft; None is two fifths of them."""

    exit_layer: int | None = None

    def resolved(self, num_layers: int) -> int:
        """The number of layers that draft for a target of `num_layers`; ConfigError if unfit."""
        if num_layers < 2:
            raise ConfigError(
                "proposer 'early-exit' needs a target of two layers or more; "
                "choose another proposer, such as 'ngram'"
            )
        layer = self.exit_layer
        if layer is None:
            return max(1, round(_SHARE * num_layers))
        if not isinstance(layer, int) or not 1 <= layer < num_layers:
            raise ConfigError(
                f"exit_layer of proposer 'early-exit' must be in 1..{num_layers - 1} "
                f"for this target, not {layer!r}"
            )
        return layer


class _LookaheadSlots:
    """`Memory` of a drafter that has none of its own: the target's slots behind the context."""

    def __init__(self, model: Model, kv: KVCache) -> None:
        self.model = model
        self._kv = kv

    def room(self, view: SequenceView) -> int:
        return self.model.spec.max_positions - len(view.tokens) + 1

    def catch_up(self, view: SequenceView, num_drafts: int) -> Slice | None:
        pending = view.tokens[view.num_computed :]
        # A prompt is left to the target alone: drafting would compute much of it twice.
        if len(pending) > _MAX_PENDING:
            return None
        if not self._kv.reserve(view.id, len(view.tokens) + num_drafts):
            return None
        return Slice(pending, view.num_computed, self._kv.table(view.id), Proposal())

    def drafted(self, view: SequenceView, tokens: list[int]) -> None:
        """Nothing to remember: the verifying pass writes these slots again."""


class EarlyExitProposer:
    name = "early-exit"
    draws = frozenset({Draw.COUPLED, Draw.SAMPLED})
    trees = False
    needs = Needs()

    def __init__(self, target: Model, kv: KVCache, exit_layer: int) -> None:
        self.exit_layer = exit_layer
        self._drafter = AutoregressiveDrafter(
            _LookaheadSlots(target, kv), target.spec.num_tokens, self.name, exit_layer
        )

    @classmethod
    def build(cls, context: ProposerContext) -> EarlyExitProposer:
        config = read_options(EarlyExitConfig, cls.name, context.options)
        return cls(
            context.target, context.target_kv, config.resolved(context.target.spec.num_layers)
        )

    def propose(self, views: Seq[SequenceView], budgets: Seq[int]) -> list[Proposal]:
        return self._drafter.draft(views, budgets)

    def observe(self, views: Seq[SequenceView], seen: Seq[Observation]) -> None:
        """Nothing to do: the engine commits the slots."""

    def release(self, sequence_id: int) -> None:
        """Nothing to forget."""
