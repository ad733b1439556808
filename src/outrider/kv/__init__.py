"""Paged, reference-counted KV bookkeeping with prefix sharing."""

from outrider.kv.cache import KVCache

__all__ = ["KVCache"]
