"""The operations of the server."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lmcache.v1.multiprocess.custom_types import (
    PrepareRetrieveResponse,
    PrepareStoreResponse,
    RegisterEngineDrivenContextResponse,
)

from lmcache_mp_safe.testing.fake_server.instances import Instance, Instances
from lmcache_mp_safe.testing.fake_server.locks import Clock
from lmcache_mp_safe.testing.fake_server.memory import Memory
from lmcache_mp_safe.testing.fake_server.objects import ObjectName, Objects, Stored
from lmcache_mp_safe.testing.fake_server.sessions import HandlerError, Lookup, Session, chunk_hashes, names_of

_EVICTION_EVERY_S = 1.0
_CLEAN_UP_EVERY_S = 60.0
_REAPS_PER_SILENCE = 4
_MOST_READERS = 128

OPERATIONS = frozenset(
    (
        "ping",
        "get_chunk_size",
        "register_kv_cache_engine_driven_context",
        "unregister_kv_cache_engine_driven_context",
        "lookup",
        "query_prefetch_status",
        "wait_prefetch_status",
        "free_lookup_locks",
        "end_session",
        "prepare_store",
        "commit_store",
        "prepare_retrieve",
        "commit_retrieve",
        "clear",
    )
)

# An operation that is prepared and not committed. The key's equality leaves the request id out.
_Record = tuple[int, Any]


@dataclass(frozen=True)
class Reply:
    """An answer. (No answer at all is None in place of one.)"""

    value: Any


class FakeServer:
    """One server. What it does by itself (evict, reap, forget sessions) it does in `tick`; every call begins with one.

    Attributes:
        lookup_s: how long a lookup runs until its result is there: no time with memory only, some with L2.
        objects, sessions, lookups: what the server holds, for tests to look at.
    """

    def __init__(
        self,
        clock: Clock,
        memory: Memory,
        *,
        shm_name: str,
        server_chunk: int = 256,
        write_ttl_s: float = 600.0,
        read_ttl_s: float = 300.0,
        session_ttl_s: float = 600.0,
        reap_s: float = 120.0,
        grace_s: float = 3600.0,
        lookup_s: float = 0.0,
    ) -> None:
        self._clock = clock
        self.memory = memory
        self.shm_name = shm_name
        self.server_chunk = server_chunk
        self.lookup_s = lookup_s
        self._write_ttl_s, self._read_ttl_s, self._session_ttl_s = write_ttl_s, read_ttl_s, session_ttl_s
        self._reap_s, self._grace_s = reap_s, grace_s
        self._begin()

    def _begin(self) -> None:
        now = self._clock()
        self.objects = Objects(
            self._clock, self.memory.size, write_ttl_s=self._write_ttl_s, read_ttl_s=self._read_ttl_s
        )
        self.instances = Instances(reap_s=self._reap_s, grace_s=self._grace_s)
        self.sessions: dict[str, Session] = {}
        self.lookups: dict[str, Lookup] = {}
        self.writes: dict[_Record, list[ObjectName]] = {}
        self.reads: dict[_Record, list[ObjectName]] = {}
        self._evicted_at = self._reaped_at = self._cleaned_at = now

    # --- what a test, or a simulator, does to it --------------------------------------------------------------------

    def handle(self, operation: str, arguments: Sequence[Any]) -> Reply | None:
        """Carry a call out.

        Returns:
            None where the real server's handler raises: then nothing is ever sent back.

        Raises:
            KeyError: there is no such operation here.
        """
        if operation not in OPERATIONS:
            raise KeyError(operation)
        self.tick()
        try:
            return Reply(getattr(self, operation)(*arguments))
        except HandlerError:
            return None

    def restart(self) -> None:
        """Everything is forgotten; the pool is a new segment of the same name."""
        self.memory.renew()
        self._begin()

    def evict(self, share: float = 1.0) -> list[ObjectName]:
        """Evict this share of all objects now, as far as they are not locked, as a pool under pressure would."""
        return self.objects.evict(share)

    def tick(self) -> None:
        """What the server's own threads have done by now."""
        now = self._clock()
        while now - self._evicted_at >= _EVICTION_EVERY_S:
            gone = self.objects.evict_when_full()
            self._evicted_at = self._evicted_at + _EVICTION_EVERY_S if gone else now
        if now - self._reaped_at >= self._reap_s / _REAPS_PER_SILENCE:
            self._reaped_at = now
            for instance in self.instances.silent(now):
                self._release(instance)
        if now - self._cleaned_at >= _CLEAN_UP_EVERY_S:
            self._cleaned_at = now
            for name in [n for n, session in self.sessions.items() if now - session.created > self._session_ttl_s]:
                del self.sessions[name]

    # --- life -------------------------------------------------------------------------------------------------------

    def ping(self, instance_id: int | None) -> bool:
        self.instances.pinged(instance_id, self._clock())
        return True

    def get_chunk_size(self) -> int:
        return self.server_chunk

    def register_kv_cache_engine_driven_context(self, payload: Any) -> RegisterEngineDrivenContextResponse:
        self.instances.register(payload, self._clock())
        return RegisterEngineDrivenContextResponse(shm_name=self.shm_name, pool_size=self.memory.size)

    def unregister_kv_cache_engine_driven_context(self, instance_id: int) -> None:
        self._release(instance_id)

    def clear(self, force: bool = False) -> None:
        self.objects.clear(force=force)

    def _release(self, instance_id: int) -> None:
        """Forget an instance. What it had prepared is completed for it: reads released, writes *published*."""
        if not self.instances.unregister(instance_id):
            return
        for record in [record for record in self.writes if record[0] == instance_id]:
            self.objects.publish(self.writes.pop(record))
        for record in [record for record in self.reads if record[0] == instance_id]:
            self.objects.unlock(self.reads.pop(record))

    # --- lookups ----------------------------------------------------------------------------------------------------

    def lookup(self, key: Any, tp_size: int) -> None:
        """Read-lock the leading objects that exist; `key.start` plays no part, and neither does the session's cache."""
        found, hashes = 0, []
        if self.instances.knows_namespace(key.model_name, key.world_size):
            readers = _readers(key)
            hashes = chunk_hashes(key.token_ids, self.server_chunk, 0, key.end)
        if hashes:
            session = self._session(key.request_id)
            session.tokens, session.key, session.found = key.token_ids, key, -1
            names = [names_of(key, [one]) for one in hashes]
            locked = set(self.objects.lock((name for column in names for name in column), readers))
            while found < len(names) and locked.issuperset(names[found]):
                found += 1
            hit = [name for column in names[:found] for name in column]
            self.objects.unlock(locked.difference(hit), readers)
            self.objects.touch(hit)
        self.lookups[key.request_id] = Lookup(found, self._clock() + self.lookup_s)

    def query_prefetch_status(self, request_id: str) -> int | None:
        """What the lookup found, once; None while it runs; 0 for what is not known."""
        return self.wait_prefetch_status(request_id, 0.0)

    def wait_prefetch_status(self, request_id: str, timeout: float) -> int | None:
        """As above, with the lookup over if it is within this time, in seconds; here the time does not pass."""
        lookup = self.lookups.get(request_id)
        return 0 if lookup is None else self._hand_over(request_id, lookup, timeout)

    def free_lookup_locks(self, key: Any, tp_size: int) -> None:
        """Release what the session's lookup locked in [start, end); nothing while it runs or without one."""
        if key.start >= key.end:
            return
        session = self._session(key.request_id)
        lookup = self.lookups.get(key.request_id)
        if session.found < 0 and lookup is not None and self._hand_over(key.request_id, lookup) is None:
            return
        if session.found < 0:
            return
        start, chunk = key.start, self.server_chunk
        hashes = chunk_hashes(key.token_ids, chunk, start, key.end)
        if not hashes:
            return
        self._need_namespace(key)
        hit = hashes[: max(0, session.found - start // chunk)]
        if hit:
            self.objects.unlock(names_of(key, hit), _readers(key))

    def end_session(self, request_id: str) -> None:
        """Forget the session and touch everything it named, which keeps the head of a chain as young as its tail."""
        session = self.sessions.pop(request_id, None)
        if session is None or session.key is None:
            return
        whole = len(session.tokens) // self.server_chunk * self.server_chunk
        hashes = session.hashes_of(0, whole, self.server_chunk)
        self._need_namespace(session.key)
        self.objects.touch(names_of(session.key, hashes))

    def _hand_over(self, request_id: str, lookup: Lookup, wait_s: float = 0.0) -> int | None:
        if self._clock() + wait_s < lookup.ready_at:
            return None
        del self.lookups[request_id]
        self._session(request_id).found = lookup.found
        return lookup.found

    def _need_namespace(self, key: Any) -> None:
        if not self.instances.knows_namespace(key.model_name, key.world_size):
            raise HandlerError(f"no layout of {key.model_name}")

    # --- stores and loads -------------------------------------------------------------------------------------------

    def prepare_store(self, key: Any, instance_id: int) -> PrepareStoreResponse:
        instance = self.instances.used(instance_id, self._clock())
        names = self._names(key)
        granted = self.objects.reserve(names, instance.layout)
        indices = [index for index, name in enumerate(names) if name in granted]
        if indices:
            self.writes[instance_id, key] = [names[index] for index in indices]
        slots = [_slot(granted[names[index]]) for index in indices]
        return PrepareStoreResponse(context={"slots": slots, "chunk_indices": indices})

    def commit_store(self, key: Any, instance_id: int, data: bytes) -> bool:
        """True for whatever was prepared, visible afterwards or not; with `data`, a store of its own."""
        instance = self.instances.used(instance_id, self._clock())
        if data:
            return self._store_inline(key, instance, data)
        names = self.writes.pop((instance_id, key), None)
        if names is not None:
            self.objects.publish(names)
        return names is not None

    def prepare_retrieve(self, key: Any, instance_id: int) -> PrepareRetrieveResponse:
        """Where the objects lie, if somebody, anybody, holds a lock on each. If not, one lock of each that was
        readable is released.
        """
        self.instances.used(instance_id, self._clock())
        names = self._names(key)
        locked = self.objects.locked(names)
        if not names or len(locked) != len(names):
            self.objects.unlock(locked)
            return PrepareRetrieveResponse(success=False, data=b"", context={})
        self.reads[instance_id, key] = names
        slots = [_slot(self.objects.readable[name]) for name in names]
        return PrepareRetrieveResponse(success=True, data=b"", context={"slots": slots})

    def commit_retrieve(self, key: Any, instance_id: int) -> bool:
        self.instances.used(instance_id, self._clock())
        self.objects.unlock(self.reads.pop((instance_id, key), []))
        return True

    def _store_inline(self, key: Any, instance: Instance, data: bytes) -> bool:
        chunks = pickle.loads(data)
        granted = self.objects.reserve(self._names(key), instance.layout)
        written = []
        for name, chunk in zip(self._names(key), chunks, strict=False):
            if name in granted and tuple(chunk.shape) == granted[name].layout.shape:
                self.memory.write(granted[name].offset, chunk.contiguous().numpy().tobytes())
                written.append(name)
        self.objects.publish(written)
        return len(written) == len(granted)

    def _names(self, key: Any) -> list[ObjectName]:
        """The objects [start, end) of the session's sequence: its cached hashes, whatever the key's tokens are."""
        session = self._session(key.request_id)
        session.tokens = key.token_ids
        if session.key is None:
            session.key = key
        hashes = session.hashes_of(key.start, key.end, self.server_chunk)
        if key.worker_id is None:
            raise HandlerError("no worker id")
        return names_of(key, hashes)

    def _session(self, request_id: str) -> Session:
        return self.sessions.setdefault(request_id, Session(self._clock()))


def _readers(key: Any) -> int:
    if key.num_kv_readers < 1:
        raise HandlerError("num_kv_readers must be 1 or more")
    return min(int(key.num_kv_readers), _MOST_READERS)


def _slot(stored: Stored) -> dict[str, Any]:
    layout = stored.layout
    return {"offset": stored.offset, "length": layout.length, "shape": list(layout.shape), "dtype": layout.dtype}
