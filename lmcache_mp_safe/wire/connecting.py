"""Getting to a server, from nothing to a proven pool. Runs on a thread of its own, because every step may block.

register -> map the pool -> have the server write a nonce into it and read that back -> ready
"""

from __future__ import annotations

import pickle
import queue
import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lmcache.v1.multiprocess.transport.factory import RequestClientFactory

from lmcache_mp_safe.errors import SafeError, Scope, ServerError
from lmcache_mp_safe.wire.keys import object_key, registration
from lmcache_mp_safe.wire.pool import PoolView
from lmcache_mp_safe.wire.replies import found_objects, retrieved_offsets
from lmcache_mp_safe.wire.tokens import bits_per_int, synthetic_tokens

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


def connect(target: Target, create: Callable[[str], Any] = RequestClientFactory.create) -> Connection:
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
    bits_per_int(server_chunk)
    instance = new_instance()
    silent = f"the LMCache server does not take engine-driven registrations; start it with {NEEDED_FLAGS}"
    registered = _answer(
        client.register_kv_cache_engine_driven_context(registration(instance, target.namespace, target.object_bytes)),
        target.step_s,
        silent,
    )
    if not registered.shm_name or registered.pool_size <= 0:
        raise ServerError(f"the LMCache server shares no memory; start it with {NEEDED_FLAGS}", scope=Scope.SERVER)
    if registered.pool_size < target.object_bytes:
        raise ServerError(
            f"the server's pool of {registered.pool_size} bytes cannot hold one object of {target.object_bytes};"
            " raise its --l1-size-gb",
            scope=Scope.SERVER,
        )
    pool = PoolView(registered.shm_name, registered.pool_size)
    try:
        _prove(client, target, pool, server_chunk)
    except BaseException:
        pool.close()
        raise
    return Connection(client, instance, registered.shm_name, pool, server_chunk)


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

    ask(client.register_kv_cache_engine_driven_context(registration(instance, namespace, _PROBE_BYTES)))
    if not ask(client.commit_store(key, instance, pickle.dumps([tensor]))):
        raise ServerError("the LMCache server could not store a probe; is its pool full?", scope=Scope.SERVER)
    ask(client.lookup(key, 1))
    if found_objects(ask(client.wait_prefetch_status(session, target.step_s / 2)), 1) != 1:
        raise ServerError("the LMCache server does not find what it just stored", scope=Scope.SERVER)
    answer = ask(client.prepare_retrieve(key, instance))
    (offset,) = retrieved_offsets(answer.context if answer.success else {}, 1, _PROBE_BYTES, pool.size)
    same = pool.read(offset, _PROBE_BYTES) == nonce
    ask(client.commit_retrieve(key, instance))
    ask(client.end_session(session))
    ask(client.unregister_kv_cache_engine_driven_context(instance))
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
    """Makes and closes clients on a thread of its own: both may block, a hook must not.

    LMCache's client thread is shared by every client of the process and blocks when too much is queued to a stopped
    server, so even `close` may hang; the thread is a daemon and nobody waits for it without a deadline.
    """

    def __init__(self, create: Callable[[str], Any] = RequestClientFactory.create) -> None:
        self._create = create
        self._work: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._results: queue.Queue[Connection | ServerError] = queue.Queue()
        self._thread: threading.Thread | None = None

    def make(self, target: Target) -> None:
        """Start connecting; `result` has the outcome some time later."""
        self._submit(lambda: self._make(target))

    def close(self, connection: Connection) -> None:
        """Close a client and unmap its pool."""

        def closing() -> None:
            connection.client.close()
            connection.pool.close()

        self._submit(closing)

    def result(self) -> Connection | ServerError | None:
        """The outcome of a `make`, once."""
        try:
            return self._results.get_nowait()
        except queue.Empty:
            return None

    def stop(self, deadline_s: float) -> None:
        """Finish what was submitted, at most this long."""
        if self._thread is not None:
            self._work.put(None)
            self._thread.join(deadline_s)
            self._thread = None

    def _submit(self, work: Callable[[], None]) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="lmcache-mp-safe-connect", daemon=True)
            self._thread.start()
        self._work.put(work)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()

    def _make(self, target: Target) -> None:
        try:
            self._results.put(connect(target, self._create))
        except SafeError as error:
            self._results.put(ServerError(str(error), scope=Scope.SERVER))
        except Exception as error:
            self._results.put(ServerError(f"cannot connect to {target.url}: {error}", scope=Scope.SERVER))
