"""Getting to a server, from nothing to a proven pool. Runs on a thread of its own, because every step may block.

register -> map the pool -> have the server write a nonce into it and read that back -> ready
"""

from __future__ import annotations

import contextlib
import pickle
import queue
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import zmq
from lmcache.v1.multiprocess.transport.factory import RequestClientFactory

from lmcache_mp_safe.errors import SafeError, Scope, ServerError
from lmcache_mp_safe.wire.keys import object_key, registration
from lmcache_mp_safe.wire.pool import PoolView
from lmcache_mp_safe.wire.replies import found_objects, pool_of, retrieved_offsets
from lmcache_mp_safe.wire.tokens import check_chunk, synthetic_tokens

NEEDED_FLAGS = "--shm-name NAME --no-l1-use-lazy --supported-transfer-mode auto"

_PROBE_BYTES = 4096


@dataclass(frozen=True)
class Target:
    """What to connect to. `step_s` bounds each step, in seconds."""

    url: str
    namespace: str
    object_bytes: int
    step_s: float


@dataclass(frozen=True)
class Connection:
    """A registered client and the proven pool."""

    client: Any
    instance: int
    shm_name: str
    pool: PoolView
    server_chunk: int


class OwnClient:
    """LMCache's client with a ZMQ context of its own.

    What is still queued for a dead server must not reach the next one at that address, which would keep its lookups as
    jobs for ever: with a linger of zero it goes with the client.
    """

    def __init__(self, url: str) -> None:
        self._context: Any = zmq.Context()  # type: ignore[attr-defined]
        self._context.linger = 0
        try:
            self._client = RequestClientFactory.create(url, context=self._context)
        except BaseException:
            self._context.term()
            raise

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def close(self) -> None:
        self._client.close()
        self._context.term()


def connect(target: Target, create: Callable[[str], Any] = OwnClient) -> Connection:
    """Go all the way.

    Raises:
        ServerError: with what is wrong and what to change.
    """
    client = create(target.url)
    try:
        return _connect(client, target)
    except BaseException:
        client.close()
        raise


def _connect(client: Any, target: Target) -> Connection:
    server_chunk = _answer(client.get_chunk_size(), target.step_s, f"no LMCache server answers at {target.url}")
    if type(server_chunk) is not int:
        raise ServerError(f"chunk size {server_chunk!r}", scope=Scope.SERVER)
    check_chunk(server_chunk)
    instance = new_instance()
    silent = f"the LMCache server does not take engine-driven registrations; start it with {NEEDED_FLAGS}"
    registered = _answer(
        client.register_kv_cache_engine_driven_context(registration(instance, target.namespace, target.object_bytes)),
        target.step_s,
        silent,
    )
    shm_name, pool_size = pool_of(registered)
    if not shm_name or pool_size == 0:
        raise ServerError(f"the LMCache server shares no memory; start it with {NEEDED_FLAGS}", scope=Scope.SERVER)
    if pool_size < target.object_bytes:
        raise ServerError(
            f"the server's pool of {pool_size} bytes cannot hold one object of {target.object_bytes};"
            " raise its --l1-size-gb",
            scope=Scope.SERVER,
        )
    pool = PoolView(shm_name, pool_size)
    try:
        _prove(client, target, pool, server_chunk)
    except BaseException:
        pool.close()
        raise
    return Connection(client, instance, shm_name, pool, server_chunk)


def new_instance() -> int:
    """A random instance id: one that is registered already would keep its old layout without a word."""
    return secrets.randbits(62)


def _prove(client: Any, target: Target, pool: PoolView, server_chunk: int) -> None:
    """Have the server write a nonce, and find it in our mapping where the server says it is.

    Raises:
        ServerError: the mapped segment is not the server's pool.
    """
    import torch  # the server's inline store takes pickled tensors

    instance, namespace = new_instance(), f"{target.namespace}-probe"
    session = f"probe-{secrets.token_hex(16)}"
    tokens = synthetic_tokens([secrets.token_bytes(32)], server_chunk)
    key = object_key(namespace, session, "", tokens, 0, server_chunk)
    nonce = secrets.token_bytes(_PROBE_BYTES)
    tensor = torch.frombuffer(bytearray(nonce), dtype=torch.uint8).reshape(1, 1, _PROBE_BYTES)

    def ask(future: Any) -> Any:
        return _answer(future, target.step_s, "the LMCache server stopped answering while its pool was checked")

    def leave() -> None:
        # One after the other: the server answers no end of a session whose instance is gone.
        ask(client.end_session(session))
        ask(client.unregister_kv_cache_engine_driven_context(instance))

    ask(client.register_kv_cache_engine_driven_context(registration(instance, namespace, _PROBE_BYTES)))
    try:
        if not ask(client.commit_store(key, instance, pickle.dumps([tensor]))):
            raise ServerError("the LMCache server could not store a probe; is its pool full?", scope=Scope.SERVER)
        ask(client.lookup(key, 1))
        if found_objects(ask(client.wait_prefetch_status(session, target.step_s / 2)), 1) != 1:
            # It says that it stored also when it had no room.
            raise ServerError(
                "the LMCache server does not find what it just stored: its pool is full, or all of it is locked",
                scope=Scope.SERVER,
            )
        answer = ask(client.prepare_retrieve(key, instance))
        (offset,) = retrieved_offsets(answer.context if answer.success else {}, 1, _PROBE_BYTES, pool.size)
        same = pool.read(offset, _PROBE_BYTES) == nonce
        ask(client.commit_retrieve(key, instance))
    except BaseException:
        # A server that is full is asked again and again: nothing of a proof may stay in it.
        with contextlib.suppress(ServerError):
            leave()
        raise
    leave()
    if not same:
        raise ServerError(
            f"{pool.path} is not the pool of the LMCache server at {target.url}: another server uses the same"
            " --shm-name, or vLLM sees another /dev/shm than the server",
            scope=Scope.SERVER,
        )


def _answer(future: Any, timeout_s: float, silence: str) -> Any:
    """The future's result.

    Raises:
        ServerError: with the text `silence` if there is none in time, or with what went wrong.
    """
    if not future.wait(timeout_s):
        raise ServerError(silence, scope=Scope.SERVER)
    try:
        return future.result(0)
    except Exception as error:
        raise ServerError(f"the LMCache server's answer is no answer: {error}", scope=Scope.SERVER) from error


class Maker:
    """Makes and closes clients on threads of their own: both may block, a hook must not.

    LMCache's client thread is shared by every client of the process and blocks when too much is queued to a stopped
    server, so even a close may hang: each has a thread, they are daemons, and nobody waits for one without a deadline.
    """

    def __init__(self, create: Callable[[str], Any] = OwnClient) -> None:
        self._create = create
        self._results: queue.Queue[Connection | ServerError] = queue.Queue()
        self._threads: list[threading.Thread] = []
        self._stopped = threading.Event()

    def make(self, target: Target) -> None:
        """Start connecting; `result` has the outcome some time later."""
        self._run(lambda: self._make(target))

    def close(self, connection: Connection) -> None:
        """Close a client and unmap its pool."""

        def closing() -> None:
            connection.client.close()
            connection.pool.close()

        self._run(closing)

    def result(self) -> Connection | ServerError | None:
        """The outcome of a `make`, once."""
        try:
            return self._results.get_nowait()
        except queue.Empty:
            return None

    def stop(self, deadline_s: float) -> None:
        """Take no more results, and wait at most this long for what is under way. A late connection closes itself."""
        self._stopped.set()
        end = time.monotonic() + deadline_s
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        with contextlib.suppress(queue.Empty):
            while True:
                late = self._results.get_nowait()
                if isinstance(late, Connection):
                    self.close(late)

    def _run(self, work: Callable[[], None]) -> None:
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        thread = threading.Thread(target=work, name="lmcache-mp-safe-connect", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _make(self, target: Target) -> None:
        try:
            made = connect(target, self._create)
        except SafeError as error:
            self._results.put(ServerError(str(error), scope=Scope.SERVER))
        except Exception as error:
            self._results.put(ServerError(f"cannot connect to {target.url}: {error}", scope=Scope.SERVER))
        else:
            if self._stopped.is_set():
                made.client.close()
                made.pool.close()
            else:
                self._results.put(made)
