"""Packs a pass into a ragged batch: per sequence its pending tokens, then its draft nodes."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np

from outrider.contracts import IntArray, Proposal, StepBatch
from outrider.sampling import depths


@dataclass(slots=True)
class Slice:
    """A sequence's part of a pass: `tokens` continue a context of `context` computed tokens.

    `proposal` is None for a prefill chunk that does not reach the end of the known tokens: such a
    slice needs no logits.
    """

    tokens: list[int]
    context: int
    table: IntArray
    proposal: Proposal | None
    scored: range = range(0)  # tokens whose logits are needed besides root and nodes


def pack(slices: Seq[Slice], taps: tuple[int, ...] = ()) -> StepBatch:
    """One StepBatch. Its rows of logits are the root and the nodes of each slice with a proposal,
    then the `scored` tokens of each slice."""
    tokens: list[int] = []
    positions: list[int] = []
    starts = [0]
    rows: list[int] = []
    scored: list[int] = []
    has_tree = False
    for s in slices:
        if s.proposal is not None and s.proposal.parents is not None:
            has_tree = True
    parents: list[int] = []
    for s in slices:
        num_pending = len(s.tokens)
        first = len(tokens)
        tokens += s.tokens
        positions += range(s.context, s.context + num_pending)
        scored += [first + i for i in s.scored]
        if has_tree:
            parents += range(-1, num_pending - 1)
        if s.proposal is not None:
            root = num_pending - 1
            num_nodes = len(s.proposal.tokens)
            rows += range(first + root, first + num_pending + num_nodes)
            if num_nodes:
                tokens += s.proposal.tokens
                root_position = s.context + root
                positions += [root_position + d for d in depths(s.proposal)[1:]]
                if has_tree:
                    above = s.proposal.parents
                    parents += [
                        num_pending + p
                        for p in (range(-1, num_nodes - 1) if above is None else above)
                    ]
        starts.append(len(tokens))
    num_slices, t = len(slices), len(tokens)
    tables = stack_tables([s.table for s in slices])
    contexts = [s.context for s in slices]
    # One array cut in pieces: six conversions would take a noticeable part of a short step.
    all = np.array(tokens + positions + parents + starts + contexts + rows + scored, np.int32)
    s1 = 2 * t + len(parents)
    s2 = s1 + num_slices + 1
    s3 = s2 + num_slices
    return StepBatch(
        tokens_T=all[:t],
        positions_T=all[t : 2 * t],
        starts_S1=all[s1:s2],
        context_S=all[s2:s3],
        tables_SW=tables,
        logit_rows_R=all[s3:],
        parents_T=all[2 * t : s1] if has_tree else None,
        taps=taps,
    )


def stack_tables(tables: Seq[IntArray]) -> IntArray:
    """The block tables as rows of one array, padded with -1."""
    if len(tables) == 1:
        return tables[0][None]
    stacked = np.full((len(tables), max(map(len, tables), default=0)), -1, np.int32)
    for i, table in enumerate(tables):
        stacked[i, : len(table)] = table
    return stacked
