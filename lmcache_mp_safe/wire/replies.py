"""Checks the server's answers before anybody computes with them. Pure."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lmcache_mp_safe.errors import Scope, ServerError

SLOT_ALIGNMENT = 4096  # what the server aligns to by default


def found_objects(answer: Any, asked: int) -> int:
    """Leading objects that exist.

    Raises:
        ServerError: not a number from 0 to `asked`.
    """
    if isinstance(answer, bool) or not isinstance(answer, int) or not 0 <= answer <= asked:
        raise ServerError(f"lookup of {asked} objects answered {answer!r}")
    return answer


def reserved_offsets(context: Any, start: int, end: int, object_bytes: int, pool_bytes: int) -> dict[int, int]:
    """Pool offset by object index of a reservation for [start, end).

    Raises:
        ServerError: indices or slots make no sense.
    """
    context = _mapping(context)
    slots, indices = context.get("slots", []), context.get("chunk_indices", [])
    if not isinstance(indices, Sequence) or not all(type(index) is int for index in indices):
        raise ServerError(f"reservation with indices {indices!r}")
    offsets = slot_offsets(slots, len(indices), object_bytes, pool_bytes)
    if len(set(indices)) != len(indices) or not all(0 <= index < end - start for index in indices):
        raise ServerError(f"reservation of {end - start} objects answered indices {indices!r}")
    return {start + index: offset for index, offset in zip(indices, offsets, strict=True)}


def said_yes(answer: Any) -> bool:
    """A plain yes or no.

    Raises:
        ServerError: something else.
    """
    if type(answer) is not bool:
        raise ServerError(f"yes or no expected, got {answer!r:.200}")
    return answer


def pool_of(answer: Any) -> tuple[str, int]:
    """Name and size of the pool that a registration names; an empty name and 0 if the server shares none.

    Raises:
        ServerError: they make no sense.
    """
    name, size = getattr(answer, "shm_name", None), getattr(answer, "pool_size", None)
    if type(name) is not str or type(size) is not int or size < 0:
        raise ServerError(f"registration answered {answer!r:.200}", scope=Scope.SERVER)
    bare = name.removeprefix("/")
    if "/" in bare or "\0" in bare or bare in (".", ".."):
        raise ServerError(f"{name!r:.200} is no name of shared memory", scope=Scope.SERVER)
    return name, size


def retrieved_offsets(context: Any, count: int, object_bytes: int, pool_bytes: int) -> tuple[int, ...]:
    """Pool offset of each of `count` objects.

    Raises:
        ServerError: the slots make no sense.
    """
    return slot_offsets(_mapping(context).get("slots", []), count, object_bytes, pool_bytes)


def slot_offsets(slots: Any, count: int, object_bytes: int, pool_bytes: int) -> tuple[int, ...]:
    """Offsets of `count` slots of this size that lie in the pool and do not overlap.

    Raises:
        ServerError: otherwise.
    """
    if not isinstance(slots, Sequence) or len(slots) != count:
        raise ServerError(f"{count} slots expected, got {slots!r:.200}")
    offsets = tuple(_offset(slot, object_bytes, pool_bytes) for slot in slots)
    in_order = sorted(offsets)
    if any(after - before < object_bytes for before, after in itertools.pairwise(in_order)):
        raise ServerError(f"slots overlap: {in_order[:10]}")
    return offsets


def check_apart(offsets: Iterable[int], taken: Iterable[int], object_bytes: int) -> None:
    """New slots touch none of those that are in use.

    Raises:
        ServerError: one of them does: two copies would meet in the same bytes.
    """
    in_use = sorted(set(taken))
    for offset in offsets:
        at = bisect.bisect(in_use, offset - object_bytes)
        if at < len(in_use) and in_use[at] < offset + object_bytes:
            raise ServerError(f"slot at {offset} overlaps one in use at {in_use[at]}")


def _offset(slot: Any, object_bytes: int, pool_bytes: int) -> int:
    slot = _mapping(slot)
    offset, length = slot.get("offset"), slot.get("length")
    if type(offset) is not int or type(length) is not int or length != object_bytes:
        raise ServerError(f"slot {slot!r:.200} is no slot of {object_bytes} bytes")
    if offset < 0 or offset + length > pool_bytes:
        raise ServerError(f"slot at {offset} with {length} bytes is outside of the pool of {pool_bytes}")
    if offset % SLOT_ALIGNMENT:
        raise ServerError(f"slot at {offset}, which is no multiple of {SLOT_ALIGNMENT}; leave --l1-align-bytes alone")
    return offset


def _mapping(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ServerError(f"a mapping expected, got {value!r:.200}")
    return value
