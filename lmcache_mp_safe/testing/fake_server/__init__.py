"""The stock LMCache server as a model: deterministic, without threads, sockets or a clock of its own.

It answers at the level of LMCache's `RequestClient` operations, as the source of LMCache 0.5.6 does with its default
flags, shared memory and no L2. `testing/conformance` holds it to the real server, behaviour by behaviour.

 client.py      what stands in for LMCache's client: calls, futures, and who carries them to the server
 server.py      the operations
 sessions.py    chunk hashes by position, and what a lookup found
 instances.py   who is registered with which layout, and who has been silent
 objects.py     objects: reserved, readable, locked; built on locks.py, room.py and recency.py
 memory.py      the pool, in /dev/shm
 connecting.py  a maker of connections to it, for `wire.Wire`
"""

from __future__ import annotations

from lmcache_mp_safe.testing.fake_server.client import Call, FakeClient, HeldCalls, at_once, carry, reply_to
from lmcache_mp_safe.testing.fake_server.connecting import FakeMaker
from lmcache_mp_safe.testing.fake_server.memory import Memory, SharedMemory
from lmcache_mp_safe.testing.fake_server.server import FakeServer, Reply

__all__ = [
    "Call",
    "FakeClient",
    "FakeMaker",
    "FakeServer",
    "HeldCalls",
    "Memory",
    "Reply",
    "SharedMemory",
    "at_once",
    "carry",
    "reply_to",
]
