"""Divergences against their definitions in plain arithmetic."""

from __future__ import annotations

import math

import pytest
import torch

from outrider.errors import UnknownName
from outrider.train.losses import LOSSES, acceptance, distil, get_loss, greedy_agreement

P = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.8, 0.1]])
Q = torch.tensor([[0.2, 0.6, 0.2], [0.1, 0.8, 0.1]])


def kl(a: list[float], b: list[float]) -> float:
    return sum(x * math.log(x / y) for x, y in zip(a, b, strict=True))


def by_hand(name: str, p: list[float], q: list[float]) -> float:
    middle = [(x + y) / 2 for x, y in zip(p, q, strict=True)]
    return {
        "forward-kl": kl(p, q),
        "reverse-kl": kl(q, p),
        "jsd": (kl(p, middle) + kl(q, middle)) / 2,
        "tvd": sum(abs(x - y) for x, y in zip(p, q, strict=True)) / 2,
    }[name]


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_each_loss_is_its_definition(name: str) -> None:
    found = get_loss(name)(Q.log(), P.log())
    expected = [by_hand(name, p, q) for p, q in zip(P.tolist(), Q.tolist(), strict=True)]
    torch.testing.assert_close(found, torch.tensor(expected), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_losses_do_not_depend_on_a_shift_of_the_logits(name: str) -> None:
    torch.testing.assert_close(
        get_loss(name)(Q.log() + 3, P.log() - 7), get_loss(name)(Q.log(), P.log())
    )


def test_acceptance_is_one_minus_total_variation() -> None:
    torch.testing.assert_close(acceptance(Q.log(), P.log()), torch.tensor([0.7, 1.0]))
    assert greedy_agreement(Q.log(), P.log()).tolist() == [0.0, 1.0]


def test_distil_moves_from_kl_to_total_variation() -> None:
    start, alpha = distil(Q.log(), P.log(), torch.tensor(0.0))
    end, _ = distil(Q.log(), P.log(), torch.tensor(1.0))
    torch.testing.assert_close(start, get_loss("forward-kl")(Q.log(), P.log()))
    torch.testing.assert_close(end, get_loss("tvd")(Q.log(), P.log()))
    torch.testing.assert_close(alpha, torch.tensor([0.7, 1.0]))


def test_a_reduced_vocabulary_can_accept_only_what_it_knows() -> None:
    ids = torch.tensor([0, 2])
    q = torch.tensor([[0.5, 0.5]])
    loss, alpha = distil(q.log(), P[:1].log(), torch.tensor(0.0), ids)
    torch.testing.assert_close(alpha, torch.tensor([0.5 + 0.2]))
    torch.testing.assert_close(loss, torch.tensor([kl([5 / 7, 2 / 7], [0.5, 0.5])]))


def test_an_unknown_loss_names_the_known_ones() -> None:
    with pytest.raises(UnknownName, match="forward-kl"):
        get_loss("forward_kl")
