"""The order in which objects are evicted."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, TypeVar

K = TypeVar("K")


class Recency(Generic[K]):
    """Least recently used first. Within one call the last key counts as the oldest, so that a chain loses its tail.

    That holds inside one call only: of two calls for two halves of a chain the first half is the older one, head and
    all, until something touches the whole chain.
    """

    def __init__(self) -> None:
        self._order: OrderedDict[K, None] = OrderedDict()

    def created(self, keys: Sequence[K]) -> None:
        for key in reversed(keys):
            self._order[key] = None
            self._order.move_to_end(key)

    def touched(self, keys: Sequence[K]) -> None:
        for key in reversed(keys):
            if key in self._order:
                self._order.move_to_end(key)

    def gone(self, keys: Iterable[K]) -> None:
        for key in keys:
            self._order.pop(key, None)

    def oldest(self, share: float, may_go: Callable[[K], bool]) -> list[K]:
        """This share of all keys, at least one, from those that may go."""
        count = max(1, int(len(self._order) * share))
        chosen: list[K] = []
        for key in self._order:
            if len(chosen) == count:
                break
            if may_go(key):
                chosen.append(key)
        return chosen
