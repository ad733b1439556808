"""Which nodes of a draft tree to grow: two strategies with one interface.

    nodes = growth.to_expand()             -1 is the root; none: the tree is grown
    growth.add(node, tokens, scores)       for each of them, its children, best first
    growth.chosen()                        the nodes to submit, parents before children

`BestFirst` chooses nodes by the drafted tokens. It is for sample-match, which is exact for every
tree. Ratio rules need `FixedShape`: whether a node exists must not depend on its token, or a
rejection would carry information about drafts that are not judged yet.

`best_children` finds the children: the k best guesses of what the target will draw after a node.

Shape legend: R rows (nodes to expand), V vocabulary, C children.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Sequence
from functools import lru_cache
from itertools import count
from typing import Protocol

import numpy as np
import torch

from outrider import native
from outrider.contracts import Draw, Proposal, SequenceView
from outrider.errors import ConfigError
from outrider.noise import gumbel
from outrider.proposers._autoregressive import draft_key
from outrider.sampling import RowParams, filtered

ROOT = -1

# How likely the first, second, ... child is the one accepted: roughly what small draft models
# reach at temperature 1. Only the order of the products along paths matters.
_FIRST_CHILD = 0.6
_NEXT_CHILD = 0.3


class Growth(Protocol):
    tokens: list[int]  # of every node so far
    parents: list[int]

    def to_expand(self) -> list[int]: ...

    def num_children(self, node: int) -> int:
        """How many children `node` wants; it may get fewer."""
        ...

    def add(self, node: int, tokens: Sequence[int], scores: Sequence[float]) -> None: ...

    def chosen(self) -> list[int]: ...


def path_tokens(growth: Growth, node: int) -> list[int]:
    """The drafted tokens from the root down to `node`."""
    tokens: list[int] = []
    while node != ROOT:
        tokens.append(growth.tokens[node])
        node = growth.parents[node]
    return tokens[::-1]


def submit(
    growth: Growth, draw: Draw, source: str, dists: Sequence[torch.Tensor] | None = None
) -> Proposal:
    """The chosen nodes as a proposal; `dists` has the q of every node, if the rule needs it."""
    chosen = growth.chosen()
    place = {ROOT: ROOT} | {node: i for i, node in enumerate(chosen)}
    return Proposal(
        [growth.tokens[node] for node in chosen],
        [place[growth.parents[node]] for node in chosen],
        draw=draw,
        q=torch.stack([dists[node] for node in chosen]) if dists and chosen else None,
        source=source,
    )


def check_limits(proposer: str, passes: int, width: int, children: int) -> None:
    """Raises ConfigError for a tree that could not have a node."""
    if min(passes, width, children) < 1:
        raise ConfigError(
            f"{proposer} needs passes, width and children of at least 1, "
            f"not {passes}, {width} and {children}"
        )


class BestFirst:
    """The `num_nodes` nodes with the largest sums of scores (at most 0) along their paths.

    A child never scores above its parent. So a node that is not among the best so far, or is their
    last, has no descendants in the final tree and is not expanded. At most `width` nodes are
    expanded at a time.
    """

    def __init__(
        self,
        num_nodes: int,
        *,
        num_children: int,
        max_depth: int,
        width: int,
        finish_ids: Collection[int],
    ) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self._scores: list[float] = []
        self._depths: list[int] = []
        self._num_nodes = num_nodes
        self._num_children = num_children
        self._max_depth = max_depth
        self._width = width
        self._finish_ids = finish_ids
        self._expanded: set[int] = set()

    def to_expand(self) -> list[int]:
        if ROOT not in self._expanded:
            return [ROOT]
        return [
            node
            for node in self._best()[: self._num_nodes - 1]
            if node not in self._expanded
            and self._depths[node] < self._max_depth
            and self.tokens[node] not in self._finish_ids
        ][: self._width]

    def num_children(self, node: int) -> int:
        return min(self._num_children, self._num_nodes)

    def add(self, node: int, tokens: Sequence[int], scores: Sequence[float]) -> None:
        above, depth = (0.0, 0) if node == ROOT else (self._scores[node], self._depths[node])
        self._expanded.add(node)
        self.tokens += tokens
        self.parents += [node] * len(tokens)
        self._scores += [above + score for score in scores]
        self._depths += [depth + 1] * len(tokens)

    def chosen(self) -> list[int]:
        return sorted(self._best())

    def _best(self) -> list[int]:
        """Best first; of equals the earlier, so that no child comes before its parent."""
        order = sorted(range(len(self.tokens)), key=lambda node: (-self._scores[node], node))
        return order[: self._num_nodes]


class FixedShape:
    """A fixed shape of `num_nodes` nodes. A finishing token, or a distribution with too few tokens,
    removes the nodes that would follow, without replacement."""

    def __init__(
        self, num_nodes: int, *, num_children: int, max_depth: int, finish_ids: Collection[int]
    ) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self._shape = likely_shape(num_nodes, num_children, max_depth)
        self._place: list[int] = []  # node of the shape, by node
        self._finish_ids = finish_ids
        self._open = [ROOT]

    def to_expand(self) -> list[int]:
        return [node for node in self._open if self.num_children(node)]

    def num_children(self, node: int) -> int:
        return len(self._shape[self._place[node] if node != ROOT else ROOT])

    def add(self, node: int, tokens: Sequence[int], scores: Sequence[float]) -> None:
        places = self._shape[self._place[node] if node != ROOT else ROOT]
        self._open.remove(node)
        for place, token in zip(places, tokens, strict=False):
            if token not in self._finish_ids:
                self._open.append(len(self.tokens))
            self.tokens.append(token)
            self.parents.append(node)
            self._place.append(place)

    def chosen(self) -> list[int]:
        return list(range(len(self.tokens)))


@lru_cache(maxsize=256)
def likely_shape(num_nodes: int, num_children: int, max_depth: int) -> dict[int, tuple[int, ...]]:
    """The children of the root and of each node: the likeliest paths, judged by sibling order."""
    children: dict[int, list[int]] = {ROOT: []}
    ticket = count()
    heap = [(-_FIRST_CHILD, next(ticket), ROOT, 0, 1)]
    while heap and len(children) <= num_nodes:
        minus_chance, _, parent, rank, depth = heapq.heappop(heap)
        node = len(children) - 1
        children[parent].append(node)
        children[node] = []
        if rank + 1 < num_children:
            sibling = (minus_chance * _NEXT_CHILD, next(ticket), parent, rank + 1, depth)
            heapq.heappush(heap, sibling)
        if depth < max_depth:
            child = (minus_chance * _FIRST_CHILD, next(ticket), node, 0, depth + 1)
            heapq.heappush(heap, child)
    return {node: tuple(below) for node, below in children.items()}


def best_children(
    logits_RV: torch.Tensor, rows: RowParams, keys: list[int], num_children: int
) -> tuple[list[list[int]], list[list[float]]]:
    """The first children of each row and how likely each is to be the target's draw, as logs.

    `keys` are draw keys, unused on greedy rows. Suppose the target's logits were the drafter's
    plus Gumbel noise of scale 1. Then the token that wins under *known* sampling noise g is
    distributed as softmax(logits + T g).
    """
    num_children = min(num_children, logits_RV.shape[-1])
    if native.available() and logits_RV.device.type == "cpu":
        found_RC, logs_RC = native.best_guesses(
            logits_RV,
            rows.temperature_R,
            rows.top_k_R,
            rows.top_p_R,
            rows.min_p_R,
            np.array(keys, np.uint64),
            num_children,
        )
        return found_RC.tolist(), logs_RC.tolist()
    noisy_RV = logits_RV
    if rows.temperature_R.any():
        temperature = torch.from_numpy(rows.temperature_R).to(logits_RV.device)[:, None]
        if rows.filters:
            noisy_RV = filtered(logits_RV, rows) * torch.where(temperature > 0, temperature, 1.0)
        # Coupled nodes of one depth share their noise, and noise costs more than all the rest.
        unique = list(dict.fromkeys(keys))
        noise_UV = gumbel(unique, noisy_RV.shape[-1], noisy_RV.device)
        noise_RV = noise_UV[[unique.index(key) for key in keys]]
        noisy_RV = torch.addcmul(noisy_RV, temperature, noise_RV)
    best_RC = noisy_RV.topk(num_children)
    scores_RC = best_RC.values - noisy_RV.logsumexp(dim=-1, keepdim=True)
    return best_RC.indices.tolist(), scores_RC.tolist()


def add_children(
    views: Sequence[SequenceView],
    growths: Sequence[Growth],
    nodes: Sequence[Sequence[int]],
    logits_RV: torch.Tensor,
    num_children: int,
) -> None:
    """Children for all `nodes` of coupled trees; `logits_RV` has a row for each, in order."""
    keys: list[int] = []
    for view, growth, wanted in zip(views, growths, nodes, strict=True):
        for node in wanted:
            path = path_tokens(growth, node)
            if view.edits is not None:
                view.edits.apply(logits_RV[len(keys)], view.tokens, path)
            keys.append(draft_key(view, len(path), 1 + node))
    rows = RowParams.of([view.params for view in views], list(map(len, nodes)))
    answers = zip(*best_children(logits_RV, rows, keys, num_children), strict=True)
    for growth, wanted in zip(growths, nodes, strict=True):
        for node in wanted:
            some, logs = next(answers)
            size = sum(log > -math.inf for log in logs)
            growth.add(node, some[:size], logs[:size])
