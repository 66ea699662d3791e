"""A real engine and a real server on which faults are tried, one after the other: each leaves both as it found them."""

from __future__ import annotations

import enum
import threading
import time
from dataclasses import dataclass

from lmcache_mp_safe.testing.engine import Answer, Engine
from lmcache_mp_safe.testing.leftovers import Inventory, inventory, leftovers, server_inventory, settled
from lmcache_mp_safe.testing.moments import Moment, at
from lmcache_mp_safe.testing.oracle import Tokens, compare, sessions
from lmcache_mp_safe.testing.server import LMCacheServer

MAX_TOKENS = 8
NOTHING = Inventory()
_HICCUP_S = 0.5
# Short, so that a fault is soon over; not so short that a busy machine looks like one.
DEADLINES = {"lmcache.mp.mq_timeout": 3, "lmcache.mp.heartbeat_interval": 1, "lmcache.mp.safe.lookup_timeout_s": 2}


class ServerFault(enum.StrEnum):
    """What may happen to a server."""

    KILLED = "killed, and back under the same name"
    REPLACED = "killed, and back under another name"
    FROZEN = "frozen past every deadline"
    HICCUP = "frozen for a moment"

    def strike(self, server: LMCacheServer) -> None:
        match self:
            case ServerFault.KILLED | ServerFault.REPLACED:
                server.kill()
            case ServerFault.FROZEN:
                server.pause()
            case ServerFault.HICCUP:
                server.pause()
                threading.Timer(_HICCUP_S, server.resume).start()

    def recover(self, server: LMCacheServer) -> None:
        match self:
            case ServerFault.KILLED:
                server.start()
            case ServerFault.REPLACED:
                server.rename()
                server.start()
            case ServerFault.FROZEN:
                server.resume()


def prompt_of(seed: int, system_tokens: int = 1300) -> Tokens:
    (session,) = sessions(seed, count=1, turns=1, system_tokens=system_tokens)
    return session.prompt([])


@dataclass
class Stand:
    """What a fault is tried on.

    Attributes:
        reference: what recomputing answers to the prompt.
        before: what the engine held after its first hit, when everything that is made once was made.
    """

    engine: Engine
    server: LMCacheServer
    prompt: Tokens
    reference: Answer
    before: Inventory

    def ask(self, salt: str) -> Answer:
        """The prompt, with nothing in vLLM's own cache. An answer that is not the recompute's is a failure."""
        self.engine.drain(30)
        self.engine.reset_prefix_cache()
        (answer,) = self.engine.generate([self.prompt], MAX_TOKENS, salts=[salt])
        assert compare(self.reference, answer) is None
        self.engine.drain(30)
        return answer

    def ask_until_hit(self, salt: str, attempts: int = 4) -> Answer:
        """Doubt is a miss, and a busy machine makes doubts: but they end."""
        for _ in range(attempts):
            answer = self.ask(salt)
            if answer.external_tokens:
                return answer
        raise AssertionError(f"no hit in {attempts} attempts; {dict(self.engine.connector.scheduler_half.counters)}")

    def wait_until_up(self, deadline_s: float = 60.0) -> None:
        half = self.engine.connector.scheduler_half
        end = time.monotonic() + deadline_s
        while not half.wire.up:
            assert time.monotonic() < end, f"not up again: {half.wire.why_down}"
            half._advance(time.monotonic())
            time.sleep(0.05)

    def survive(self, moment: Moment, fault: ServerFault, salt: str) -> None:
        """The fault strikes at this moment of a request, and the server comes back: hits are lost, and nothing else."""
        if moment.is_of_a_hit:
            self.ask(salt)
        with at(self.engine, moment, lambda: fault.strike(self.server)) as seen:
            self.ask(salt)
        assert seen.happened, "the request did not come by"
        fault.recover(self.server)
        self.wait_until_up()
        self.ask_until_hit(salt)
        self.check_nothing_is_left()

    def check_nothing_is_left(self, of_the_dead: Inventory = NOTHING) -> None:
        """`of_the_dead`: what only another engine could have ended on the server, and did not."""
        found = leftovers(self.engine, self.before)
        assert found == {}, f"left in the engine: {found}"
        left = settled(lambda: server_inventory(self.server), of_the_dead, 20.0)
        assert left == {}, f"left on the server: {left}"
        assert self.engine.connector.scheduler_half.counters["internal_errors"] == 0

    @classmethod
    def of(cls, engine: Engine, server: LMCacheServer, prompt: Tokens) -> Stand:
        """Warm: the prompt was recomputed, stored and hit."""
        (reference,) = engine.generate([prompt], MAX_TOKENS, salts=["stand-reference"])
        stand = cls(engine, server, prompt, reference, Inventory())
        stand.ask("stand")
        stand.ask_until_hit("stand")
        stand.before = inventory(engine)
        return stand
