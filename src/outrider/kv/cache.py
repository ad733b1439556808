"""Logical slots of sequences on physical blocks: match, reserve, commit, roll back.

Slot i of a sequence is where the K/V of its i-th token goes. One step of a sequence with 21
committed slots, a root and four drafts of which two are accepted (blocks of 8, `s` sealed):

    before          s s s s s s s s | s s s s s s s s | c c c c c . . .
    reserve(26)     s s s s s s s s | s s s s s s s s | c c c c c . . . | . . . . . . . .
    forward writes                                                r d d   d d
    commit(24)      s s s s s s s s | s s s s s s s s | s s s s s s s s     freed at once

A block is *sealed* once every slot in it is committed. Only sealed blocks are shared, and a forward
writes only slots at or after the committed length. So no forward writes a shared block, and
copy-on-write is not needed. No torch here: the model owns the tensors, this module the bookkeeping.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from collections.abc import Sequence as Seq

import numpy as np

from outrider.contracts import IntArray
from outrider.errors import ConfigError
from outrider.kv.blocks import BlockPool
from outrider.kv.prefix import PrefixIndex, next_digest, root_digest

_NOTHING: IntArray = np.empty(0, np.int32)
_NEVER = sys.maxsize


class _Sequence:
    """One block table. `digest is None` marks a sequence that shares nothing."""

    __slots__ = ("blocks", "buffer", "capacity", "digest", "held", "seal_at", "sealed", "view")

    def __init__(self, digest: bytes | None, blocks: list[int], block_size: int) -> None:
        self.blocks = blocks
        self.capacity = self.sealed = len(blocks) * block_size  # in slots
        self.digest = digest  # names the sealed prefix
        self.held = 0  # slots that no commit gives back
        self.seal_at = _NEVER if digest is None else self.sealed + block_size
        self.buffer = np.empty(max(16, 2 * len(blocks)), np.int32)
        self.buffer[: len(blocks)] = blocks
        self.view = self.buffer[: len(blocks)]


class KVCache:
    """Block tables of all sequences over one pool of `num_blocks` blocks.

    A sequence begins with `match` (or, sharing nothing, with `reserve`) and ends with `free`;
    a preempted one is freed and later matched again. Methods that name a sequence mutate that
    sequence and the pool, never another sequence's table.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        prefix_caching: bool = True,
        has_state: Callable[[int], bool] | None = None,
    ) -> None:
        """`has_state`: whether a model with recurrent layers has the state after a slot's token."""
        if num_blocks < 1 or block_size < 1:
            raise ConfigError(
                f"a KV cache needs at least one block of one slot, not {num_blocks} of {block_size}"
            )
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self._has_state = has_state
        self._prefixes = PrefixIndex()
        self._pool = BlockPool(num_blocks, on_evict=self._prefixes.forget)
        self._sequences: dict[int, _Sequence] = {}
        self._scratch_ids = itertools.count(-1, -1)

    @property
    def num_free_blocks(self) -> int:
        """Blocks that `reserve` could still hand out, cached prefixes included."""
        return self._pool.num_available

    @property
    def usage(self) -> float:
        """The share of blocks held by sequences, 0 to 1."""
        return 1.0 - self._pool.num_available / self.num_blocks

    @property
    def fill(self) -> float:
        """The share of blocks that sequences or cached prefixes hold, 0 to 1."""
        return 1.0 - self._pool.num_free / self.num_blocks

    @property
    def starts(self) -> list[float]:
        """Where new sequences begin in an empty cache, in order: shares of it from 0 to 1."""
        return [block / self.num_blocks for block in self._pool.starts]

    def scratch(self, num_sequences: int) -> list[int]:
        """Ids for sequences that no request owns, negative and never handed out again.

        Measurements and proofs reserve slots under these ids, and free them.
        """
        return [next(self._scratch_ids) for _ in range(num_sequences)]

    def match(self, sequence_id: int, tokens: Seq[int], salt: str = "") -> int:
        """Opens a sequence on the longest cached prefix of `tokens`; returns its length in slots.

        The result is a multiple of the block size and less than `len(tokens)`: the last token is
        always left to compute, since its logits are needed. These slots are committed and must not
        be written again. The sequence must not be open.
        """
        assert sequence_id not in self._sequences, f"sequence {sequence_id} is already open"
        blocks: list[int] = []
        digest = None
        if self.prefix_caching:
            digest, blocks = self._longest_prefix(tokens, salt)
            for block in blocks:
                self._pool.share(block)
        sequence = _Sequence(digest, blocks, self.block_size)
        self._sequences[sequence_id] = sequence
        return sequence.sealed

    def _longest_prefix(self, tokens: Seq[int], salt: str) -> tuple[bytes, list[int]]:
        """Cached blocks that hold a prefix and whose end the model can continue from."""
        size = self.block_size
        digests, blocks = [root_digest(salt)], []
        for start in range(0, (len(tokens) - 1) // size * size, size):
            longer = next_digest(digests[-1], tokens[start : start + size])
            block = self._prefixes.get(longer)
            if block is None:
                break
            blocks.append(block)
            digests.append(longer)
        if self._has_state is not None:
            while blocks and not self._has_state((blocks[-1] + 1) * size - 1):
                blocks.pop()
                digests.pop()
        return digests[-1], blocks

    def reserve(self, sequence_id: int, num_slots: int) -> bool:
        """Makes the table reach `num_slots` slots in all (never shortens it).

        False, and nothing changed, when the pool is short of blocks. A sequence that was not
        opened by `match` is opened here and shares nothing.
        """
        sequence = self._sequences.get(sequence_id)
        if sequence is not None and num_slots <= sequence.capacity:
            return True
        return self._grow(sequence_id, sequence, num_slots)

    def hold(self, sequence_id: int, num_slots: int) -> bool:
        """Reserves `num_slots` slots in all that commits leave alone until `hold(..., 0)`.

        False, and nothing changed, when the pool is short. What is no longer held is freed by the
        next commit.
        """
        if num_slots and not self.reserve(sequence_id, num_slots):
            return False
        if sequence_id in self._sequences:
            self._sequences[sequence_id].held = num_slots
        return True

    def commit(self, sequence_id: int, tokens: Seq[int], num_slots: int) -> None:
        """Says that the first `num_slots` slots now hold the K/V of `tokens[:num_slots]`.

        Blocks this fills become shareable; slots beyond are rolled back and the blocks that held
        nothing else are freed. `num_slots` may lie below an earlier commit, but not below a
        sealed block. Reads only the tokens of newly filled blocks.
        """
        sequence = self._sequences[sequence_id]
        assert sequence.sealed <= num_slots <= sequence.capacity, (
            f"cannot commit {num_slots} slots: {sequence.sealed} are sealed, "
            f"{sequence.capacity} reserved"
        )
        if num_slots >= sequence.seal_at:
            self._seal(sequence, tokens, num_slots)
        if sequence.capacity - max(num_slots, sequence.held) >= self.block_size:
            self._truncate(sequence, num_slots)

    def compact(
        self, sequence_id: int, first_slot: int, path: Seq[int]
    ) -> tuple[IntArray, IntArray]:
        """The copies that make an accepted path of a tree contiguous, as physical slots.

        Node i of the tree was written to slot `first_slot + i`; `path` are the accepted nodes,
        ascending, and the k-th of them belongs in slot `first_slot + k`. Returns (source, target)
        for `Model.copy_slots`, empty when all are in place. Changes nothing: call it before the
        `commit` that gives the other nodes' slots back.
        """
        if not path or path[-1] == len(path) - 1:
            return _NOTHING, _NOTHING
        sequence = self._sequences[sequence_id]
        assert sequence.sealed <= first_slot < first_slot + path[-1] < sequence.capacity
        moved = next(k for k, node in enumerate(path) if node != k)
        source = np.asarray(path[moved:], np.int32) + first_slot
        target = np.arange(first_slot + moved, first_slot + len(path), dtype=np.int32)
        return self._physical(sequence, source), self._physical(sequence, target)

    def table(self, sequence_id: int) -> IntArray:
        """The sequence's physical blocks, int32, in logical order. Not a copy: read, don't write.

        Valid until the sequence's next reserve, commit or free.
        """
        return self._sequences[sequence_id].view

    def free(self, sequence_id: int, *, keep: bool = True) -> None:
        """Closes a sequence. Its shareable blocks stay cached until the room is needed, unless
        other sequences hold the same content.

        `keep=False` drops blocks that no other sequence holds: their content may be wrong. Unknown
        ids are fine.
        """
        sequence = self._sequences.pop(sequence_id, None)
        if sequence is None:
            return
        # Last block first: eviction then shortens a cached prefix from its end.
        for block in reversed(sequence.blocks):
            goes = block in self._prefixes and self._pool.refs(block) == 1
            if goes and (not keep or self._prefixes.has_twin(block)):
                self._prefixes.forget(block)
            self._pool.release(block, keep=block in self._prefixes)

    def is_shared(self, block: int) -> bool:
        """Whether another sequence may read it: several hold it, or a cached prefix names it."""
        return self._pool.refs(block) != 1 or block in self._prefixes

    def snapshot(self) -> object:
        """All bookkeeping as values to compare. For tests: O(number of blocks)."""
        sequences = {
            i: (list(s.blocks), s.view.tolist(), s.digest) for i, s in self._sequences.items()
        }
        return self._pool.snapshot(), self._prefixes.snapshot(), sequences

    def check(self) -> None:
        """Asserts every invariant. For tests: O(number of blocks)."""
        self._pool.check()
        holders = [0] * self.num_blocks
        for sequence in self._sequences.values():
            assert sequence.capacity == len(sequence.blocks) * self.block_size
            assert sequence.view.tolist() == sequence.blocks
            num_sealed = sequence.sealed // self.block_size
            for i, block in enumerate(sequence.blocks):
                holders[block] += 1
                assert i < num_sealed or block not in self._prefixes, "a shared block is writable"
        for block, count in enumerate(holders):
            assert self._pool.refs(block) == count, "references differ from table membership"

    def _grow(self, sequence_id: int, sequence: _Sequence | None, num_slots: int) -> bool:
        held = 0 if sequence is None else len(sequence.blocks)
        missing = -(-num_slots // self.block_size) - held
        if missing > self._pool.num_available:
            return False
        if sequence is None:
            sequence = self._sequences[sequence_id] = _Sequence(None, [], self.block_size)
        blocks = sequence.blocks
        last = blocks[-1] if blocks else -1
        for _ in range(missing):
            last = self._pool.allocate(after=last)
            blocks.append(last)
        if len(blocks) > len(sequence.buffer):
            sequence.buffer = np.empty(2 * len(blocks), np.int32)
            held = 0
        sequence.buffer[held : len(blocks)] = blocks[held:]
        self._resize(sequence)
        return True

    def _seal(self, sequence: _Sequence, tokens: Seq[int], num_slots: int) -> None:
        size = self.block_size
        digest = sequence.digest
        assert digest is not None
        for start in range(sequence.sealed, num_slots - size + 1, size):
            digest = next_digest(digest, tokens[start : start + size])
            self._prefixes.insert(digest, sequence.blocks[start // size])
        sequence.digest = digest
        sequence.sealed = num_slots // size * size
        sequence.seal_at = sequence.sealed + size

    def _truncate(self, sequence: _Sequence, num_slots: int) -> None:
        blocks = sequence.blocks
        keep = -(-max(num_slots, sequence.held) // self.block_size)
        while len(blocks) > keep:
            self._pool.release(blocks.pop(), keep=False)
        self._resize(sequence)

    def _resize(self, sequence: _Sequence) -> None:
        sequence.capacity = len(sequence.blocks) * self.block_size
        sequence.view = sequence.buffer[: len(sequence.blocks)]

    def _physical(self, sequence: _Sequence, slots: IntArray) -> IntArray:
        blocks = sequence.view[slots // self.block_size]
        return blocks * np.int32(self.block_size) + slots % self.block_size
