"""Tokens that two tokenizers have in common: the same text under two ids.

A drafter of another family can draw from these directly. Its q, restricted to them and
renormalised, is a distribution over the target's ids: exact under every rule, and coupled to the
target's noise if the rule is (Timor et al. 2025, "TLI").

Shapes: R rows, D the drafter's vocabulary, V the target's true ids, C tokens in common.
"""

from __future__ import annotations

import torch

from outrider.errors import ConfigError
from outrider.model.tokenizer import Tokenizer

_BROKEN = "\ufffd"


class CommonVocabulary:
    def __init__(self, target: Tokenizer, drafter: Tokenizer, num_tokens: int, width: int) -> None:
        """`num_tokens`: the target's true ids. `width`: of the drafter's logits."""
        theirs = {piece: id for id, piece in _pieces(drafter, width).items()}
        ours = _pieces(target, num_tokens)
        self.num_tokens = num_tokens
        self._target, self._drafter = target, drafter
        self._theirs = {id: theirs[piece] for id, piece in ours.items() if piece in theirs}
        if not self._theirs:
            raise ConfigError(
                "the draft model's tokenizer has no token in common with the target's; "
                "choose method 'text' of proposer 'cross-vocab'"
            )
        self._target_C = torch.tensor(list(self._theirs))
        self._drafter_C = torch.tensor(list(self._theirs.values()))

    def __len__(self) -> int:
        return len(self._theirs)

    def dists(self, logits_RD: torch.Tensor) -> torch.Tensor:
        """The drafter's logits by the target's ids, [R, V]; -inf for ids that it lacks."""
        logits_RV = logits_RD.new_full((len(logits_RD), self.num_tokens), -torch.inf)
        device = logits_RD.device
        logits_RV[:, self._target_C.to(device)] = logits_RD[:, self._drafter_C.to(device)]
        return logits_RV

    def translate(self, token: int) -> list[int]:
        """The drafter's ids for the text of a target's token; none if it alone is no text."""
        id = self._theirs.get(token)
        if id is not None:
            return [id]
        text = self._target.decode([token])
        return [] if _BROKEN in text else self._drafter.encode(text, special=False)

    def fed(self, token: int) -> int:
        """The drafter's id of a token it drafted, given by the target's."""
        return self._theirs[token]


def _pieces(tokenizer: Tokenizer, limit: int) -> dict[int, bytes]:
    """What each id adds to a text; none for special ids and for half a character."""
    ids = [i for i in sorted(tokenizer.vocabulary) if i < limit and i not in tokenizer.special_ids]
    if tokenizer.is_byte_level:
        return {id: piece for id in ids if (piece := tokenizer.token_bytes(id))}
    # Decoders treat the beginning of a text specially, so decode each id after another one.
    anchor = tokenizer.encode("a", special=False)[-1:]
    before = tokenizer.decode(anchor)
    pieces = {}
    for id in ids:
        text = tokenizer.decode([*anchor, id])
        if text.startswith(before) and len(text) > len(before) and _BROKEN not in text:
            pieces[id] = text[len(before) :].encode()
    return pieces
