"""What look-ups were worth: how far texts went along with what had been found."""

from __future__ import annotations

from outrider.contracts import LookedUp, Proposal

_START = 0.7  # acceptance of a looked-up token nobody has seen yet, at temperature 0
_PRIOR_WEIGHT = 4.0  # what all sequences together are worth beside this one, in drafts
_OWN_DECAY = 0.95
_SHARED_DECAY = 0.99

Rates = tuple[float, float]


class Worth:
    """How likely a look-up's drafts are accepted, by their size: the first token, and each further
    one if all before it were. (A match is by chance or it is not: then it goes on for long.)

    Larger drafts come from longer matches: a size that was hardly seen leans on smaller ones.
    """

    def __init__(self, shared: Worth | None = None, temperature: float = 0.0) -> None:
        """`shared`: what is known from everybody; None: this one is. Hot text repeats less."""
        self._shared = shared
        self._start = _START / (1.0 + temperature)
        self._decay = _SHARED_DECAY if shared is None else _OWN_DECAY
        # size -> decayed numbers of first tokens, of those accepted, and the same of further ones
        self._seen: dict[int, tuple[float, float, float, float]] = {}

    def rates(self, most: int) -> list[Rates]:
        """For sizes 0..most."""
        if self._shared is not None:
            known = self._shared.rates(most)
            return [self._lean(size, rates) for size, rates in enumerate(known)]
        all_rates = [(self._start, self._start)]
        for size in range(1, most + 1):
            all_rates.append(self._lean(size, all_rates[-1]))
        return all_rates

    def _lean(self, size: int, rates: Rates) -> Rates:
        if size not in self._seen:
            return rates
        first, first_good, further, good = self._seen[size]
        weight = _PRIOR_WEIGHT
        return (
            (first_good + weight * rates[0]) / (first + weight),
            (good + weight * rates[1]) / (further + weight),
        )

    def learn(self, size: int, num_accepted: int, is_refused: bool) -> None:
        """From a draft of which so many tokens were right, and then the text left it, or not."""
        if self._shared is not None:
            self._shared.learn(size, num_accepted, is_refused)
        first, first_good, further, good = self._seen.get(size, (0.0, 0.0, 0.0, 0.0))
        decay = self._decay
        self._seen[size] = (
            decay * first + 1,
            decay * first_good + (num_accepted > 0),
            decay * further + max(0, num_accepted - 1 + is_refused),
            decay * good + max(0, num_accepted - 1),
        )


def follow(proposal: Proposal | LookedUp, tokens: list[int], start: int) -> tuple[int, bool | None]:
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
