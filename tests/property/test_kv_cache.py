"""The KV bookkeeping against a shadow of the memory it describes.

Simulated forwards write into an array with one cell per physical slot. A cell holds everything
its K/V would depend on (the whole prefix) and the tenant that wrote it, so a stale, overwritten
or foreign slot cannot read back right by accident.
"""

from __future__ import annotations

from dataclasses import dataclass

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from outrider.kv.cache import KVCache

Cell = tuple[str, tuple[int, ...]]
TOKEN = st.integers(0, 1)  # few tokens: equal prefixes must be common
SALT = st.sampled_from(["", "tenant"])


@dataclass
class Shadow:
    tokens: list[int]
    salt: str
    num_slots: int = 0
    sealed: int = 0  # slots that may never be rolled back
    shares: bool = True


class KVCacheMachine(RuleBasedStateMachine):
    @initialize(num_blocks=st.integers(1, 12), block_size=st.integers(1, 4), prefix=st.booleans())
    def build(self, num_blocks: int, block_size: int, prefix: bool) -> None:
        self.cache = KVCache(num_blocks, block_size, prefix_caching=prefix)
        self.memory: list[Cell | None] = [None] * (num_blocks * block_size)
        self.open: dict[int, Shadow] = {}
        self.next_id = 0

    # -- what the engine does -------------------------------------------------------------

    @rule(tokens=st.lists(TOKEN, min_size=1, max_size=24), salt=SALT)
    def start(self, tokens: list[int], salt: str) -> None:
        self._match(self.next_id, Shadow(tokens, salt))
        self.next_id += 1

    @rule(tokens=st.lists(TOKEN, min_size=1, max_size=8), num_slots=st.integers(0, 12))
    def start_private(self, tokens: list[int], num_slots: int) -> None:
        shadow = Shadow(tokens, "private", shares=False)
        if self._reserve(self.next_id, shadow, num_slots):
            self.cache.commit(self.next_id, tokens, 0)
            self.open[self.next_id] = shadow
        self.next_id += 1

    @precondition(lambda self: self.open)
    @rule(data=st.data(), num_new=st.integers(1, 10), drafts=st.lists(TOKEN, max_size=6))
    def step(self, data: st.DataObject, num_new: int, drafts: list[int]) -> None:
        """A prefill chunk, or a root with a chain of drafts of which some are kept."""
        sequence_id, shadow = self._pick(data)
        pending = shadow.tokens[shadow.num_slots : shadow.num_slots + num_new]
        if shadow.num_slots + len(pending) < len(shadow.tokens):
            drafts = []
        first = shadow.num_slots
        if not self._reserve(sequence_id, shadow, first + len(pending) + len(drafts)):
            return
        written = shadow.tokens[: first + len(pending)] + drafts
        for slot in range(first, len(written)):
            self._write(sequence_id, slot, (shadow.salt, tuple(written[: slot + 1])))
        kept = data.draw(st.integers(0, len(drafts)))
        num_slots = first + len(pending) + kept
        if num_slots >= len(shadow.tokens):
            shadow.tokens = [*written[:num_slots], data.draw(TOKEN)]
        self._commit(sequence_id, shadow, num_slots)

    @precondition(lambda self: self.open)
    @rule(data=st.data(), nodes=st.lists(TOKEN, min_size=1, max_size=8))
    def tree_step(self, data: st.DataObject, nodes: list[int]) -> None:
        """A root and a tree of drafts; one root-to-node path is kept and compacted."""
        sequence_id, shadow = self._pick(data)
        context = shadow.num_slots
        if context != len(shadow.tokens) - 1:
            return
        if not self._reserve(sequence_id, shadow, context + 1 + len(nodes)):
            return
        parents = [data.draw(st.integers(-1, i - 1)) for i in range(len(nodes))]
        paths: list[list[int]] = []
        for i, parent in enumerate(parents):
            paths.append([*(paths[parent] if parent >= 0 else []), i])
        self._write(sequence_id, context, (shadow.salt, tuple(shadow.tokens)))
        for i, path in enumerate(paths):
            prefix = tuple(shadow.tokens + [nodes[j] for j in path])
            self._write(sequence_id, context + 1 + i, (shadow.salt, prefix))
        path = data.draw(st.sampled_from([[], *paths]))
        source, target = self.cache.compact(sequence_id, context + 1, path)
        assert len(source) == len(target) <= len(path)
        read = [self.memory[slot] for slot in source]
        for slot, cell in zip(target, read, strict=True):
            self._check_writable(slot // self.cache.block_size)
            self.memory[slot] = cell
        shadow.tokens = [*shadow.tokens, *(nodes[j] for j in path), data.draw(TOKEN)]
        self._commit(sequence_id, shadow, context + 1 + len(path))

    @precondition(lambda self: self.open)
    @rule(data=st.data(), new_token=TOKEN)
    def roll_back(self, data: st.DataObject, new_token: int) -> None:
        """A shorter commit than the last, as a drafter makes after a rejection."""
        sequence_id, shadow = self._pick(data)
        num_slots = data.draw(st.integers(shadow.sealed, shadow.num_slots))
        shadow.tokens = [*shadow.tokens[:num_slots], new_token]
        self._commit(sequence_id, shadow, num_slots)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        sequence_id, _ = self._pick(data)
        self.cache.free(sequence_id)
        self.cache.free(sequence_id)  # a second time is harmless
        del self.open[sequence_id]

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        sequence_id, shadow = self._pick(data)
        self.cache.free(sequence_id)
        del self.open[sequence_id]
        self._match(sequence_id, Shadow(shadow.tokens, shadow.salt))

    # -- what must hold -------------------------------------------------------------------

    @invariant()
    def committed_slots_read_back(self) -> None:
        if not hasattr(self, "cache"):
            return
        self.cache.check()
        size = self.cache.block_size
        held: set[int] = set()
        for sequence_id, shadow in self.open.items():
            table = self.cache.table(sequence_id)
            held.update(table.tolist())
            assert len(table) == -(-shadow.num_slots // size), "rolled-back blocks are still held"
            for slot in range(shadow.num_slots):
                cell = self.memory[table[slot // size] * size + slot % size]
                assert cell == (shadow.salt, tuple(shadow.tokens[: slot + 1]))
        assert self.cache.num_free_blocks == self.cache.num_blocks - len(held)
        assert abs(self.cache.usage - len(held) / self.cache.num_blocks) < 1e-9

    def teardown(self) -> None:
        if hasattr(self, "cache"):
            for sequence_id in self.open:
                self.cache.free(sequence_id)
            self.cache.check()
            assert self.cache.num_free_blocks == self.cache.num_blocks

    # -- the machine's own parts ----------------------------------------------------------

    def _pick(self, data: st.DataObject) -> tuple[int, Shadow]:
        sequence_id = data.draw(st.sampled_from(sorted(self.open)))
        return sequence_id, self.open[sequence_id]

    def _match(self, sequence_id: int, shadow: Shadow) -> None:
        size = self.cache.block_size
        found = self.cache.match(sequence_id, shadow.tokens, shadow.salt)
        assert found % size == 0
        assert found < len(shadow.tokens)
        if self.cache.prefix_caching:
            # What a running sequence has sealed cannot have been evicted, so it must be found.
            limit = (len(shadow.tokens) - 1) // size * size
            for other in self.open.values():
                if other.shares and other.salt == shadow.salt:
                    common = min(_common(other.tokens, shadow.tokens), other.sealed, limit)
                    assert found >= common // size * size
        else:
            assert found == 0
        shadow.num_slots = shadow.sealed = found
        shadow.shares = self.cache.prefix_caching
        self.open[sequence_id] = shadow

    def _reserve(self, sequence_id: int, shadow: Shadow, num_slots: int) -> bool:
        held = -(-shadow.num_slots // self.cache.block_size)
        missing = -(-num_slots // self.cache.block_size) - held
        before = self.cache.snapshot()
        enough = missing <= self.cache.num_free_blocks
        assert self.cache.reserve(sequence_id, num_slots) is enough
        if not enough:
            assert self.cache.snapshot() == before
        return enough

    def _commit(self, sequence_id: int, shadow: Shadow, num_slots: int) -> None:
        self.cache.commit(sequence_id, shadow.tokens, num_slots)
        shadow.num_slots = num_slots
        if shadow.shares:
            shadow.sealed = num_slots // self.cache.block_size * self.cache.block_size

    def _write(self, sequence_id: int, slot: int, cell: Cell) -> None:
        block = int(self.cache.table(sequence_id)[slot // self.cache.block_size])
        self._check_writable(block)
        self.memory[block * self.cache.block_size + slot % self.cache.block_size] = cell

    def _check_writable(self, block: int) -> None:
        """Copy-on-write is not needed: what is written is in one table and in no index."""
        assert not self.cache.is_shared(block)


def _common(a: list[int], b: list[int]) -> int:
    differences = (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
    return next(differences, min(len(a), len(b)))


def test_a_prefix_that_somebody_holds_outlives_its_first_owner() -> None:
    """Two computed it side by side; the one who was first is gone, and its blocks are needed."""
    cache = KVCache(3, 1)
    for sequence_id in (0, 1):
        assert cache.match(sequence_id, [7, 8]) == 0
    for sequence_id in (0, 1):
        assert cache.reserve(sequence_id, 1)
        cache.commit(sequence_id, [7, 8], 1)
    cache.free(0)
    assert cache.reserve(2, 2)  # takes all the room there is
    assert cache.match(3, [7, 9]) == 1
    cache.check()


TestKVCache = KVCacheMachine.TestCase
TestKVCache.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
