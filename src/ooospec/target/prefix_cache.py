"""KV caches of the last requests, to start from the longest common token prefix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ooospec.core import common_prefix
from ooospec.target.kv_cache import TreeCache

DEFAULT_MAX_BYTES = 1 << 30
MIN_REUSE = 16
"""Shorter common prefixes are not worth the copy."""


@dataclass(frozen=True, slots=True)
class _Entry:
    salt: str
    ids: tuple[int, ...]
    cache: TreeCache


class PrefixCache:
    """Least-recently-used store bounded in bytes. Entries of different `salt` never meet."""

    def __init__(self, max_bytes: int = DEFAULT_MAX_BYTES) -> None:
        self.max_bytes = max_bytes
        self.read_only = False
        """True = `put` stores nothing (measurements that must repeat)."""
        self._entries: list[_Entry] = []  # oldest first

    def take(self, ids: Sequence[int], salt: str = "") -> TreeCache | None:
        """Copy the KV entries of the longest stored prefix of `ids`, or return None."""
        candidates = [(common_prefix(e.ids, ids), i) for i, e in enumerate(self._entries) if e.salt == salt]
        length, index = max(candidates, default=(0, -1))
        if length < MIN_REUSE:
            return None
        entry = self._entries.pop(index)
        self._entries.append(entry)
        return entry.cache.copy_prefix(length)

    def put(self, ids: Sequence[int], cache: TreeCache, salt: str = "") -> None:
        """Store `cache`, whose slots hold exactly `ids`; drop the oldest entries beyond the byte bound."""
        if self.read_only:
            return
        kept = tuple(ids[: cache.length])
        self._entries = [e for e in self._entries if e.salt != salt or common_prefix(e.ids, kept) < len(e.ids)]
        self._entries.append(_Entry(salt, kept, cache))
        while self._entries and sum(e.cache.used_bytes() for e in self._entries) > self.max_bytes:
            self._entries.pop(0)

    def clear(self) -> None:
        """Forget everything."""
        self._entries.clear()
