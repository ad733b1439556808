"""Drafts the prompt again, token for token: the output as an echo of the input."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.contracts import Observation, Proposal, SequenceView


class EchoProposer:
    name = "echo"

    def __init__(self, max_tokens: int = 16) -> None:
        """At most `max_tokens` in a draft."""
        self.max_tokens = max_tokens

    def propose(self, views: Sequence[SequenceView], budgets: Sequence[int]) -> list[Proposal]:
        drafts = []
        for view, budget in zip(views, budgets, strict=True):
            place = len(view.tokens) % view.num_prompt_tokens
            end = min(place + budget, place + self.max_tokens, view.num_prompt_tokens)
            drafts.append(view.tokens[place:end])
        return [Proposal(draft, source=self.name) for draft in drafts]

    def observe(self, views: Sequence[SequenceView], seen: Sequence[Observation]) -> None:
        """Nothing to learn from what became of a draft."""
