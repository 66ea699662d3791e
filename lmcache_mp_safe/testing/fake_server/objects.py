"""Objects of the pool: reserved by a writer, then readable, locked by readers, evicted.

A name is either reserved or readable, and only what is readable is ever found.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lmcache_mp_safe.testing.fake_server.locks import Clock, TtlLock
from lmcache_mp_safe.testing.fake_server.recency import Recency
from lmcache_mp_safe.testing.fake_server.room import Room

WATERMARK = 0.8  # share of the pool above which objects are evicted
EVICTED_SHARE = 0.2  # of all objects, by number


class ObjectName(NamedTuple):
    """What the server keeps an object under. The request that stored it is no part of it."""

    chunk_hash: bytes
    namespace: str
    world_size: int
    rank: int
    salt: str


@dataclass(frozen=True)
class Layout:
    """What one object is: bytes, and the tensor that the server takes them for."""

    length: int
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Stored:
    """Where an object lies, and its two locks: `writing` while it is reserved, `reading` once it can be found."""

    offset: int
    layout: Layout
    writing: TtlLock
    reading: TtlLock


class Objects:
    """All objects of one pool."""

    def __init__(self, clock: Clock, size: int, *, write_ttl_s: float, read_ttl_s: float) -> None:
        self._clock = clock
        self._write_ttl_s = write_ttl_s
        self._read_ttl_s = read_ttl_s
        self._recency: Recency[ObjectName] = Recency()
        self.room = Room(size)
        self.readable: dict[ObjectName, Stored] = {}
        self.reserved: dict[ObjectName, Stored] = {}

    # --- writing ----------------------------------------------------------------------------------------------------

    def reserve(self, names: Sequence[ObjectName], layout: Layout) -> dict[ObjectName, Stored]:
        """Slots for those names that are neither readable nor being written; new ones for all of them or for none.

        A reservation whose write lock ran out goes to the next who asks, buffer and all.
        """
        granted: dict[ObjectName, Stored] = {}
        new: list[ObjectName] = []
        for name in names:
            before = self.reserved.get(name)
            if name in self.readable or (before is not None and before.writing.count):
                continue
            if before is None:
                new.append(name)
            else:
                before.writing.lock()
                granted[name] = before
        for name, offset in zip(new, self.room.take(layout.length, len(new)) or [], strict=False):
            writing, reading = TtlLock(self._clock, self._write_ttl_s), TtlLock(self._clock, self._read_ttl_s)
            writing.lock()
            granted[name] = self.reserved[name] = Stored(offset, layout, writing, reading)
        if new:
            self._recency.created(list(granted))
        return granted

    def publish(self, names: Iterable[ObjectName]) -> None:
        """Make reserved objects readable, whoever reserved them; silently not those whose write lock ran out."""
        published: list[ObjectName] = []
        for name in names:
            stored = self.reserved.get(name)
            if stored is not None and stored.writing.count:
                self.readable[name] = self.reserved.pop(name)
                published.append(name)
        self._recency.created(published)

    # --- reading ----------------------------------------------------------------------------------------------------

    def lock(self, names: Iterable[ObjectName], times: int) -> list[ObjectName]:
        """Take read locks on those that exist, and say which."""
        found = [name for name in names if name in self.readable]
        for name in found:
            self.readable[name].reading.lock(times)
        return found

    def locked(self, names: Iterable[ObjectName]) -> list[ObjectName]:
        """Those that exist and that somebody has a live lock on."""
        return [name for name in names if name in self.readable and self.readable[name].reading.count]

    def unlock(self, names: Iterable[ObjectName], times: int = 1) -> None:
        for name in names:
            stored = self.readable.get(name)
            if stored is not None and stored.reading.count:
                stored.reading.unlock(times)

    def touch(self, names: Sequence[ObjectName]) -> None:
        self._recency.touched(names)

    # --- going ------------------------------------------------------------------------------------------------------

    def evict(self, share: float = EVICTED_SHARE) -> list[ObjectName]:
        """Drop this share of all objects, oldest first, as far as they are not locked."""
        return self.delete(self._recency.oldest(share, self._may_go))

    def evict_when_full(self) -> list[ObjectName]:
        return self.evict() if self.room.used >= WATERMARK * self.room.size else []

    def delete(self, names: Iterable[ObjectName], *, force: bool = False) -> list[ObjectName]:
        """Drop these as far as they are not locked; locked ones too with `force`. Returns those that are gone."""
        going = [name for name in names if force or self._may_go(name)]
        for name in going:
            stored = self.readable.pop(name, None) or self.reserved.pop(name)
            self.room.give_back(stored.offset, stored.layout.length)
        self._recency.gone(going)
        return going

    def clear(self, *, force: bool) -> None:
        """Drop everything that is not locked; everything, with locks and reservations, with `force`."""
        self.delete([*self.readable, *self.reserved], force=force)

    def _may_go(self, name: ObjectName) -> bool:
        if name in self.readable:
            return not self.readable[name].reading.count
        return name in self.reserved and not self.reserved[name].writing.count
