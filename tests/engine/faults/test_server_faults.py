"""The server is killed, frozen or replaced at every moment of a request: hits are lost, and nothing else."""

from __future__ import annotations

import enum
import threading

import pytest

from lmcache_mp_safe.testing.moments import Moment, at
from lmcache_mp_safe.testing.server import LMCacheServer
from lmcache_mp_safe.testing.stand import Stand

# A reservation whose commit a frozen server never took stays on it until the server's own time for writes is over, and
# its range cannot be stored meanwhile: cases with `frozen` may fail by that. To be mended before CI runs these.
pytestmark = [pytest.mark.engine, pytest.mark.faults]


class Fault(enum.StrEnum):
    KILLED = "killed, and back under the same name"
    REPLACED = "killed, and back under another name"
    FROZEN = "frozen past every deadline"
    HICCUP = "frozen for a moment"


HICCUP_S = 0.5


def strike(server: LMCacheServer, fault: Fault) -> None:
    match fault:
        case Fault.KILLED | Fault.REPLACED:
            server.kill()
        case Fault.FROZEN:
            server.pause()
        case Fault.HICCUP:
            server.pause()
            threading.Timer(HICCUP_S, server.resume).start()


def recover(server: LMCacheServer, fault: Fault) -> None:
    match fault:
        case Fault.KILLED:
            server.start()
        case Fault.REPLACED:
            server.rename()
            server.start()
        case Fault.FROZEN:
            server.resume()


CASES = [pytest.param(moment, fault, id=f"{moment}-{fault.name.lower()}") for moment in Moment for fault in Fault]


@pytest.mark.parametrize(("moment", "fault"), CASES)
def test_server_fails(stand: Stand, salt: str, moment: Moment, fault: Fault) -> None:
    if moment.is_of_a_hit:
        stand.ask(salt)
    with at(stand.engine, moment, lambda: strike(stand.server, fault)) as seen:
        stand.ask(salt)
    assert seen.happened, "the request did not come by"
    recover(stand.server, fault)
    stand.wait_until_up()
    stand.ask_until_hit(salt)
    stand.check_nothing_is_left()
