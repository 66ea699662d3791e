"""A client of the LMCache server whose answers come when the test says so, and a small model of the server behind it.

`FakeClient` records calls; each waits in `open_calls` until the test answers it by hand or lets a `ServerModel` do so.
The model keeps what the real server keeps for reads: locks by owner, lookup jobs, open retrieves. It raises on whatever
would be an imbalance there, so that a test that ends with `check_settled` shows that every lock was released once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from lmcache_mp_safe.testing.received import as_received
from lmcache_mp_safe.wire.connecting import Connection, Target
from lmcache_mp_safe.wire.pool import PoolView

_PENDING = object()


@dataclass
class FakeAnswer:
    """What LMCache's response classes look like from outside."""

    context: Any = field(default_factory=dict)
    success: Any = True
    shm_name: str = ""
    pool_size: int = 0


@dataclass
class FakeCall:
    """One call, and the future that LMCache's client would have returned for it."""

    name: str
    arguments: tuple[Any, ...]
    value: Any = _PENDING

    def query(self) -> bool:
        return self.value is not _PENDING

    def wait(self, timeout: float | None = None) -> bool:
        return self.query()

    def result(self, timeout: float | None = None) -> Any:
        if isinstance(self.value, Exception):
            raise self.value
        if not self.query():
            raise TimeoutError(self.name)
        return self.value

    def answer(self, value: Any) -> None:
        self.value = value


class FakeClient:
    """Stands in for LMCache's `RequestClient`."""

    def __init__(self) -> None:
        self.calls: list[FakeCall] = []
        self.closed = False

    @property
    def open_calls(self) -> list[FakeCall]:
        return [call for call in self.calls if not call.query()]

    def sent(self, name: str) -> list[FakeCall]:
        """Every call of this name, in order."""
        return [call for call in self.calls if call.name == name]

    def waiting(self, name: str) -> FakeCall:
        """The only unanswered call of this name."""
        (call,) = [call for call in self.open_calls if call.name == name]
        return call

    def close(self) -> None:
        self.closed = True

    def _call(self, name: str, *arguments: Any) -> FakeCall:
        assert not self.closed, f"{name} on a closed client"
        self.calls.append(FakeCall(name, arguments))
        return self.calls[-1]

    def register_kv_cache_engine_driven_context(self, payload: Any) -> FakeCall:
        return self._call("register", payload)

    def unregister_kv_cache_engine_driven_context(self, instance_id: int) -> FakeCall:
        return self._call("unregister", instance_id)

    def ping(self, instance_id: int | None) -> FakeCall:
        return self._call("ping", instance_id)

    def lookup(self, key: Any, tp_size: int) -> FakeCall:
        return self._call("lookup", key)

    def query_prefetch_status(self, request_id: str) -> FakeCall:
        return self._call("status", request_id)

    def free_lookup_locks(self, key: Any, tp_size: int) -> FakeCall:
        return self._call("free", key)

    def end_session(self, request_id: str) -> FakeCall:
        return self._call("end", request_id)

    def prepare_store(self, key: Any, instance_id: int) -> FakeCall:
        return self._call("reserve", key)

    def commit_store(self, key: Any, instance_id: int, data: bytes) -> FakeCall:
        return self._call("commit", key)

    def prepare_retrieve(self, key: Any, instance_id: int) -> FakeCall:
        return self._call("retrieve", key)

    def commit_retrieve(self, key: Any, instance_id: int) -> FakeCall:
        return self._call("done", key)


class FakeMaker:
    """Connects at once to the clients that a test supplies, and closes them at once."""

    def __init__(self, segment_name: str, pool_bytes: int, server_chunk: int = 256) -> None:
        self.clients: list[FakeClient] = []
        self.server_chunk = server_chunk
        self.segment_name = segment_name
        self.pool_bytes = pool_bytes
        self._wanted = False

    @property
    def client(self) -> FakeClient:
        """The newest one."""
        return self.clients[-1]

    def make(self, target: Target) -> None:
        self._wanted = True

    def result(self) -> Connection | None:
        if not self._wanted:
            return None
        self._wanted = False
        self.clients.append(FakeClient())
        pool = PoolView(self.segment_name, self.pool_bytes)
        return Connection(self.client, 7, self.segment_name, pool, self.server_chunk)

    def close(self, connection: Connection) -> None:
        connection.client.close()
        connection.pool.close()

    def stop(self, deadline_s: float) -> None:
        pass

    def registered(self) -> FakeAnswer:
        """The right answer to a registration."""
        return FakeAnswer(shm_name=self.segment_name, pool_size=self.pool_bytes)


def slots(offsets: Iterable[int], object_bytes: int, indices: Iterable[int] | None = None) -> FakeAnswer:
    """An answer to `prepare_retrieve`, or with `indices` to `prepare_store`."""
    context: dict[str, Any] = {"slots": [{"offset": offset, "length": object_bytes} for offset in offsets]}
    if indices is not None:
        context["chunk_indices"] = list(indices)
    return FakeAnswer(context)


class ServerModel:
    """The reading half of the server, as the source of LMCache 0.5.6 has it.

    Attributes:
        locks: read locks by (server session, object).
        jobs: what a lookup found, until its status is asked for.
    """

    def __init__(self, object_bytes: int, server_chunk: int, stored: int) -> None:
        self.object_bytes = object_bytes
        self.server_chunk = server_chunk
        self.stored = stored
        self.locks: Counter[tuple[str, int]] = Counter()
        self.jobs: dict[str, int] = {}
        self.results: dict[str, int] = {}
        self.reading: dict[Any, list[tuple[str, int]]] = {}
        self.refused: set[Any] = set()
        self.sessions: set[str] = set()
        self.ended: set[str] = set()

    def serve(self, call: FakeCall, *, fail_retrieve: bool = False, still_running: bool = False) -> None:
        """Carry the call out and answer it."""
        argument: Any = as_received(call.arguments[0])
        match call.name:
            case "lookup":
                self._lookup(argument)
                call.answer(None)
            case "status":
                call.answer(None if still_running else self._status(argument))
            case "free":
                self._free(argument)
                call.answer(None)
            case "retrieve":
                call.answer(self._retrieve(argument, fail_retrieve))
            case "done":
                call.answer(self._done(argument))
            case "end":
                self._end(argument)
                call.answer(None)

    def check_settled(self) -> None:
        assert +self.locks == Counter(), f"locks left: {+self.locks}"
        assert not self.jobs, f"lookups whose status was never asked for: {self.jobs}"
        assert not self.reading, "retrieves that were never ended"
        assert self.sessions == self.ended, f"sessions left: {self.sessions - self.ended}"

    def _objects(self, key: Any) -> range:
        return range(key.start // self.server_chunk, key.end // self.server_chunk)

    def _lookup(self, key: Any) -> None:
        name = key.request_id
        self.sessions.add(name)
        found = min(self.stored, key.end // self.server_chunk)
        for index in range(found):
            self.locks[name, index] += 1
        self.jobs[name] = found

    def _status(self, name: str) -> int:
        if name not in self.jobs:
            return 0
        self.results[name] = self.jobs.pop(name)
        return self.results[name]

    def _free(self, key: Any) -> None:
        assert key.request_id not in self.jobs, "freed while the lookup was running: the server releases nothing"
        found = self.results.get(key.request_id, 0)
        self._release([(key.request_id, index) for index in self._objects(key) if index < found])

    def _retrieve(self, key: Any, fail: bool) -> FakeAnswer:
        objects = [(key.request_id, index) for index in self._objects(key)]
        if fail:
            self.refused.add(key)
            self._release(objects)  # a failed retrieve releases the locks of what was readable
            return FakeAnswer(success=False)
        assert key not in self.reading, "two retrieves under one record"
        self.reading[key] = objects
        return slots([index * self.object_bytes for _, index in objects], self.object_bytes)

    def _done(self, key: Any) -> bool:
        if key not in self.refused:  # the end of a retrieve that failed releases nothing, nor does a second end
            self._release(self.reading.pop(key))
            self.refused.add(key)
        return True

    def _end(self, name: str) -> None:
        assert name not in self.jobs, "a session ended before its lookup's status was asked for"
        assert name not in self.ended, "a session ended twice"
        self.ended.add(name)

    def _release(self, objects: list[tuple[str, int]]) -> None:
        for one in objects:
            assert self.locks[one] > 0, f"lock {one} released twice: another reader's is gone"
            self.locks[one] -= 1
