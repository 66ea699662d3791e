"""What the world is told about the server's objects: which were acknowledged, and which turned out to be gone.

Kept only when vLLM publishes KV cache events. An object that is announced is withdrawn before it is announced again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias


class Source(Protocol):
    """The request that an object was stored from."""

    def tokens(self, start: int, end: int) -> Sequence[int]: ...


@dataclass(frozen=True)
class ObjectStored:
    """An object is on the server.

    Attributes:
        parent: digest of the chunk before `start`; None at the start of a prompt.
        source: the request whose tokens [start, end) it holds the KV of, or at whose token `end` it resumes.
        group: index of the first KV cache group in it.
    """

    digest: bytes
    parent: bytes | None
    source: Source
    start: int
    end: int
    group: int


@dataclass(frozen=True)
class ObjectsGone:
    """Objects of one group are not on the server any more, or this process cannot tell any more."""

    digests: tuple[bytes, ...]
    group: int


News: TypeAlias = ObjectStored | ObjectsGone


class Announcements:
    """What is announced, at most `capacity` objects, and the news since the last `take`."""

    def __init__(self, capacity: int = 1 << 17) -> None:
        self._capacity = capacity
        self._announced: OrderedDict[bytes, int] = OrderedDict()  # digest -> group
        self._news: list[News] = []

    def stored(self, stored: ObjectStored) -> None:
        if stored.digest in self._announced:
            return
        self._announced[stored.digest] = stored.group
        self._news.append(stored)
        if len(self._announced) > self._capacity:
            self.gone([next(iter(self._announced))])

    def gone(self, digests: Iterable[bytes]) -> None:
        by_group: dict[int, list[bytes]] = {}
        for digest in digests:
            group = self._announced.pop(digest, None)
            if group is not None:
                by_group.setdefault(group, []).append(digest)
        self._news += [ObjectsGone(tuple(found), group) for group, found in by_group.items()]

    def clear(self) -> None:
        """Nothing of what was announced can be relied on any more."""
        self.gone(list(self._announced))

    def take(self) -> list[News]:
        news, self._news = self._news, []
        return news
