"""A drafter with a prescribed survival curve, to measure the engine at a known acceptance.

It gets the output in advance (as the request's prediction) and drafts it, but replaces the token at
depth k by a wrong one with probability 1 - alpha_k. So acceptance is known, and the difference
between the engine's speed and the formula is overhead of the engine.

With a real proposer underneath, that proposer drafts too and its tokens are discarded: drafts have
its cost and the prescribed acceptance. It must not see the real output. Otherwise it would find its
tokens rejected and compute the others again, which a drafter with this acceptance does not. So it
drafts for another text, which contains one of its tokens for each accepted draft.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from random import Random
from typing import Any, cast

from outrider.contracts import (
    Draw,
    Needs,
    Observation,
    Proposal,
    Proposer,
    SequenceView,
    StopRule,
)
from outrider.draft_plans import DraftPlan, Lookup, Propose, Script, planner
from outrider.engine.engine import Engine
from outrider.errors import ConfigError

NAME = "synthetic"


class SyntheticProposer:
    name = NAME
    draws = frozenset({Draw.DETERMINISTIC})
    trees = False

    def __init__(
        self,
        alphas: Seq[float],
        num_tokens: int,
        beneath: Proposer | None = None,
        random: Callable[[], float] | None = None,
    ) -> None:
        """`alphas[k]`: acceptance of draft k + 1 if all before it were; the last one goes on.

        `random` draws from [0, 1).
        """
        if not alphas or not all(0.0 <= alpha <= 1.0 for alpha in alphas):
            raise ConfigError("a synthetic acceptance must be within [0, 1]")
        if beneath is not None and beneath.needs.taps:
            raise ConfigError(f"proposer {beneath.name!r} cannot draft beneath a synthetic one")
        self.alphas = list(alphas)
        self._num_tokens = num_tokens
        self._beneath = beneath
        self.needs = Needs(every_step=False) if beneath is None else beneath.needs
        self._random = random or Random(0).random
        self._shadows: dict[int, _Shadow] = {}

    def propose(self, views: Seq[SequenceView], budgets: Seq[int]) -> list[Proposal]:
        if self._beneath is not None:
            shadows = [self._shadow(view) for view in views]
            drafts = self._beneath.propose(cast("list[SequenceView]", shadows), budgets)
            for shadow, draft in zip(shadows, drafts, strict=True):
                shadow.draft = draft
        return [
            Proposal(self._draft(view, budget), source=self.name)
            for view, budget in zip(views, budgets, strict=True)
        ]

    def _draft(self, view: SequenceView, budget: int) -> list[int]:
        done = len(view.tokens) - view.num_prompt_tokens
        tokens = view.prediction[done : done + budget]
        right = self._num_right(len(tokens))
        if right < len(tokens):
            tokens[right] = (tokens[right] + 1) % self._num_tokens
        return tokens

    def observe(self, views: Seq[SequenceView], seen: Seq[Observation]) -> None:
        if self._beneath is None:
            return
        known = [(self._shadows[v.id], o) for v, o in zip(views, seen, strict=True)
                 if v.id in self._shadows]  # fmt: skip
        for shadow, observation in known:
            if observation.proposal.drafted is not None:
                shadow.draft = observation.proposal
        shown = [Observation(shadow.follow(), o.verdict, start=o.start) for shadow, o in known]
        self._beneath.observe(cast("list[SequenceView]", [shadow for shadow, _ in known]), shown)

    def plan(self, views: Seq[SequenceView], budgets: Seq[int], max_steps: int) -> DraftPlan:
        clock: DraftPlan | None = None
        if self._beneath is not None:
            make_plan = planner(self._beneath)
            shadows = cast("list[SequenceView]", [self._shadow(view) for view in views])
            clock = Propose() if make_plan is None else make_plan(shadows, budgets, max_steps)
            if isinstance(clock, Propose):
                return clock
        longest = max(budgets)
        furthest = max_steps * (longest + 1)
        done = [len(v.tokens) - v.num_prompt_tokens for v in views]
        texts = [v.prediction[n : n + furthest] for v, n in zip(views, done, strict=True)]
        # Only as far as a draft reaches: the engine's own time is measured with this.
        right = [
            [self._num_right(min(left, longest)) for left in range(len(text), 0, -1)]
            for text in texts
        ]
        # A look-up takes no time worth counting.
        clock = clock.otherwise if isinstance(clock, Lookup) else clock
        return Script(self.name, texts, right, list(budgets), clock=clock)

    def _shadow(self, view: SequenceView) -> _Shadow:
        shadow = self._shadows.setdefault(view.id, _Shadow(view))
        if len(shadow.tokens) < len(view.tokens):  # by steps without drafts, which are not observed
            shadow.follow()
        return shadow

    def _num_right(self, most: int) -> int:
        for k in range(most):
            if self._random() >= self.alphas[min(k, len(self.alphas) - 1)]:
                return k
        return most

    def release(self, sequence_id: int) -> None:
        if self._beneath is not None:
            self._shadows.pop(sequence_id, None)
            self._beneath.release(sequence_id)


class _Shadow:
    """The proposer's own sequence: as long as the real one, with its own tokens."""

    def __init__(self, view: SequenceView) -> None:
        self._view = view
        self.tokens = list(view.tokens)
        self.draft = Proposal()
        self.stop_rule: StopRule | None = None  # a prescribed acceptance has no confidence

    def __getattr__(self, name: str) -> Any:
        return getattr(self._view, name)

    def follow(self) -> Proposal:
        """Adds as many tokens as the real sequence got, its own draft first; returns that draft."""
        draft, self.draft = self.draft, Proposal()
        before, real = len(self.tokens), self._view.tokens
        self.tokens += draft.tokens[: len(real) - before - 1]
        self.tokens += real[len(self.tokens) :]
        return draft


def add_synthetic(engine: Engine, alpha: float | Seq[float], beneath: str | None = None) -> str:
    """Adds a synthetic proposer to the engine; returns its name. Requests need a prediction."""
    alphas = [alpha] if isinstance(alpha, int | float) else list(alpha)
    proposer = SyntheticProposer(
        alphas,
        engine.target.spec.num_tokens,
        None if beneath is None else engine.proposers[beneath],
    )
    proposer.name = f"{NAME} {','.join(f'{alpha:g}' for alpha in alphas)}"
    if beneath is not None:
        proposer.name += f" over {beneath}"
    engine.proposers[proposer.name] = proposer
    return proposer.name
