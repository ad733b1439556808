"""Acceptance of look-ups: by the size of what was found, shared and per request."""

from __future__ import annotations

from outrider.contracts import Proposal
from outrider.policy.lookups import LookupAcceptance, LookupPrior, follow


def test_a_draft_is_followed_until_the_text_leaves_it() -> None:
    chain = Proposal([5, 6, 7])
    assert follow(chain, [1, 5], 1) == (1, None)
    assert follow(chain, [1, 5, 6, 7], 1) == (3, False)
    assert follow(chain, [1, 5, 9], 1) == (1, True)
    tree = Proposal([5, 6, 7, 8], [-1, -1, 0, 1])
    assert follow(tree, [6], 0) == (1, None)
    assert follow(tree, [6, 8, 3], 0) == (2, False)
    assert follow(tree, [6, 7], 0) == (1, True)


def test_worth_leans_on_others_and_on_smaller_sizes_until_it_knows() -> None:
    shared = LookupPrior()
    for _ in range(200):
        LookupAcceptance(shared).observe(4, 0, True)
    own = LookupAcceptance(shared)
    assert shared.rates(2)[2] == (0.7, 0.7)
    for size in (4, 9):
        assert own.rates(9)[size][0] < 0.1
        assert own.rates(9)[size][1] == 0.7  # nothing was ever seen of it
    for accepted in [9] * 60 + [1]:
        own.observe(9, accepted, accepted < 9)
    assert min(own.rates(9)[9]) > 0.9
    assert LookupAcceptance(shared).rates(9)[4][0] < 0.1
    assert min(LookupAcceptance(shared).rates(20)[20]) > 0.8


def test_a_few_refusals_of_any_size_speak_against_all_of_this_text_alone() -> None:
    shared = LookupPrior()
    for size in range(1, 9):
        for _ in range(30):
            shared.observe(size, size, False)
    own = LookupAcceptance(shared)
    for size in (1, 3, 5, 8):
        own.observe(size, 0, True)
    assert own.rates(8)[2][0] < 0.6
    assert LookupAcceptance(shared).rates(8)[2][0] > 0.8
