"""Rows of an EAGLE head by its torch module: of the text, then of the drafts, with keys and values.

Row i reads the features of token i and the embedding of token i + 1 and guesses token i + 2. When
a draft begins, the target has computed every token but the last, so the rows of the text end with
the one that guesses the first draft. From there on a row's features are the head's own output one
row before. The keys and values of a draft's rows are dropped when it is done: what is accepted
comes back with the target's features, which are better.

Shapes: R rows of a pass, n tokens, T taps, H hidden, V vocabulary, N heads, D head size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from outrider.contracts import SequenceView
from outrider.model.eagle_head import Eagle3Head, Mix
from outrider.model.head_layers import KeyValue
from outrider.proposers._heads import Loaded, last_states
from outrider.proposers.head_memory import GrowingKV, HeadMemory, gather


class Draft:
    """One sequence while it is drafted. Rows are numbered as they are fed; row 0 is the text's."""

    def __init__(self, view: SequenceView, memory: HeadMemory, state_H: Tensor) -> None:
        self.view = view
        self.memory = memory
        self.states = [state_H]  # of each row: what the next one reads
        self.lines: list[list[int]] = [[]]  # of each row: the drafted rows it sees, itself last
        self.num_committed = memory.layers[0].length

    def add(self, parent: int) -> int:
        """A row that continues row `parent`; returns its position in the text."""
        line = self.lines[parent]
        self.lines.append([*line, len(self.lines)])
        return len(self.view.tokens) - 1 + len(line)

    def mask(self, num_rows: int, window: int | None) -> Tensor | None:
        """What the last `num_rows` rows may not see, [rows, C] to be added; None: they see all."""
        lines = self.lines[-num_rows:]
        num_drafted = len(self.lines) - 1
        furthest = max(map(len, lines))
        if all(len(line) == num_drafted for line in lines) and (
            window is None or self.num_committed + furthest <= window
        ):
            return None
        mask = torch.full((num_rows, self.num_committed + num_drafted), -math.inf)
        for row, line in enumerate(lines):
            hidden = 0 if window is None else max(0, self.num_committed + len(line) - window)
            mask[row, hidden : self.num_committed] = 0.0
            skipped = max(0, hidden - self.num_committed)
            mask[row, [self.num_committed + i - 1 for i in line[skipped:]]] = 0.0
        return mask.to(self.states[0])

    def close(self) -> None:
        """Drops the keys and values of the drafts."""
        for layer in self.memory.layers:
            layer.length = self.num_committed


def causal_mask(end: int, num_rows: int, window: int | None, like: Tensor) -> Tensor | None:
    """For the last `num_rows` of `end` rows in a line: what each may not see, [rows, end]."""
    if num_rows == 1 and (window is None or end <= window):
        return None
    rows = torch.arange(end - num_rows, end)[:, None]
    columns = torch.arange(end)
    seen = columns <= rows
    if window is not None:
        seen &= columns > rows - window
    mask = torch.zeros(num_rows, end).masked_fill_(~seen, -math.inf)
    return mask.to(like)


class EagleRows:
    """`memories` are the proposer's, by sequence."""

    def __init__(self, loaded: Loaded[Eagle3Head], memories: dict[int, HeadMemory]) -> None:
        self._loaded = loaded
        self._head = loaded.head
        self._memories = memories
        self._windows = loaded.head.config.windows or (None,) * len(loaded.head.layers)
        self._ids_W = None if loaded.head.d2t is None else loaded.head.target_ids
        weight = next(loaded.head.parameters())
        self._dtype = weight.dtype

    def read_on(self, views: list[SequenceView], num_masks: int = 0) -> tuple[list[Draft], Tensor]:
        """Feeds what the target has shown since the last draft; logits of the first drafts.

        With `num_masks`, so many rows of the mask token follow each text (P-EAGLE): then there are
        1 + num_masks rows of logits for each sequence. The masks' keys and values stay until
        `Draft.close`.
        """
        tokens: list[int] = []
        hidden: list[Tensor] = []
        positions: list[int] = []
        sizes: list[int] = []
        for view in views:
            taps_nTH, places = self._memories[view.id].take()
            hidden.append(self._features(taps_nTH))
            tokens += view.tokens[places.start + 1 : places.stop + 1]
            if num_masks:
                tokens += [self._head.config.mask_token_id or 0] * num_masks
                hidden.append(self._mask_features(num_masks))
            positions += range(places.start, places.stop + num_masks)
            sizes.append(len(places) + num_masks)
        wanted = _last_rows(sizes, 1 + num_masks)
        memories = [self._memories[view.id] for view in views]
        mixes = [self._text_mix(memories, layer, sizes, 1 + num_masks)
                 for layer in range(len(self._windows))]  # fmt: skip
        states_RH, logits_RV = self._run(tokens, torch.cat(hidden)[None], positions, mixes, wanted)
        drafts = []
        for i, (view, memory) in enumerate(zip(views, memories, strict=True)):
            drafts.append(Draft(view, memory, states_RH[i * (1 + num_masks)]))
            drafts[-1].num_committed -= num_masks
        return drafts, logits_RV

    def feed(self, drafts: list[Draft], rows: list[list[tuple[int, int]]]) -> Tensor:
        """One pass over each draft's new rows, as (token, row it continues): logits [R, V]."""
        tokens: list[int] = []
        positions: list[int] = []
        hidden: list[Tensor] = []
        for draft, new in zip(drafts, rows, strict=True):
            for token, parent in new:
                tokens.append(token)
                hidden.append(draft.states[parent])
                positions.append(draft.add(parent))
        sizes = [len(new) for new in rows]
        mixes = [self._draft_mix(drafts, layer, sizes) for layer in range(len(self._windows))]
        states_RH, logits_RV = self._run(tokens, torch.stack(hidden)[None], positions, mixes, None)
        states = iter(states_RH)
        for draft, new in zip(drafts, rows, strict=True):
            draft.states += [next(states) for _ in new]
        return logits_RV

    def _features(self, taps_nTH: Tensor) -> Tensor:
        """[n, H]"""
        taps_1nTH = taps_nTH[None].to(self._dtype)
        if self._head.config.reads_last_state:
            taps_1nTH = last_states(self._loaded.borrowed, taps_1nTH).to(self._dtype)
        return self._head.fuse(taps_1nTH)[0]

    def _mask_features(self, num_masks: int) -> Tensor:
        wide_F = self._head.mask_hidden.to(self._dtype)
        taps_TH = wide_F.view(len(self._head.taps), -1)
        return self._head.fuse(taps_TH[None, None])[0].expand(num_masks, -1)

    def _run(
        self,
        tokens: list[int],
        hidden_1RH: Tensor,
        positions: list[int],
        mixes: Seq[Mix],
        wanted: list[int] | None,
    ) -> tuple[Tensor, Tensor]:
        """States to feed back and logits over the target's ids, of the wanted rows."""
        embeds_1RH = self._loaded.embed(tokens)[None]
        positions_1R = torch.tensor(positions, device=hidden_1RH.device)[None]
        states_1RH = self._head.states(embeds_1RH, hidden_1RH, positions_1R, mixes, wanted)
        logits_RW = self._loaded.output(self._head.normed(states_1RH))[0]
        if self._head.config.logit_scale != 1.0:
            logits_RW = logits_RW * self._head.config.logit_scale
        logits_RV = self._loaded.spread(logits_RW, self._ids_W)
        return self._head.fed_back(states_1RH)[0], logits_RV

    def _text_mix(
        self, memories: list[HeadMemory], layer: int, sizes: list[int], num_wanted: int
    ) -> Mix:
        """Attention of new rows in a line after each memory's; of the last layer, of the last."""
        is_last = layer == len(self._windows) - 1

        def mix(queries: Tensor, own: KeyValue) -> Tensor:
            mixed, start, asked = [], 0, 0
            for memory, size in zip(memories, sizes, strict=True):
                past = _append(memory.layers[layer], own, start, size)
                num_rows = num_wanted if is_last else size
                rows = slice(asked, asked + num_rows)
                end = memory.layers[layer].length
                mask = causal_mask(end, num_rows, self._windows[layer], queries)
                mixed.append(gather(queries[0, :, rows], past, mask))
                start, asked = start + size, rows.stop
            return torch.cat(mixed, dim=1)[None]

        return mix

    def _draft_mix(self, drafts: list[Draft], layer: int, sizes: list[int]) -> Mix:
        """Attention of drafted rows: the text, and the rows that each continues."""

        def mix(queries: Tensor, own: KeyValue) -> Tensor:
            mixed, start = [], 0
            for draft, size in zip(drafts, sizes, strict=True):
                past = _append(draft.memory.layers[layer], own, start, size)
                rows = slice(start, start + size)
                mask = draft.mask(size, self._windows[layer])
                mixed.append(gather(queries[0, :, rows], past, mask))
                start += size
            return torch.cat(mixed, dim=1)[None]

        return mix


def _append(layer: GrowingKV, own: KeyValue, start: int, size: int) -> KeyValue:
    rows = slice(start, start + size)
    return layer.append((own[0][:, :, rows], own[1][:, :, rows]))


def _last_rows(sizes: list[int], count: int) -> list[int]:
    """The indices of the last `count` rows of each part of a packed line."""
    rows: list[int] = []
    end = 0
    for size in sizes:
        end += size
        rows += range(end - count, end)
    return rows
