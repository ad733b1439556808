"""Coupled sample-match, the default rule: the target draws, and drafts that agree are accepted.

The rule always emits the target's own draw, so the output equals plain decoding by construction,
for any draft, tree or pruning, and without q. A drafter that draws with the same noise agrees more
often.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from outrider.contracts import Distributions, Draw, Proposal, SequenceView, Verdict


class CoupledVerifier:
    """Exact for every draft, chains and trees."""

    name = "coupled"
    draws = frozenset(Draw)
    trees = True
    needs_draws_alone = True

    def verify(
        self, views: Seq[SequenceView], proposals: Seq[Proposal], distributions: Distributions
    ) -> list[Verdict]:
        draws = distributions.draw()
        verdicts = []
        for start, proposal in zip(distributions.starts, proposals, strict=True):
            mine = draws[start : start + 1 + len(proposal.tokens)]
            path = match(proposal.tokens, proposal.parents, mine)
            last = path[-1] + 1 if path else 0
            verdicts.append(Verdict(path, mine[last], mine))
        return verdicts


def match(tokens: list[int], parents: list[int] | None, draws: list[int]) -> list[int]:
    """The nodes that agree with the target's draws; `draws[0]` is the root's, `draws[1 + i]` i's.

    A parent precedes its children, so one scan in node order finds the whole path. Of equal
    siblings the first is used: this can cost acceptance, never exactness.
    """
    path: list[int] = []
    if parents is None:
        for node, token in enumerate(tokens):
            if token != draws[node]:
                break
            path.append(node)
        return path
    last = -1
    for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        if parent == last and token == draws[last + 1]:
            path.append(node)
            last = node
    return path
