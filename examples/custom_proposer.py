"""A proposer of your own, without a package.

It drafts the token that followed the last token most often in this text. For a package with an
entry point, which Outrider finds by name, see examples/echo_proposer.

python examples/custom_proposer.py [--max-tokens 96]
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

from outrider import LLM, Speculation, register
from outrider.contracts import Observation, Proposal, SequenceView


class MostFrequent:
    def propose(self, views: Sequence[SequenceView], budgets: Sequence[int]) -> list[Proposal]:
        return [
            Proposal(self._draft(view.tokens, budget), source="most-frequent")
            for view, budget in zip(views, budgets, strict=True)
        ]

    def _draft(self, tokens: list[int], budget: int) -> list[int]:
        after: dict[int, Counter[int]] = {}
        for token, following in pairwise(tokens):
            after.setdefault(token, Counter())[following] += 1
        draft: list[int] = []
        last = tokens[-1]
        while len(draft) < budget and last in after:
            last = after[last].most_common(1)[0][0]
            draft.append(last)
        return draft

    def observe(self, views: Sequence[SequenceView], seen: Sequence[Observation]) -> None:
        """This proposer learns nothing from verdicts."""


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--max-tokens", type=int, default=96)
    chosen = parser.parse_args(arguments)

    register("most-frequent", MostFrequent)
    llm = LLM("bundled")
    prompt = "import json\n\n\ndef load(path):\n"
    texts = set()
    for name in (None, "ngram", "most-frequent"):
        result = llm.generate(
            prompt,
            max_tokens=chosen.max_tokens,
            speculation=Speculation(proposer=name, num_draft_tokens=4),
        )
        print(f"{name or 'plain':14} {result.stats.tokens_per_pass:.2f} tokens per pass")
        texts.add(result.text)
    assert len(texts) == 1, "a proposer cannot change the text"


if __name__ == "__main__":
    main()
