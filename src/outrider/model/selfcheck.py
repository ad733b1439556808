"""The self-check: tests whether a model can verify drafts exactly.

Speculative decoding is exact only under two conditions: a pass over a tree of drafts gives, at
every node, the logits of a plain pass over the path to that node; and keeping a path and dropping
the rest leaves the same state as plain decoding. An architecture can break them silently: it may
ignore the attention implementation it is given, keep a recurrent state, or count positions itself.
The check runs a few short passes over made-up tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from outrider.contracts import Model
from outrider.errors import ModelError
from outrider.model.driver import Driver

# The largest allowed difference, as a fraction of the spread of the logits.
TOLERANCE = 1e-3
TOLERANCE_OF: dict[object, float] = {torch.float16: 2e-2, torch.bfloat16: 6e-2}

_PREFIX = 9
_PARENTS = [-1, 0, 0, 1, 2, 2, 3]
_LEAVES = (4, 5, 6)
_AFTER = 2

PlainLogits = Callable[[list[int]], torch.Tensor]  # tokens -> [n, V] float32


def self_check(model: Model, *, plain: PlainLogits | None = None) -> None:
    """Raises `ModelError` if tree verification, rollback or compaction change the logits.

    `plain` computes logits without our code, as a second reference. Replaces the model's KV store:
    call `allocate` again before use.
    """
    tolerance = TOLERANCE_OF.get(getattr(model, "dtype", None), TOLERANCE)
    needed = _PREFIX + len(_PARENTS) + _AFTER
    if model.spec.max_positions < needed:
        raise ModelError(
            f"{model.spec.name} has a context of only {model.spec.max_positions} tokens, and the "
            f"self-check needs {needed}; use another model"
        )
    prefix, nodes, after, other = _tokens(model.spec.num_tokens)
    driver = Driver(model, num_blocks=64, block_size=4, seed=1)

    def separate(tokens: list[int]) -> list[torch.Tensor]:
        name = f"plain {tokens}"
        ours = driver.forward({name: tokens}).logits[name]
        driver.release(name)
        return [ours] if plain is None else [ours, plain(tokens)]

    def compare(what: str, got: torch.Tensor, tokens: list[int]) -> None:
        for expected in separate(tokens):
            off = _difference(got, expected[-len(got) :], short=tolerance != TOLERANCE)
            if not off <= tolerance:  # a NaN fails too
                raise ModelError(
                    f"{model.spec.name} failed the self-check: {what} gives other logits than "
                    f"plain passes (off by {off:.1%} of their range), so speculation could not be "
                    "exact; use another model, or transformers itself for plain decoding"
                )

    # A ragged pass and a chunked prefill; then drop two tokens and compute them again.
    first = driver.forward({"tree": prefix[:6], "other": other})
    driver.keep("tree", range(4))
    driver.keep("other", range(len(other)))
    compare("a ragged batch", first.logits["other"], other)
    driver.forward({"tree": prefix[4:]})
    driver.keep("tree", range(_PREFIX - 4))

    # A tree and a chain in one pass, every root-to-leaf path against a plain pass.
    got = driver.forward({"tree": nodes, "other": after}, {"tree": _PARENTS})
    compare("a chain of drafts", got.logits["other"], other + after)
    for leaf in _LEAVES:
        path = _path(leaf)
        compare("a tree of drafts", got.logits["tree"][path], prefix + [nodes[i] for i in path])

    # Keep one path, drop the rest, continue.
    path = _path(_LEAVES[-1])
    driver.keep("tree", path)
    rest = driver.forward({"tree": after}).logits["tree"]
    compare("the state after a tree of drafts", rest, prefix + [nodes[i] for i in path] + after)


def _difference(got: torch.Tensor, expected: torch.Tensor, *, short: bool) -> float:
    """The distance of two sets of rows, as a fraction of the spread of the logits.

    It is the distance of the worst row; with short floats that of the median row, because there a
    rounding error can route a token to another expert, which is not an error of the pass.
    """
    rows = (got - expected).abs().amax(-1)
    spread = float(expected.max() - expected.min())
    return float(rows.median() if short else rows.max()) / max(spread, 1e-6)


def _tokens(num_tokens: int) -> tuple[list[int], list[int], list[int], list[int]]:
    """Prefix, tree nodes, continuation and another prefix: spread over the vocabulary."""
    count = _PREFIX + len(_PARENTS) + _AFTER + 5
    ids = [(7919 * i * i + 104729 * i + 11) % num_tokens for i in range(1, count + 1)]
    cuts = (_PREFIX, _PREFIX + len(_PARENTS), count - 5)
    return ids[: cuts[0]], ids[cuts[0] : cuts[1]], ids[cuts[1] : cuts[2]], ids[cuts[2] :]


def _path(node: int) -> list[int]:
    path = [node]
    while _PARENTS[path[0]] >= 0:
        path.insert(0, _PARENTS[path[0]])
    return path
