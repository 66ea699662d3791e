"""Faults, each a line of a trace: `fault KIND name=value ...`.

`calm` ends those that last. Every fault is one that the real world has: the server's process stands still, dies, comes
back with an empty pool, evicts, is cleared by force; its pool is full; answers are lost, late, doubled, out of order;
memory is damaged; a rank's copies are slow; vLLM finds no free block; time passes while nothing happens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from random import Random
from typing import TYPE_CHECKING

import msgspec
from vllm.v1.core.kv_cache_utils import KVCacheBlock

from lmcache_mp_safe.testing.fake_server.objects import Layout, ObjectName
from lmcache_mp_safe.testing.sim.network import CALM, Weather
from lmcache_mp_safe.testing.sim.trace import CommandError

if TYPE_CHECKING:
    from lmcache_mp_safe.testing.sim.world import World

Values = Mapping[str, str]


class Faults:
    """Carries faults out in one world, and ends them."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.squeezed: list[KVCacheBlock] = []
        self._foreign: list[ObjectName] = []
        self._kinds: dict[str, Callable[[Values, Random], str]] = {
            "weather": self._weather,
            "freeze": self._freeze,
            "die": self._die,
            "restart": self._restart,
            "evict": self._evict,
            "clear": self._clear,
            "fill": self._fill,
            "flip": self._flip,
            "slow": self._slow,
            "squeeze": self._squeeze,
            "release": self._release,
            "time": self._time,
            "forget": self._forget,
            "reset": self._reset,
        }

    def do(self, kind: str, values: Values, random: Random) -> str:
        """
        Returns:
            What came of it.

        Raises:
            CommandError: there is no such fault.
        """
        if kind not in self._kinds:
            raise CommandError(f"no fault {kind!r}: one of {', '.join(self._kinds)}")
        self._world.counts[f"fault: {kind}"] += 1
        return self._kinds[kind](values, random)

    def calm(self) -> None:
        """End every fault that lasts. What died does not come back as it was: somebody starts another server."""
        network = self._world.network
        network.weather = CALM
        network.frozen = False
        if network.dead:
            self._restart({}, Random(0))
        for rank in self._world.engine.ranks:
            rank.slow = False
        self._release({}, Random(0))
        self._empty()

    # --- the network and the server ---------------------------------------------------------------------------------

    def _weather(self, values: Values, random: Random) -> str:
        self._world.network.weather = msgspec.convert(dict(values), Weather, strict=False)
        return ""

    def _freeze(self, values: Values, random: Random) -> str:
        network = self._world.network
        network.frozen = values.get("on", "1") == "1"
        return f"{'stands still' if network.frozen else 'goes on'}"

    def _die(self, values: Values, random: Random) -> str:
        self._world.network.dead = True
        self._world.network.lose_what_waits()
        return "server is gone"

    def _restart(self, values: Values, random: Random) -> str:
        network = self._world.network
        network.lose_what_waits()  # it would leave lookups in the new process that nobody asks about
        network.dead = network.frozen = False
        self._foreign.clear()
        network.server.restart()
        return "server has an empty pool"

    def _evict(self, values: Values, random: Random) -> str:
        gone = self._world.network.server.evict(float(values.get("share", "0.5")))
        return f"{len(gone)} objects gone"

    def _clear(self, values: Values, random: Random) -> str:
        force = values.get("force", "1") == "1"
        before = len(self._world.network.server.objects.readable)
        self._world.network.server.clear(force)
        self._foreign.clear()
        return f"{before - len(self._world.network.server.objects.readable)} objects gone"

    def _fill(self, values: Values, random: Random) -> str:
        """Another model's objects take up room, with locks on them."""
        server = self._world.network.server
        layout = Layout(4096, (1, 4096), "uint8")
        taken = 0
        for _ in range(int(values.get("objects", "32"))):
            name = ObjectName(random.randbytes(16), "foreign", 1, 0, "")
            if not server.objects.reserve([name], layout):
                break
            server.objects.publish([name])
            server.objects.lock([name], 1)
            self._foreign.append(name)
            taken += 1
        return f"{taken} foreign objects"

    def _empty(self) -> None:
        objects = self._world.network.server.objects
        objects.delete([name for name in self._foreign if name in objects.readable], force=True)
        self._foreign.clear()

    def _flip(self, values: Values, random: Random) -> str:
        """A bit changes in each of so many objects."""
        memory = self._world.memory
        stored = list(self._world.network.server.objects.readable.values())
        chosen = random.sample(stored, min(len(stored), int(values.get("objects", "1"))))
        for one in chosen:
            offset = one.offset + random.randrange(256)
            (byte,) = memory.read(offset, 1)
            memory.write(offset, bytes([byte ^ (1 << random.randrange(8))]))
        return f"{len(chosen)} objects are damaged"

    # --- the engine -------------------------------------------------------------------------------------------------

    def _slow(self, values: Values, random: Random) -> str:
        ranks = self._world.engine.ranks
        rank = ranks[int(values.get("rank", "0")) % len(ranks)]
        rank.slow = values.get("on", "1") == "1"
        return f"rank {rank.number} {'is slow' if rank.slow else 'is back'}"

    def _squeeze(self, values: Values, random: Random) -> str:
        """Free blocks are taken, so that allocations fail."""
        pool = self._world.engine.pool
        count = min(int(values.get("blocks", "8")), pool.get_num_free_blocks())
        self.squeezed += pool.get_new_blocks(count)
        return f"{count} blocks taken"

    def _release(self, values: Values, random: Random) -> str:
        self._world.engine.pool.free_blocks(self.squeezed)
        count, self.squeezed = len(self.squeezed), []
        return f"{count} blocks back"

    def _forget(self, values: Values, random: Random) -> str:
        """vLLM drops what nobody uses from its prefix cache, as other requests would make it do."""
        pool = self._world.engine.pool
        unused = {block.block_id for block in pool.blocks if not block.ref_cnt and block.block_hash is not None}
        pool.evict_blocks(unused)
        return f"{len(unused)} blocks"

    def _time(self, values: Values, random: Random) -> str:
        self._world.now += float(values.get("s", "30"))
        return ""

    def _reset(self, values: Values, random: Random) -> str:
        """The cache is reset; with an idle engine because the model has other weights from now on."""
        return self._world.reset_cache()
