"""What look-ups were worth: how far texts went along with what had been found."""

from __future__ import annotations

from outrider.contracts import Found, Proposal

_START = 0.7  # acceptance of a looked-up token nobody has seen yet, at temperature 0
_PRIOR_WEIGHT = 4.0  # what smaller drafts are worth beside those of a size, in drafts
_DECAY = 0.97
_OWN_DECAY = 0.95  # of what one text did
_OWN_WEIGHT = 3.0  # accepted tokens that speak for its being as all others
_MOST = 0.99  # probability

Rates = tuple[float, float]


class Worth:
    """How likely a look-up's drafts are accepted, by their size: the first token, and each further
    one if all before it were. (A match is by chance or it is not: then it goes on for long.)

    Larger drafts come from longer matches: a size that was hardly seen leans on smaller ones.
    """

    def __init__(self, temperature: float = 0.0) -> None:
        """Hot text repeats less."""
        self._start = _START / (1.0 + temperature)
        # size -> decayed numbers of first tokens, of those accepted, and the same of further ones
        self._seen: dict[int, tuple[float, float, float, float]] = {}

    def rates(self, most: int) -> list[Rates]:
        """For sizes 0..most."""
        rates = (self._start, self._start)
        found = [rates]
        for size in range(1, most + 1):
            if size in self._seen:
                first, first_good, further, good = self._seen[size]
                rates = (
                    (first_good + _PRIOR_WEIGHT * rates[0]) / (first + _PRIOR_WEIGHT),
                    (good + _PRIOR_WEIGHT * rates[1]) / (further + _PRIOR_WEIGHT),
                )
            found.append(rates)
        return found

    def learn(self, size: int, num_accepted: int, is_refused: bool) -> None:
        """From a draft of which so many tokens were right, and then the text left it, or not."""
        first, first_good, further, good = self._seen.get(size, (0.0, 0.0, 0.0, 0.0))
        self._seen[size] = (
            _DECAY * first + 1,
            _DECAY * first_good + (num_accepted > 0),
            _DECAY * further + max(0, num_accepted - 1 + is_refused),
            _DECAY * good + max(0, num_accepted - 1),
        )


class OwnWorth:
    """The same for one text, which is short: how much more or less often than usual its drafts are
    accepted, whatever their size."""

    def __init__(self, shared: Worth) -> None:
        self._shared = shared
        # Accepted and expected, decayed: first tokens and further ones.
        self._first = self._further = (0.0, 0.0)

    def rates(self, most: int) -> list[Rates]:
        """For sizes 0..most."""
        first, further = _factor(*self._first), _factor(*self._further)
        return [
            (min(_MOST, first * a), min(_MOST, further * b)) for a, b in self._shared.rates(most)
        ]

    def learn(self, size: int, num_accepted: int, is_refused: bool) -> None:
        first, further = self._shared.rates(size)[size]
        good, expected = self._first
        self._first = _OWN_DECAY * good + (num_accepted > 0), _OWN_DECAY * expected + first
        num_further = max(0, num_accepted - 1 + is_refused)
        good, expected = self._further
        self._further = (
            _OWN_DECAY * good + max(0, num_accepted - 1),
            _OWN_DECAY * expected + num_further * further,
        )
        self._shared.learn(size, num_accepted, is_refused)


def _factor(accepted: float, expected: float) -> float:
    return (accepted + _OWN_WEIGHT) / (expected + _OWN_WEIGHT)


def follow(proposal: Proposal | Found, tokens: list[int], start: int) -> tuple[int, bool | None]:
    """How many drafts the text `tokens[start:]` agrees with, and whether it then left them.

    None: not known yet; False: it came to the end of the draft.
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


def first_nodes(proposal: Proposal, num_nodes: int) -> Proposal:
    """The beginning of a deterministic draft."""
    if num_nodes >= len(proposal.tokens):
        return proposal
    parents = proposal.parents
    return Proposal(
        proposal.tokens[:num_nodes],
        None if parents is None else parents[:num_nodes],
        source=proposal.source,
    )
