"""Which block the pool hands out: neighbours first, then room, then the coldest cache."""

from __future__ import annotations

import pytest

from outrider.errors import ConfigError
from outrider.kv.blocks import BlockPool
from outrider.kv.cache import KVCache


def test_a_growing_sequence_stays_contiguous() -> None:
    cache = KVCache(num_blocks=64, block_size=4)
    tokens = list(range(128))
    for sequence_id in (1, 2):
        cache.match(sequence_id, tokens[:1], salt=str(sequence_id))
    for num_slots in range(1, 100, 3):
        for sequence_id in (1, 2):
            assert cache.reserve(sequence_id, num_slots)
            cache.commit(sequence_id, tokens, num_slots)
    assert cache.table(1).tolist() == list(range(25))
    assert cache.table(2).tolist() == list(range(32, 57))


def test_free_blocks_are_used_before_cached_ones() -> None:
    evicted: list[int] = []
    pool = BlockPool(4, evicted.append)
    blocks = [pool.allocate(after=i - 1) for i in range(4)]
    pool.release(blocks[1], keep=True)
    pool.release(blocks[3], keep=False)
    assert pool.allocate(after=0) == 3
    assert not evicted
    assert pool.allocate(after=3) == 1
    assert evicted == [1]


def test_the_neighbour_is_evicted_only_when_it_is_cold() -> None:
    for hot in (False, True):
        evicted: list[int] = []
        pool = BlockPool(8, evicted.append)
        for i in range(8):
            pool.allocate(after=i - 1)
        order = [7, 6, 5, 4, 3, 2, 1] if hot else [7, 1, 6, 5, 4, 3, 2]
        for block in order:
            pool.release(block, keep=True)
        assert pool.allocate(after=0) == (7 if hot else 1)
        pool.check()


def test_a_revived_block_is_no_longer_evictable() -> None:
    pool = BlockPool(1, lambda block: None)
    block = pool.allocate()
    pool.release(block, keep=True)
    pool.share(block)
    assert pool.num_available == 0
    pool.release(block, keep=False)
    with pytest.raises(AssertionError, match="twice"):
        pool.release(block, keep=False)


def test_eviction_shortens_a_prefix_from_its_end() -> None:
    cache = KVCache(num_blocks=4, block_size=2)
    tokens = [1, 2, 3, 4, 5, 6, 7]
    cache.match(1, tokens)
    assert cache.reserve(1, 6)
    cache.commit(1, tokens, 6)
    cache.free(1)
    assert cache.num_free_blocks == 4
    assert cache.reserve(2, 4)  # the free block, then the coldest cached one
    assert cache.match(3, tokens) == 4


def test_tree_compaction_moves_only_what_is_out_of_place() -> None:
    cache = KVCache(num_blocks=8, block_size=4)
    assert cache.reserve(1, 12)
    source, target = cache.compact(1, 5, [0, 2, 5])
    assert source.tolist() == [7, 10]
    assert target.tolist() == [6, 7]
    assert source.dtype == target.dtype == "int32"
    assert len(cache.compact(1, 5, [0, 1, 2])[0]) == 0
    assert len(cache.compact(1, 5, [])[0]) == 0


def test_a_sealed_block_cannot_be_rolled_back() -> None:
    cache = KVCache(num_blocks=4, block_size=2)
    cache.match(1, [1, 2, 3])
    cache.reserve(1, 3)
    cache.commit(1, [1, 2, 3], 3)
    with pytest.raises(AssertionError, match="sealed"):
        cache.commit(1, [1], 1)


@pytest.mark.parametrize(("num_blocks", "block_size"), [(0, 16), (16, 0), (-1, 1)])
def test_a_pool_of_nothing_is_refused(num_blocks: int, block_size: int) -> None:
    with pytest.raises(ConfigError, match="at least one block"):
        KVCache(num_blocks, block_size)


def test_scratch_ids_are_private() -> None:
    cache = KVCache(8, 4)
    ids = [*cache.scratch(3), *cache.scratch(2)]
    assert len({*ids}) == 5
    assert max(ids) < 0  # the ids of requests count from 0
    assert cache.num_free_blocks == 8  # they hold nothing by themselves
