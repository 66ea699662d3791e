"""A server without a network, behind the client API that both connectors use: calls cost next to nothing and are noted.

Answers come when `work` runs, between two hooks, so that a hook pays for what it does and not for the server. What goes
over a real wire is measured by encoding the same calls with LMCache's own encoder.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import msgspec
from lmcache.v1.multiprocess.custom_types import (
    IPCCacheServerKey,
    PrepareRetrieveResponse,
    PrepareStoreResponse,
    RegisterEngineDrivenContextResponse,
)
from lmcache.v1.multiprocess.rpc import get_rpc_spec
from lmcache.v1.multiprocess.transport.zmq_impl.mq import encode_request_uid, msgspec_encode
from lmcache.v1.multiprocess.transport.zmq_impl.wire import encode_operation

from lmcache_mp_safe.wire.connecting import Connection, Maker, Target
from lmcache_mp_safe.wire.pool import PoolView

_POOL_BYTES = 1 << 46
_PENDING = object()
_AT_ONCE = ("get_chunk_size", "get_experimental", "ping", "register_kv_cache_engine_driven_context")


class StubFuture:
    """What LMCache's client returns for a call."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: Any = _PENDING

    def query(self) -> bool:
        return self.value is not _PENDING

    def wait(self, timeout: float | None = None) -> bool:
        return self.value is not _PENDING

    def result(self, timeout: float | None = None) -> Any:
        if self.value is _PENDING:
            raise TimeoutError("the stub server answers between two hooks")
        return self.value


@dataclass
class StubCall:
    """One call. `ready_at`: the round of work that answers it."""

    name: str
    arguments: tuple[Any, ...]
    future: StubFuture
    ready_at: int

    @property
    def sent_bytes(self) -> int:
        """Bytes of the request as LMCache's client sends it, without the transport's own framing."""
        spec = get_rpc_spec(self.name)
        payloads = spec.bind_payloads(self.arguments, {})
        parts = [msgspec_encode(payload, cls) for payload, cls in zip(payloads, spec.payload_types, strict=True)]
        return sum(map(len, (encode_request_uid(1000), encode_operation(self.name), *parts)))

    @property
    def answered_bytes(self) -> int:
        """Bytes of the answer as LMCache's server sends it."""
        answer = msgspec_encode(self.future.value, get_rpc_spec(self.name).response_type)
        return sum(map(len, (encode_request_uid(1000), encode_operation(self.name), answer)))


class StubClient:
    """Stands in for LMCache's `RequestClient`: every method notes a call."""

    def __init__(self, server: StubServer) -> None:
        self._server = server

    def __getattr__(self, name: str) -> Callable[..., StubFuture]:
        server = self._server

        def call(*arguments: Any) -> StubFuture:
            return server.take(name, arguments)

        self.__dict__[name] = call
        return call

    def close(self) -> None:
        pass


class StubPool:
    """Memory of the server that holds nothing but seals."""

    size = _POOL_BYTES
    is_alive = True
    inode = 1
    path = Path("/dev/null")

    def __init__(self) -> None:
        self.seals: dict[int, bytes] = {}

    def read(self, offset: int, length: int) -> bytes:
        return self.seals.get(offset, bytes(length))

    def close(self) -> None:
        pass


@dataclass
class StubServer:
    """The model of a server: which objects it holds, by the chain of their tokens.

    Attributes:
        chunk_tokens: its `--chunk-size`.
        keeps: False answers every lookup with nothing and grants every slot, without looking at any token.
        delay: rounds of work before a call is answered; 1 is the next one.
        calls: every call since the last `forget`, when `notes` is set.
    """

    chunk_tokens: int = 256
    keeps: bool = False
    delay: int = 1
    notes: bool = False
    calls: list[StubCall] = field(default_factory=list)
    pool: StubPool = field(default_factory=StubPool)
    _round: int = 0
    _waiting: deque[StubCall] = field(default_factory=deque)
    _found: dict[str, int] = field(default_factory=dict)
    _objects: dict[bytes, int] = field(default_factory=dict)
    _reserved: dict[bytes, list[bytes]] = field(default_factory=dict)
    _object_bytes: int = 0
    _next_offset: int = 0

    def client(self) -> StubClient:
        return StubClient(self)

    def take(self, name: str, arguments: tuple[Any, ...]) -> StubFuture:
        call = StubCall(name, arguments, StubFuture(), self._round + self.delay)
        if self.notes:
            self.calls.append(call)
        if name in _AT_ONCE:
            self._answer(call)
        else:
            self._waiting.append(call)
        return call.future

    def work(self) -> None:
        """One round: answer what is due."""
        self._round += 1
        while self._waiting and self._waiting[0].ready_at <= self._round:
            self._answer(self._waiting.popleft())

    def forget(self) -> None:
        self.calls.clear()

    def _answer(self, call: StubCall) -> None:
        handler = getattr(self, f"_{call.name}", None)
        call.future.value = None if handler is None else handler(*call.arguments)

    # --- what it answers; anything else is answered with None -------------------------------------------------------

    def _get_chunk_size(self) -> int:
        return self.chunk_tokens

    def _get_experimental(self) -> list[str]:
        return []

    def _ping(self, instance: int | None) -> bool:
        return True

    def _register_kv_cache_engine_driven_context(self, payload: Any) -> RegisterEngineDrivenContextResponse:
        return RegisterEngineDrivenContextResponse("stub", _POOL_BYTES)

    def _lookup(self, key: IPCCacheServerKey, tp_size: int) -> None:
        found = 0
        for name in self._names(key, 0) if self.keeps else ():
            if name not in self._objects:
                break
            found += 1
        self._found[key.request_id] = found

    def _query_prefetch_status(self, session: str) -> int:
        return self._found.get(session, 0)

    def _store(self, key: IPCCacheServerKey, instance: int, blocks: Any, event: bytes) -> tuple[bytes, bool]:
        if self.keeps:
            self._objects.update(dict.fromkeys(self._names(key, key.start), 0))
        return event, True

    def _retrieve(
        self, key: IPCCacheServerKey, instance: int, blocks: Any, event: bytes, skipped: int = 0
    ) -> tuple[bytes, bool]:
        return event, True

    def _prepare_store(self, key: IPCCacheServerKey, instance: int) -> PrepareStoreResponse:
        names = list(self._names(key, key.start)) if self.keeps else [b""] * self._chunks(key)
        granted = [index for index, name in enumerate(names) if name not in self._objects]
        slots = [self._slot(self._take_offset()) for _ in granted]
        if self.keeps:
            for index, slot in zip(granted, slots, strict=True):
                self._objects[names[index]] = slot["offset"]
        return PrepareStoreResponse({"slots": slots, "chunk_indices": granted})

    def _commit_store(self, key: IPCCacheServerKey, instance: int, data: bytes) -> bool:
        return True

    def _prepare_retrieve(self, key: IPCCacheServerKey, instance: int) -> PrepareRetrieveResponse:
        slots = [self._slot(self._objects[name]) for name in self._names(key, key.start)]
        return PrepareRetrieveResponse(True, context={"slots": slots})

    def _commit_retrieve(self, key: IPCCacheServerKey, instance: int) -> bool:
        return True

    # --- objects ----------------------------------------------------------------------------------------------------

    def _chunks(self, key: IPCCacheServerKey) -> int:
        return int(key.end - key.start) // self.chunk_tokens

    def _take_offset(self) -> int:
        self._next_offset += self._object_bytes
        return self._next_offset - self._object_bytes

    def _slot(self, offset: int) -> dict[str, Any]:
        """As the server describes it."""
        shape = [1, 1, self._object_bytes // 4096, 4096]
        return {"offset": offset, "length": self._object_bytes, "shape": shape, "dtype": "uint8"}

    def _names(self, key: IPCCacheServerKey, start: int) -> Iterator[bytes]:
        """Names of the objects of the tokens [start, end): the hash of the chain up to each."""
        decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(key), type=IPCCacheServerKey)
        chain = f"{key.model_name}@{key.cache_salt}".encode()
        for first in range(0, key.end, self.chunk_tokens):
            part = decoded.token_ids[first : first + self.chunk_tokens]
            chain = hashlib.blake2b(chain + msgspec.msgpack.encode(part), digest_size=16).digest()
            if first >= start:
                yield chain

    def connection(self, target: Target) -> Connection:
        """As `wire.connecting.connect` makes it."""
        self._object_bytes = target.object_bytes
        return Connection(cast(Any, self.client()), 7, "stub", cast(PoolView, self.pool), self.chunk_tokens)


class StubMaker(Maker):
    """Connects the wire layer to a stub server at once."""

    def __init__(self, server: StubServer) -> None:
        super().__init__()
        self._server = server
        self._target: Target | None = None

    def make(self, target: Target) -> None:
        self._target = target

    def result(self) -> Connection | None:
        target, self._target = self._target, None
        return None if target is None else self._server.connection(target)

    def close(self, connection: Connection) -> None:
        pass

    def stop(self, deadline_s: float) -> None:
        pass
