"""Who is registered, with which layout, and who has been silent for too long."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

from lmcache_mp_safe.testing.fake_server.objects import Layout
from lmcache_mp_safe.testing.fake_server.sessions import HandlerError


@dataclass
class Instance:
    """One registration. `pinged`: it has shown that it pings, and is held to the shorter silence from then on."""

    namespace: str
    world_size: int
    layout: Layout
    last_seen: float
    pinged: bool = False


class Instances:
    """Registrations by instance id, and how many a namespace has."""

    def __init__(self, *, reap_s: float, grace_s: float) -> None:
        self._reap_s = reap_s
        self._grace_s = grace_s
        self._instances: dict[int, Instance] = {}
        self._namespaces: Counter[tuple[str, int]] = Counter()

    def register(self, payload: Any, now: float) -> None:
        """An id that is registered already keeps what it has."""
        known = self._instances.get(payload.instance_id)
        if known is not None:
            known.last_seen = now
            return
        layout = layout_of(payload)
        self._instances[payload.instance_id] = Instance(payload.model_name, payload.world_size, layout, now)
        self._namespaces[payload.model_name, payload.world_size] += 1

    def unregister(self, number: int) -> bool:
        """Whether it was registered."""
        gone = self._instances.pop(number, None)
        if gone is not None:
            self._namespaces[gone.namespace, gone.world_size] -= 1
        return gone is not None

    def used(self, number: int, now: float) -> Instance:
        """This instance, which thereby shows that it is alive.

        Raises:
            HandlerError: it is not registered.
        """
        found = self._instances.get(number)
        if found is None:
            raise HandlerError(f"instance {number} is not registered")
        found.last_seen = now
        return found

    def pinged(self, number: int | None, now: float) -> None:
        found = None if number is None else self._instances.get(number)
        if found is not None:
            found.last_seen, found.pinged = now, True

    def knows_namespace(self, namespace: str, world_size: int) -> bool:
        return self._namespaces[namespace, world_size] > 0

    def silent(self, now: float) -> list[int]:
        """Those that are to be reaped."""
        return [
            number
            for number, one in self._instances.items()
            if now - one.last_seen > (self._reap_s if one.pinged else self._grace_s)
        ]


def layout_of(payload: Any) -> Layout:
    """What a registration says of its objects.

    Raises:
        HandlerError: there is no such dtype, or no slot.
    """
    import torch  # what the server takes sizes from

    dtype = getattr(torch, payload.dtype_str, None)
    if not isinstance(dtype, torch.dtype):
        raise HandlerError(f"no dtype {payload.dtype_str!r}")
    if payload.num_physical_slots is None or payload.num_physical_slots <= 0:
        raise HandlerError(f"{payload.num_physical_slots} slots")
    keys_and_values = () if payload.use_mla else (2,)
    shape = (*keys_and_values, payload.num_layers, payload.num_physical_slots, payload.hidden_dim_size)
    return Layout(math.prod(shape) * int(dtype.itemsize), shape, payload.dtype_str)
