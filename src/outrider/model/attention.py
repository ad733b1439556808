"""Attention of a ragged pass over the paged KV store, for every torch model.

A `Plan` is built once per pass on the host and used by all layers: it holds the slots of new keys,
the slots that each sequence reads, and the masks. Query heads that share a key/value head become
rows of one attention call (a third of the time of repeating the keys), and a sequence with
contiguous blocks is read in place instead of gathered.

Shape legend: T tokens of the pass, s sequences of a group, N new tokens of each (padded), L keys
of each (padded), G query heads per key/value head, K key/value heads, D head size, R = N * G.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from outrider.contracts import IntArray, StepBatch

Index = slice | torch.Tensor  # a slice where the rows are contiguous: a view, not a gather
BoolArray = npt.NDArray[np.bool_]

MAX_FOLDED_ROWS = 256  # beyond this (prefill) the mask is shared by the group instead of copied
_MAX_GATHER_CPU = 1 << 15  # numbers per sequence: gathering more costs more than a separate call


class RoundedKV:
    """Keys or values of one layer in int8, with a scale for each slot and head."""

    def __init__(self, data_SKD: torch.Tensor, scale_SK1: torch.Tensor, dtype: torch.dtype) -> None:
        """`dtype` of the attention."""
        self._data_SKD, self._scale_SK1, self._dtype = data_SKD, scale_SK1, dtype

    @property
    def shape(self) -> torch.Size:
        return self._data_SKD.shape

    def take(self, index: Index) -> torch.Tensor:
        scale = _take(self._scale_SK1, index)
        return (_take(self._data_SKD, index) * scale).to(self._dtype)


Stored = torch.Tensor | RoundedKV


def rounded(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The last dimension as int8, and its scale; NaN if a number is not finite."""
    top = x.float().abs().amax(-1, keepdim=True)
    scale = torch.where(top.isfinite(), top / 127, torch.nan)
    data = torch.nan_to_num(x.float() / scale, nan=0.0).round().clamp(-127, 127)
    return data.to(torch.int8), scale


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """How a layer scores keys."""

    scale: float
    window: int | None = None
    chunk: int | None = None
    softcap: float | None = None
    sinks_GK: torch.Tensor | None = None
    slopes_GK: torch.Tensor | None = None  # what a score loses with each position of distance


@dataclass(slots=True)
class Group:
    """The sequences of one attention call."""

    rows: Index  # of T: the queries, sequence by sequence, [s * N]
    real: torch.Tensor | None  # of s * N: the rows without padding; None: all rows
    out: Index  # of T: the places of the real rows' results
    keys: Index  # physical slots, [s * L]
    num_seqs: int
    num_new: int
    num_keys: int
    visible_sNL: BoolArray | None  # None: everything
    distance_sNL: IntArray | None  # positions between query and key; None: below every window
    positions_sN: IntArray  # of the queries
    masks: dict[tuple[int | None, int | None], torch.Tensor | None] = field(default_factory=dict)


class Plan:
    """The layout of one pass on one device. Immutable, apart from its cache of masks."""

    def __init__(
        self,
        batch: StepBatch,
        *,
        block_size: int,
        group_size: int,
        kv_width: int,
        device: torch.device,
        dtype: torch.dtype,
        min_window: int | None = None,
    ) -> None:
        """`kv_width`: numbers in one token's keys, K * D. `min_window`: the narrowest window or
        chunk of the model, None if it has none; 0 if scores depend on distances."""
        self.device = device
        self.dtype = dtype
        self.group_size = group_size
        self._kv_width = kv_width
        self._batch = batch
        self._block_size = block_size
        self._min_window = min_window
        self._starts: list[int] = batch.starts_S1.tolist()
        self._context: list[int] = batch.context_S.tolist()
        num_seqs = len(self._context)
        self._slots = [self._slots_of(s) for s in range(num_seqs)]
        self.new_slots = self._new_slots()
        self.positions_T = torch.from_numpy(batch.positions_T).to(device)
        self.groups = [self._group(members) for members in self._partition(num_seqs)]

    def _num_new(self, s: int) -> int:
        return self._starts[s + 1] - self._starts[s]

    def _num_keys(self, s: int) -> int:
        return self._context[s] + self._num_new(s)

    def _slots_of(self, s: int) -> slice | npt.NDArray[np.int64]:
        """Physical slots of sequence s's logical slots, as a slice if they are contiguous."""
        size, num_keys = self._block_size, self._num_keys(s)
        blocks = self._batch.tables_SW[s, : -(-num_keys // size)].astype(np.int64)
        first = int(blocks[0])
        if len(blocks) == 1 or bool((blocks == np.arange(first, first + len(blocks))).all()):
            return slice(first * size, first * size + num_keys)
        slots: npt.NDArray[np.int64] = (blocks[:, None] * size + np.arange(size)).reshape(-1)
        return slots[:num_keys]

    def _new_slots(self) -> Index:
        """Physical slots of the T new tokens."""
        first = self._slots[0]
        if len(self._slots) == 1 and isinstance(first, slice):
            return slice(first.start + self._context[0], first.stop)
        parts = [
            _as_array(slots)[context:]
            for slots, context in zip(self._slots, self._context, strict=True)
        ]
        return torch.from_numpy(np.concatenate(parts)).to(self.device)

    def _partition(self, num_seqs: int) -> Iterator[list[int]]:
        """Groups sequences of similar width, if gathering their keys is cheaper than more calls."""
        if num_seqs == 1:
            yield [0]
            return
        buckets: dict[int, list[int]] = {}
        for s in range(num_seqs):
            buckets.setdefault((self._num_new(s) - 1).bit_length(), []).append(s)
        for members in buckets.values():
            num_keys = max(self._num_keys(s) for s in members)
            width = max(self._num_new(s) for s in members)
            together = width * self.group_size <= MAX_FOLDED_ROWS and (
                self.device.type != "cpu" or num_keys * self._kv_width <= _MAX_GATHER_CPU
            )
            yield from [members] if together else ([s] for s in members)

    def _group(self, members: list[int]) -> Group:
        num_new = max(self._num_new(s) for s in members)
        num_keys = max(self._num_keys(s) for s in members)
        rows, real, out = self._rows(members, num_new)
        visible, distance = self._visibility(members, num_new, num_keys)
        return Group(
            rows=rows,
            real=real,
            out=out,
            keys=self._keys(members, num_keys),
            num_seqs=len(members),
            num_new=num_new,
            num_keys=num_keys,
            visible_sNL=visible,
            distance_sNL=distance,
            positions_sN=self._positions(members, num_new),
        )

    def _positions(self, members: list[int], num_new: int) -> IntArray:
        positions = np.zeros((len(members), num_new), dtype=np.int32)
        for i, s in enumerate(members):
            own = self._batch.positions_T[self._starts[s] : self._starts[s + 1]]
            positions[i, : len(own)] = own
        return positions

    def _rows(self, members: list[int], num_new: int) -> tuple[Index, torch.Tensor | None, Index]:
        first, last = members[0], members[-1]
        if last - first + 1 == len(members) and all(self._num_new(s) == num_new for s in members):
            rows = slice(self._starts[first], self._starts[last + 1])
            return rows, None, rows
        wanted = np.array([self._starts[s] for s in members])[:, None] + np.arange(num_new)
        is_real = np.arange(num_new) < np.array([[self._num_new(s)] for s in members])
        padded = np.where(is_real, wanted, wanted[:, :1]).reshape(-1)
        real = np.flatnonzero(is_real)
        return self._tensor(padded), self._tensor(real), self._tensor(padded[real])

    def _keys(self, members: list[int], num_keys: int) -> Index:
        only = self._slots[members[0]]
        if len(members) == 1 and isinstance(only, slice):
            return only
        keys = np.zeros((len(members), num_keys), dtype=np.int64)
        for i, s in enumerate(members):
            keys[i, : self._num_keys(s)] = _as_array(self._slots[s])
        return self._tensor(keys.reshape(-1))

    def _visibility(
        self, members: list[int], num_new: int, num_keys: int
    ) -> tuple[BoolArray | None, IntArray | None]:
        """Visibility without windows, and distances if a window can apply."""
        windowed = self._min_window is not None and num_keys > self._min_window
        alike = all(self._num_keys(s) == num_keys for s in members)
        if num_new == 1 and alike and not windowed:
            return None, None
        visible = np.zeros((len(members), num_new, num_keys), dtype=np.bool_)
        distance = np.zeros(visible.shape, dtype=np.int32) if windowed else None
        for i, s in enumerate(members):
            context, count = self._context[s], self._num_new(s)
            visible[i, :count, :context] = True
            visible[i, count:, 0] = True  # padding rows too: a softmax over nothing is NaN
            visible[i, :count, context : context + count] = self._ancestors(s)
            if distance is not None:
                positions = self._batch.positions_T[self._starts[s] : self._starts[s + 1]]
                of_keys = np.concatenate([np.arange(context, dtype=np.int32), positions])
                distance[i, :count, : len(of_keys)] = positions[:, None] - of_keys
        return visible, distance

    def _ancestors(self, s: int) -> BoolArray:
        """[n, n]: whether new token j is token i or an ancestor of it."""
        count = self._num_new(s)
        parents = self._batch.parents_T
        if parents is None:
            return np.tri(count, dtype=np.bool_)
        own = parents[self._starts[s] : self._starts[s + 1]]
        if bool((own == np.arange(-1, count - 1)).all()):
            return np.tri(count, dtype=np.bool_)
        seen = np.eye(count, dtype=np.bool_)
        for row, parent in enumerate(own.tolist()):
            if parent >= 0:
                seen[row] |= seen[parent]
        return seen

    def mask(
        self, group: Group, window: int | None, chunk: int | None = None
    ) -> torch.Tensor | None:
        """The additive mask of a group: [s, 1, R, L] if folded, else [1, 1, N, L]."""
        if group.distance_sNL is None:
            window = chunk = None
        if (window, chunk) in group.masks:
            return group.masks[window, chunk]
        mask: torch.Tensor | None = None
        if group.visible_sNL is not None:
            visible = group.visible_sNL
            if window is not None and group.distance_sNL is not None:
                visible = visible & (group.distance_sNL < window)
            if chunk is not None and group.distance_sNL is not None:
                visible = visible & (group.distance_sNL <= group.positions_sN[..., None] % chunk)
            if not visible.all():
                hidden = torch.from_numpy(~visible).to(self.device)
                if self._folds(group):
                    hidden = hidden.repeat_interleave(self.group_size, dim=1)
                mask = torch.zeros(hidden.shape, dtype=self.dtype, device=self.device)
                mask = mask.masked_fill_(hidden, -torch.inf)[:, None]
        group.masks[window, chunk] = mask
        return mask

    def _folds(self, group: Group) -> bool:
        return group.num_new * self.group_size <= MAX_FOLDED_ROWS

    def _tensor(self, array: npt.NDArray[np.int64]) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device)

    def attend(
        self,
        q_TGKD: torch.Tensor,
        keys_KD: Stored,
        values_KD: Stored,
        terms: Terms,
    ) -> torch.Tensor:
        """Attention of all T new tokens over the keys and values of one layer, [slots, K, D] each.

        The store already holds the new tokens. Returns [T, G, K, D] (D of the values).
        """
        result: torch.Tensor | None = None
        for group in self.groups:
            out = self._attend_group(q_TGKD, keys_KD, values_KD, group, terms)
            if len(self.groups) == 1 and group.real is None:
                return out
            if result is None:
                result = out.new_empty((len(q_TGKD), *out.shape[1:]))
            result[group.out] = out if group.real is None else out[group.real]
        assert result is not None
        return result

    def attend_heads(
        self,
        q_TAD: torch.Tensor,
        keys_KD: torch.Tensor,
        values_KD: torch.Tensor,
        terms: Terms,
    ) -> torch.Tensor:
        """`attend` for queries [T, A, D] whose heads lie in the order of their keys' heads, K * G.

        Returns [T, A, D]. One new token for each sequence needs no reordering.
        """
        num_tokens, num_kv = len(q_TAD), keys_KD.shape[1]
        q_TKGD = q_TAD.reshape(num_tokens, num_kv, self.group_size, -1)
        if any(group.num_new != 1 for group in self.groups):
            out = self.attend(q_TKGD.transpose(1, 2), keys_KD, values_KD, terms)
            return out.transpose(1, 2).flatten(1, 2)
        parts = [self._attend_tokens(q_TKGD, keys_KD, values_KD, g, terms) for g in self.groups]
        if len(parts) == 1:
            return parts[0].flatten(1, 2)
        result = parts[0].new_empty(num_tokens, *parts[0].shape[1:])
        for group, part in zip(self.groups, parts, strict=True):
            result[group.rows] = part
        return result.flatten(1, 2)

    def _attend_tokens(
        self,
        q_TKGD: torch.Tensor,
        keys_KD: torch.Tensor,
        values_KD: torch.Tensor,
        group: Group,
        terms: Terms,
    ) -> torch.Tensor:
        """[s, K, G, D]: of a group with one new token for each sequence."""
        k_sKLD, v_sKLD = self._read(keys_KD, values_KD, group)
        sinks, slopes = (
            None if of_GK is None else of_GK.t() for of_GK in (terms.sinks_GK, terms.slopes_GK)
        )
        mask = self._sloped(self.mask(group, terms.window, terms.chunk), slopes, group)
        return _softmax_attention(q_TKGD[group.rows], k_sKLD, v_sKLD, mask, terms, sinks)

    def _read(
        self, keys_KD: Stored, values_KD: Stored, group: Group
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[s, K, L, D] each."""
        k_sKLD, v_sKLD = (
            _take(store, group.keys)
            .view(group.num_seqs, group.num_keys, *store.shape[1:])
            .transpose(1, 2)
            for store in (keys_KD, values_KD)
        )
        return k_sKLD, v_sKLD

    def _attend_group(
        self,
        q_TGKD: torch.Tensor,
        keys_KD: Stored,
        values_KD: Stored,
        group: Group,
        terms: Terms,
    ) -> torch.Tensor:
        """[s * N, G, K, D]: the results of one group, padding rows included."""
        heads = q_TGKD.shape[1:]
        q = q_TGKD[group.rows]
        k_sKLD, v_sKLD = self._read(keys_KD, values_KD, group)
        mask = self.mask(group, terms.window, terms.chunk)
        if self._folds(group):
            q = q.reshape(group.num_seqs, group.num_new * heads[0], *heads[1:]).transpose(1, 2)
            sinks, slopes = (
                None if of_GK is None else of_GK.repeat(group.num_new, 1).t()
                for of_GK in (terms.sinks_GK, terms.slopes_GK)
            )
            mask = self._sloped(mask, slopes, group)
            out = _softmax_attention(q, k_sKLD, v_sKLD, mask, terms, sinks)
            return out.transpose(1, 2).reshape(-1, *heads[:2], out.shape[-1])
        # A wide group has one sequence: the query heads of each key form the batch.
        q_GKND = q.permute(1, 2, 0, 3)
        k_GKLD, v_GKLD = (x.expand(heads[0], -1, -1, -1) for x in (k_sKLD, v_sKLD))
        sinks, slopes = (
            None if of_GK is None else of_GK[..., None]
            for of_GK in (terms.sinks_GK, terms.slopes_GK)
        )
        mask = self._sloped(mask, slopes, group)
        return _softmax_attention(q_GKND, k_GKLD, v_GKLD, mask, terms, sinks).permute(2, 0, 1, 3)

    def _sloped(
        self, mask: torch.Tensor | None, slopes: torch.Tensor | None, group: Group
    ) -> torch.Tensor | None:
        """The mask with what scores lose by distance; `slopes`: [..., K, R]."""
        if slopes is None:
            return mask
        assert group.distance_sNL is not None
        distance = torch.from_numpy(group.distance_sNL).to(self.device)[:, None]
        if self._folds(group):
            distance = distance.repeat_interleave(self.group_size, dim=2)
        lost = (distance * slopes[..., None]).to(self.dtype)
        return -lost if mask is None else mask - lost


def _softmax_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    terms: Terms,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """`sinks`: [..., K, R]. Fused kernels know neither these nor soft caps."""
    if terms.softcap is None and sinks is None:
        return F.scaled_dot_product_attention(q, k, v, mask, scale=terms.scale)
    return _explicit(q, k, v, mask, terms.scale, terms.softcap, sinks)


def _explicit(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention with softcap or sinks, unknown to fused kernels; `sinks`: [..., K, R]."""
    scores = torch.matmul(q, k.transpose(-1, -2)).float() * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores + mask
    if sinks is not None:
        sink = sinks.float()[..., None].expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sink], dim=-1)
    weights = scores.softmax(-1)[..., : k.shape[-2]]
    return torch.matmul(weights.to(v.dtype), v)


def _take(store: Stored, index: Index) -> torch.Tensor:
    if isinstance(store, RoundedKV):
        return store.take(index)
    return store[index] if isinstance(index, slice) else store.index_select(0, index)


def _as_array(slots: slice | npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    return np.arange(slots.start, slots.stop) if isinstance(slots, slice) else slots
