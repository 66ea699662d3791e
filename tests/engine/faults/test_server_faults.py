"""The server is killed, frozen or replaced at every moment of a request: hits are lost, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest

from lmcache_mp_safe.testing.moments import Moment
from lmcache_mp_safe.testing.stand import ServerFault, Stand

pytestmark = pytest.mark.engine

# A share that every run has, and one for older versions of vLLM, whose failed loads go another way.
SHARE = {
    (Moment.COMMIT, ServerFault.FROZEN),
    (Moment.HOLD, ServerFault.REPLACED),
    (Moment.LOAD, ServerFault.KILLED),
}
OLD = {(Moment.COMMIT, ServerFault.FROZEN), (Moment.LOAD, ServerFault.KILLED)}


def case(moment: Moment, fault: ServerFault) -> Any:
    marks = [] if (moment, fault) in SHARE else [pytest.mark.faults]
    marks += [pytest.mark.old_vllm] if (moment, fault) in OLD else []
    return pytest.param(moment, fault, id=f"{moment}-{fault.name.lower()}", marks=marks)


@pytest.mark.parametrize(("moment", "fault"), [case(moment, fault) for moment in Moment for fault in ServerFault])
def test_server_fails(stand: Stand, salt: str, moment: Moment, fault: ServerFault) -> None:
    stand.survive(moment, fault, salt)
