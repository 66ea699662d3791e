"""The model of the server behind a real wire. What it does is held to the real server in `tests/conformance`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lmcache_mp_safe.testing.fake_server import FakeMaker, FakeServer, SharedMemory
from lmcache_mp_safe.testing.fake_server.room import Room
from lmcache_mp_safe.wire import Committed, Connected, LookupAnswered, Lost, Reserved, Retrieved, Wire, WireConfig

OBJECT = 8192
DIGESTS = [bytes([n]) * 32 for n in range(6)]


class World:
    def __init__(self, memory: SharedMemory) -> None:
        self.now = 0.0
        self.memory = memory
        self.server = FakeServer(lambda: self.now, memory, shm_name=memory.name)
        self.maker = FakeMaker(self.server)
        self.wire = Wire(WireConfig("tcp://nowhere", "ns", OBJECT), maker=self.maker)  # type: ignore[arg-type]
        self.wire.start(self.now)

    def poll(self, times: int = 4) -> list[object]:
        return [event for _ in range(times) for event in self.wire.poll(self.now)]


@pytest.fixture
def world() -> Iterator[World]:
    memory = SharedMemory(64 * OBJECT)
    yield World(memory)
    memory.close()


def test_a_wire_stores_finds_and_reads_through_it(world: World) -> None:
    assert isinstance(world.poll()[0], Connected)
    session = world.wire.open(DIGESTS)
    world.wire.reserve(session, 0, 4, world.now)
    (reserved,) = world.poll()
    assert isinstance(reserved, Reserved)
    assert sorted(reserved.offsets) == [0, 1, 2, 3]
    world.memory.write(reserved.offsets[2], b"third")
    world.wire.commit(session, reserved.call, world.now)
    (committed,) = world.poll()
    assert isinstance(committed, Committed)
    asked = world.wire.open(DIGESTS)
    world.wire.lookup(asked, 6, world.now)
    world.now += 0.01
    (found,) = world.poll()
    assert isinstance(found, LookupAnswered)
    assert found.found == 4
    world.wire.retrieve(asked, 1, 4, world.now)
    (retrieved,) = world.poll()
    assert isinstance(retrieved, Retrieved)
    assert world.memory.read(retrieved.offsets[1], 5) == b"third"
    world.wire.close_in_order([asked, session], world.now)
    world.poll()
    assert world.server.objects.locked(world.server.objects.readable) == []
    assert world.server.sessions == {}
    assert world.server.lookups == {}


def test_a_restart_is_a_new_epoch_for_a_wire(world: World) -> None:
    world.poll()
    world.server.restart()
    world.now += 20.0
    kinds = [type(event) for event in world.poll()]
    assert kinds == [Lost, Connected]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2), (0, 2, 1)])
def test_holes_become_one_again(order: tuple[int, ...]) -> None:
    room = Room(3 * 4096)
    offsets = room.take(4096, 3)
    assert offsets == [0, 4096, 8192]
    for piece in order:
        room.give_back(offsets[piece], 4096)
    assert room.take(3 * 4096, 1) == [0]
