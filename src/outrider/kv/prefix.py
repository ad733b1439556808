"""Which block holds which prefix: a hash chain over full blocks.

    digest(block) = BLAKE2b-128(digest of the block before it | tokens of the block)

A digest thus names every token up to the end of its block. The root of the chain is a hash of the
tenant's salt: tenants with different salts share no digest, so neither content nor the timing of a
cache hit leaks between them. With 128 cryptographic bits, two prefixes with one digest cannot be
produced, so tokens need not be stored and compared.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

_DIGEST_BYTES = 16


def root_digest(salt: str) -> bytes:
    """Where the chain of a tenant begins."""
    # `person` keeps roots and links apart: no salt can be chosen to equal some tenant's prefix.
    data = salt.encode("utf-8", "surrogatepass")
    return blake2b(data, digest_size=_DIGEST_BYTES, person=b"salt").digest()


def next_digest(parent: bytes, tokens: Sequence[int]) -> bytes:
    """The digest of the prefix that `parent` names, extended by one block's tokens."""
    data = parent + array("q", tokens).tobytes()
    return blake2b(data, digest_size=_DIGEST_BYTES, person=b"block").digest()


class PrefixIndex:
    """Which blocks hold what a digest names: several, where sequences computed it side by side."""

    def __init__(self) -> None:
        self._blocks: dict[bytes, list[int]] = {}
        self._digests: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, block: int) -> bool:
        return block in self._digests

    def get(self, digest: bytes) -> int | None:
        blocks = self._blocks.get(digest)
        return None if blocks is None else blocks[0]

    def has_twin(self, block: int) -> bool:
        """Whether another block holds the same. It must be in the index."""
        return len(self._blocks[self._digests[block]]) > 1

    def snapshot(self) -> object:
        """The blocks of every digest, as values to compare. For tests."""
        return {digest: list(blocks) for digest, blocks in self._blocks.items()}

    def insert(self, digest: bytes, block: int) -> None:
        self._blocks.setdefault(digest, []).append(block)
        self._digests[block] = digest

    def forget(self, block: int) -> None:
        """The block is about to hold something else. It must be in the index."""
        digest = self._digests.pop(block)
        blocks = self._blocks[digest]
        blocks.remove(block)
        if not blocks:
            del self._blocks[digest]
