"""What stands in for LMCache's client in front of a model of the server."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from lmcache_mp_safe.testing.fake_server.server import Reply
from lmcache_mp_safe.testing.received import as_received

_PENDING = object()


@dataclass(eq=False)
class Call:
    """One call, and the future that LMCache's client would have returned for it."""

    operation: str
    arguments: tuple[Any, ...]
    _value: Any = field(default=_PENDING, repr=False)

    def query(self) -> bool:
        return self._value is not _PENDING

    def wait(self, timeout: float | None = None) -> bool:
        return self.query()

    def result(self, timeout: float | None = None) -> Any:
        """
        Raises:
            Exception: the call was answered with it.
            TimeoutError: there is no answer.
        """
        if isinstance(self._value, Exception):
            raise self._value
        if not self.query():
            raise TimeoutError(self.operation)
        return self._value

    def answer(self, value: Any) -> None:
        """The first answer counts; a client drops later ones."""
        if not self.query():
            self._value = value


Transport = Callable[[Call], None]
"""Carries a call to a server, now or some time, and its answer back, once, twice or never."""


class Server(Protocol):
    def handle(self, operation: str, arguments: Any) -> Reply | None: ...


def reply_to(call: Call, server: Server) -> Reply | None:
    """Have the server carry out the call; its reply is not delivered yet."""
    return server.handle(call.operation, tuple(map(as_received, call.arguments)))


def carry(call: Call, server: Server) -> None:
    """Have the server carry out the call, and answer it if the server does."""
    reply = reply_to(call, server)
    if reply is not None:
        call.answer(reply.value)


def at_once(server: Server) -> Transport:
    """A transport without delay."""
    return lambda call: carry(call, server)


class HeldCalls:
    """A transport that keeps every call until a test answers it, or has a server do so."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def __call__(self, call: Call) -> None:
        self.calls.append(call)

    @property
    def open(self) -> list[Call]:
        return [call for call in self.calls if not call.query()]

    def sent(self, operation: str) -> list[Call]:
        """Every call of this operation, in order."""
        return [call for call in self.calls if call.operation == operation]

    def waiting(self, operation: str) -> Call:
        """The only unanswered call of this operation."""
        (call,) = [call for call in self.open if call.operation == operation]
        return call


class FakeClient:
    """LMCache's `RequestClient`, as far as this package uses it."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.closed = False

    def close(self) -> None:
        self.closed = True

    def _call(self, operation: str, *arguments: Any) -> Call:
        assert not self.closed, f"{operation} on a closed client"
        call = Call(operation, arguments)
        self.transport(call)
        return call

    def ping(self, instance_id: int | None) -> Call:
        return self._call("ping", instance_id)

    def get_chunk_size(self) -> Call:
        return self._call("get_chunk_size")

    def register_kv_cache_engine_driven_context(self, payload: Any) -> Call:
        return self._call("register_kv_cache_engine_driven_context", payload)

    def unregister_kv_cache_engine_driven_context(self, instance_id: int) -> Call:
        return self._call("unregister_kv_cache_engine_driven_context", instance_id)

    def lookup(self, key: Any, tp_size: int) -> Call:
        return self._call("lookup", key, tp_size)

    def query_prefetch_status(self, request_id: str) -> Call:
        return self._call("query_prefetch_status", request_id)

    def wait_prefetch_status(self, request_id: str, timeout: float) -> Call:
        return self._call("wait_prefetch_status", request_id, timeout)

    def free_lookup_locks(self, key: Any, tp_size: int) -> Call:
        return self._call("free_lookup_locks", key, tp_size)

    def end_session(self, request_id: str) -> Call:
        return self._call("end_session", request_id)

    def prepare_store(self, key: Any, instance_id: int) -> Call:
        return self._call("prepare_store", key, instance_id)

    def commit_store(self, key: Any, instance_id: int, data: bytes) -> Call:
        return self._call("commit_store", key, instance_id, data)

    def prepare_retrieve(self, key: Any, instance_id: int) -> Call:
        return self._call("prepare_retrieve", key, instance_id)

    def commit_retrieve(self, key: Any, instance_id: int) -> Call:
        return self._call("commit_retrieve", key, instance_id)

    def clear(self, force: bool = False) -> Call:
        return self._call("clear", force)
