"""How many tokens of a look-up the target accepts, by the size of what was found.

A match is by chance or it is not, and then it goes on for long. So two rates are learnt: how often
the first token is accepted, and how often each further one is if all before it were. Larger finds
come from longer matches: a size with little evidence leans on the next smaller one. Look-ups are
judged in steps that did not use them as well: the text that came shows how far they were right.
"""

from __future__ import annotations

from outrider.contracts import Found, Proposal
from outrider.policy.acceptance import OWN_DECAY, PRIOR_WEIGHT, START

Rates = tuple[float, float]  # acceptance of the first token, and of each further one


class LookupPrior:
    """What a look-up achieved lately at one temperature, over all requests."""

    def __init__(self, temperature: float = 0.0) -> None:
        # A higher temperature repeats less.
        self._start = START / (1.0 + temperature)
        # size -> decayed counts: first tokens, those accepted, further tokens, those accepted
        self._seen: dict[int, tuple[float, float, float, float]] = {}

    def rates(self, most: int) -> list[Rates]:
        """For sizes 0..most."""
        rates = (self._start, self._start)
        found = [rates]
        for size in range(1, most + 1):
            if size in self._seen:
                first, first_good, further, good = self._seen[size]
                rates = (
                    (first_good + PRIOR_WEIGHT * rates[0]) / (first + PRIOR_WEIGHT),
                    (good + PRIOR_WEIGHT * rates[1]) / (further + PRIOR_WEIGHT),
                )
            found.append(rates)
        return found

    def observe(self, size: int, num_accepted: int, is_refused: bool) -> None:
        """A find of `size` tokens; `is_refused`: the text left it after `num_accepted`."""
        first, first_good, further, good = self._seen.get(size, (0.0, 0.0, 0.0, 0.0))
        self._seen[size] = (
            OWN_DECAY * first + 1,
            OWN_DECAY * first_good + (num_accepted > 0),
            OWN_DECAY * further + max(0, num_accepted - 1 + is_refused),
            OWN_DECAY * good + max(0, num_accepted - 1),
        )


class LookupAcceptance:
    """One request: how much more or less often than the prior its look-ups are accepted, whatever
    their size."""

    def __init__(self, prior: LookupPrior) -> None:
        self._prior = prior
        # Accepted and expected, decayed: of first tokens and of further ones.
        self._first = self._further = (0.0, 0.0)

    def rates(self, most: int) -> list[Rates]:
        """For sizes 0..most."""
        first, further = _ratio(*self._first), _ratio(*self._further)
        return [(min(1.0, first * a), min(1.0, further * b)) for a, b in self._prior.rates(most)]

    def observe(self, size: int, num_accepted: int, is_refused: bool) -> None:
        first, further = self._prior.rates(size)[size]
        good, expected = self._first
        self._first = OWN_DECAY * good + (num_accepted > 0), OWN_DECAY * expected + first
        num_further = max(0, num_accepted - 1 + is_refused)
        good, expected = self._further
        self._further = (
            OWN_DECAY * good + max(0, num_accepted - 1),
            OWN_DECAY * expected + num_further * further,
        )
        self._prior.observe(size, num_accepted, is_refused)


def _ratio(accepted: float, expected: float) -> float:
    return (accepted + PRIOR_WEIGHT) / (expected + PRIOR_WEIGHT)


def follow(proposal: Proposal | Found, tokens: list[int], start: int) -> tuple[int, bool | None]:
    """How many drafted tokens the text `tokens[start:]` agrees with, and whether it then left them.

    None: the text is too short to tell; False: it reached the end of the draft.
    """
    parents = proposal.parents
    end, last, is_refused = start, -1, False
    for node, token in enumerate(proposal.tokens):
        parent = node - 1 if parents is None else parents[node]
        if parent == last:
            if end == len(tokens):
                return end - start, None
            is_refused = token != tokens[end]
            if not is_refused:
                last, end = node, end + 1
    return end - start, is_refused
