"""Drafts the prompt again, token for token: the output as an echo of the input."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.contracts import Draw, Needs, Observation, Proposal, ProposerContext, SequenceView


class EchoProposer:
    name = "echo"
    draws = frozenset({Draw.DETERMINISTIC})  # a function of the context, nothing is drawn
    trees = False
    needs = Needs()

    @classmethod
    def build(cls, context: ProposerContext) -> EchoProposer:
        return cls()

    def propose(self, views: Sequence[SequenceView], budgets: Sequence[int]) -> list[Proposal]:
        drafts = []
        for view, budget in zip(views, budgets, strict=True):
            place = len(view.tokens) % view.num_prompt_tokens
            drafts.append(view.tokens[place : min(place + budget, view.num_prompt_tokens)])
        return [Proposal(draft, source=self.name) for draft in drafts]

    def observe(self, views: Sequence[SequenceView], seen: Sequence[Observation]) -> None:
        """Nothing to learn from what became of a draft."""

    def release(self, sequence_id: int) -> None:
        """Nothing to forget."""
