"""The server's pool as the scheduler maps it: read-only, inside its bounds, and only where there is memory for it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from lmcache_mp_safe.errors import Scope, ServerError
from lmcache_mp_safe.geometry.payload import ObjectLayout
from lmcache_mp_safe.testing.pools import pool_file
from lmcache_mp_safe.wire.pool import PoolView

SIZE = 64 * 4096


@pytest.fixture
def segment() -> Iterator[Path]:
    with pool_file(SIZE, ObjectLayout.for_payload([100])) as made:
        yield Path("/dev/shm") / made.name


def test_what_is_written_there_is_read_and_nothing_outside(segment: Path) -> None:
    view = PoolView(segment.name, SIZE)
    with segment.open("r+b") as file:
        file.seek(4096)
        file.write(b"here")
    assert view.read(4096, 4) == b"here"
    for offset, length in ((-1, 4), (SIZE - 3, 4), (0, SIZE + 1), (0, -1)):
        with pytest.raises(ServerError, match="outside of the pool"):
            view.read(offset, length)
    view.close()


def test_pool_that_is_unlinked_is_not_alive(segment: Path) -> None:
    view = PoolView(segment.name, SIZE)
    assert view.is_alive
    segment.unlink()
    assert not view.is_alive
    view.close()
    assert not view.is_alive


def test_pool_that_is_not_there_names_what_has_to_be_shared() -> None:
    with pytest.raises(ServerError, match="must share /dev/shm and the user id") as error:
        PoolView("no-such-pool", SIZE)
    assert error.value.scope is Scope.SERVER


def test_pool_smaller_than_the_server_says_is_refused(segment: Path) -> None:
    with pytest.raises(ServerError, match="the server says"):
        PoolView(segment.name, SIZE + 4096)


def test_shared_memory_too_small_for_the_pool_is_refused_with_what_to_change(
    segment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The pool is sparse: nothing of it was written yet, so all of it has to find room.
    monkeypatch.setattr(os, "fstatvfs", lambda _: SimpleNamespace(f_bavail=SIZE // 4096 - 1, f_frsize=4096))
    with pytest.raises(ServerError, match=r"enlarge /dev/shm \(containers: --shm-size\) or lower") as error:
        PoolView(segment.name, SIZE)
    assert error.value.scope is Scope.SERVER
    monkeypatch.setattr(os, "fstatvfs", lambda _: SimpleNamespace(f_bavail=SIZE // 4096, f_frsize=4096))
    PoolView(segment.name, SIZE).close()
