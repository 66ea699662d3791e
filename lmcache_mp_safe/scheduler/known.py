"""What this process has learned about the server's objects: hints that save calls, never reasons to trust a byte."""

from __future__ import annotations

from collections import OrderedDict

from lmcache_mp_safe.announcements import Announcements


class BoundedSet:
    """The `capacity` most recently added digests."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._items: OrderedDict[bytes, None] = OrderedDict()

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._items

    def __len__(self) -> int:
        return len(self._items)

    def add(self, digest: bytes) -> None:
        self._items[digest] = None
        self._items.move_to_end(digest)
        if len(self._items) > self._capacity:
            self._items.popitem(last=False)

    def discard(self, digest: bytes) -> None:
        self._items.pop(digest, None)

    def clear(self) -> None:
        self._items.clear()


class Known:
    """Digests the server acknowledged to this process, and digests whose stored bytes turned out to be wrong.

    An acknowledged object may have been evicted since; a lookup that does not find it takes it out again.
    A boundary object that was loaded is only a good place to probe first: nobody acknowledged a store of it here.
    A poisoned object is resident but fails its seal or checksum. Every lookup would refresh it and every store be told
    that it exists, so it is mended in place after the recompute.
    """

    def __init__(self, capacity: int = 1 << 17, announcements: Announcements | None = None) -> None:
        self.announcements = announcements  # None: nobody wants to know
        self.acknowledged = BoundedSet(capacity)
        self.loaded = BoundedSet(4096)
        self.poisoned = BoundedSet(4096)

    def acknowledge(self, digest: bytes) -> None:
        self.acknowledged.add(digest)
        self.poisoned.discard(digest)

    def remembers(self, digest: bytes) -> bool:
        return digest in self.acknowledged or digest in self.loaded

    def gone(self, digest: bytes) -> None:
        """A lookup did not find it."""
        for marks in (self.acknowledged, self.loaded, self.poisoned):
            marks.discard(digest)
        if self.announcements is not None:
            self.announcements.gone([digest])

    def poison(self, digest: bytes) -> None:
        self.gone(digest)
        self.poisoned.add(digest)

    def clear(self) -> None:
        for marks in (self.acknowledged, self.loaded, self.poisoned):
            marks.clear()
        if self.announcements is not None:
            self.announcements.clear()
