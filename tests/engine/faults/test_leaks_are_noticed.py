"""The check for leftovers, on a real engine and a real server, with something left over on purpose."""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from lmcache_mp_safe.testing.leftovers import inventory, server_inventory
from lmcache_mp_safe.testing.stand import Stand

pytestmark = [pytest.mark.engine, pytest.mark.faults]


@contextmanager
def block(stand: Stand) -> Iterator[None]:
    pool = stand.engine.block_pool
    taken = pool.get_new_blocks(1)
    yield
    pool.free_blocks(taken)


@contextmanager
def lock(stand: Stand) -> Iterator[None]:
    """Read locks and a session, here and on the server."""
    half = stand.engine.connector.scheduler_half
    wire, digests = half.wire, [os.urandom(32)]
    session = wire.open(digests)
    wire.lookup(session, 1, time.monotonic())
    yield
    wire.close(session, time.monotonic())


@contextmanager
def mapping(stand: Stand) -> Iterator[None]:
    file = os.open(stand.server.segment_path, os.O_RDONLY)
    mapped = mmap.mmap(file, 0, prot=mmap.PROT_READ)
    os.close(file)
    with mapped:
        yield


@contextmanager
def descriptor(stand: Stand) -> Iterator[None]:
    file = os.open(stand.server.segment_path, os.O_RDONLY)
    yield
    os.close(file)


@contextmanager
def thread(stand: Stand) -> Iterator[None]:
    end = threading.Event()
    running = threading.Thread(target=end.wait, name="left over")
    running.start()
    yield
    end.set()
    running.join()


LEAKS: dict[str, Callable[[Stand], object]] = {
    "blocks": block,
    "wire: sessions": lock,
    "mapping: /dev/shm/...": mapping,
    "descriptor: /dev/shm/...": descriptor,
    "thread: left over": thread,
}


@pytest.mark.parametrize("name", LEAKS)
def test_leak_on_a_real_engine_is_noticed(stand: Stand, name: str) -> None:
    with LEAKS[name](stand):  # type: ignore[attr-defined]
        assert (inventory(stand.engine) - stand.before)[name] == 1
    stand.check_nothing_is_left()


def test_session_that_is_left_on_a_real_server_is_noticed(stand: Stand) -> None:
    with lock(stand):
        for _ in range(20):
            stand.engine.step()
            time.sleep(0.02)
        assert server_inventory(stand.server)["server: active_sessions"] == 1
    stand.check_nothing_is_left()
