"""Checks the server's answers before anybody computes with them. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from lmcache_mp_safe.errors import ServerError


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


def _offset(slot: Any, object_bytes: int, pool_bytes: int) -> int:
    slot = _mapping(slot)
    offset, length = slot.get("offset"), slot.get("length")
    if type(offset) is not int or type(length) is not int or length != object_bytes:
        raise ServerError(f"slot {slot!r:.200} is no slot of {object_bytes} bytes")
    if offset < 0 or offset + length > pool_bytes:
        raise ServerError(f"slot at {offset} with {length} bytes is outside of the pool of {pool_bytes}")
    return offset


def _mapping(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ServerError(f"a mapping expected, got {value!r:.200}")
    return value
