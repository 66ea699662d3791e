"""The check for leftovers notices one leak of every kind, and is silent without one."""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import zmq

from lmcache_mp_safe.geometry.payload import ObjectLayout
from lmcache_mp_safe.testing.leftovers import (
    Inventory,
    anonymous_bytes,
    inventory,
    leftovers,
    process_inventory,
    server_inventory,
    settled,
)
from lmcache_mp_safe.testing.pools import pool_file
from lmcache_mp_safe.wire import Held


@contextlib.contextmanager
def descriptor() -> Iterator[None]:
    with socket.socket():
        yield


@contextlib.contextmanager
def mapping_of_a_pool() -> Iterator[None]:
    with pool_file(4096, ObjectLayout.for_payload([100])) as segment:
        file = os.open(f"/dev/shm/{segment.name}", os.O_RDONLY)
        mapped = mmap.mmap(file, 4096, prot=mmap.PROT_READ)
        os.close(file)
    with mapped:
        yield


@contextlib.contextmanager
def python_thread() -> Iterator[None]:
    end = threading.Event()
    thread = threading.Thread(target=end.wait, name="client-17")
    thread.start()
    yield
    end.set()
    thread.join()


@contextlib.contextmanager
def thread_of_a_library() -> Iterator[None]:
    with zmq.Context() as context, context.socket(zmq.DEALER):
        yield


PROCESS_LEAKS: dict[str, tuple[Callable[[], contextlib.AbstractContextManager[None]], str]] = {
    "descriptor": (descriptor, "descriptor: socket:[N]"),
    "mapping of a pool that is gone": (mapping_of_a_pool, "mapping: /dev/shm/... (deleted)"),
    "thread of Python": (python_thread, "thread: client-N"),
    "thread of a library": (thread_of_a_library, "task: ZMQbg/IO/N"),
}


@pytest.mark.parametrize("leak", PROCESS_LEAKS)
def test_leak_of_a_process_is_named_and_its_end_seen(leak: str) -> None:
    make, name = PROCESS_LEAKS[leak]
    before = process_inventory()
    with make():
        end = time.monotonic() + 5  # a thread gives itself its name once it runs
        while (process_inventory() - before)[name] != 1:
            assert time.monotonic() < end, process_inventory() - before
            time.sleep(0.01)
    assert settled(process_inventory, before, 5.0) == {}


@pytest.mark.parametrize("again", ["thread", "descriptor"])
def test_second_one_of_a_kind_is_a_leak_too(again: str) -> None:
    make = python_thread if again == "thread" else descriptor
    with make():
        before = process_inventory()
        with make():
            assert process_inventory() - before


class QuietEngine:
    """What the inventory asks of an engine, with nothing held."""

    def __init__(self, blocks: int = 0, pins: int = 0, running: int = 0, **held: int) -> None:
        self._blocks = blocks
        owned = {"sessions": 0, "locks": 0, "retrieves": 0, "unanswered": 0} | held
        half = SimpleNamespace(pinned_blocks=pins, wire=SimpleNamespace(held=lambda: Held(**owned)))
        self.connector = SimpleNamespace(scheduler_half=half)
        self.worker_connector = SimpleNamespace(worker_half=SimpleNamespace(jobs_left=running))

    def held_blocks(self) -> int:
        return self._blocks

    def step(self) -> None:
        pass


@pytest.mark.parametrize("kind", ["blocks", "pins", "running", "sessions", "locks", "retrieves", "unanswered"])
def test_leak_of_an_engine_is_named(kind: str) -> None:
    quiet: Any = QuietEngine()
    leaking: Any = QuietEngine(**{kind: 2})
    before = inventory(quiet)
    assert leftovers(quiet, before, 0.0) == {}
    ((name, count),) = leftovers(leaking, before, 0.0).items()
    assert kind in name or kind == "running"
    assert count == 2


@pytest.mark.parametrize("kind", ["read_locked_count", "write_locked_count", "staging_object_count", "active_sessions"])
def test_leak_on_the_server_is_named(kind: str) -> None:
    pool = dict.fromkeys(["read_locked_count", "write_locked_count", "staging_object_count", "temporary_count"], 0)
    status = {"active_sessions": 0, "active_prefetch_jobs": 0, "storage_manager": {"l1_manager": pool}}
    server: Any = SimpleNamespace(status=lambda: status)
    assert server_inventory(server) == {}
    (pool if kind in pool else status)[kind] = 3  # type: ignore[index]
    assert server_inventory(server) == {f"server: {kind}": 3}


def test_what_goes_away_in_time_is_not_left_over() -> None:
    looks = iter([Inventory(a=2), Inventory(a=1)])
    assert settled(lambda: next(looks), Inventory(a=1), 5.0) == {}


def test_own_memory_of_a_process_grows_with_what_it_holds() -> None:
    before = anonymous_bytes(os.getpid())
    held = bytearray(os.urandom(64 << 20))
    assert anonymous_bytes(os.getpid()) - before > 60 << 20
    assert len(held) == 64 << 20
