"""Which bytes of the pool are taken."""

from __future__ import annotations

import bisect

ALIGNMENT = 4096


class Room:
    """First fit in the order of addresses, in steps of 4 KiB; neighbours that are freed become one hole again."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.used = 0
        self._holes: list[tuple[int, int]] = [(0, size)]  # (start, length), by start, no two touching

    def take(self, length: int, count: int) -> list[int] | None:
        """Offsets of `count` pieces, or None and no change: all or nothing."""
        length = aligned(length)
        offsets: list[int] = []
        holes: list[tuple[int, int]] = []
        for start, hole in self._holes:
            here = min(count - len(offsets), hole // length)
            offsets += [start + piece * length for piece in range(here)]
            if hole > here * length:
                holes.append((start + here * length, hole - here * length))
        if len(offsets) < count:
            return None
        self._holes = holes
        self.used += count * length
        return offsets

    def give_back(self, offset: int, length: int) -> None:
        length = aligned(length)
        self.used -= length
        at = bisect.bisect(self._holes, (offset, 0))
        start, end = offset, offset + length
        if at < len(self._holes) and self._holes[at][0] == end:
            end += self._holes.pop(at)[1]
        if at > 0 and sum(self._holes[at - 1]) == start:
            start = self._holes.pop(at - 1)[0]
            at -= 1
        self._holes.insert(at, (start, end - start))


def aligned(length: int) -> int:
    return -(-length // ALIGNMENT) * ALIGNMENT
