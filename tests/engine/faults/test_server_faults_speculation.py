"""As `test_server_faults.py`, with drafts that are rejected: states move between the steps."""

from __future__ import annotations

import pytest

from lmcache_mp_safe.testing.moments import Moment
from lmcache_mp_safe.testing.stand import ServerFault, Stand

pytestmark = [pytest.mark.engine, pytest.mark.faults]

SPECULATION = "mtp"


@pytest.mark.parametrize("fault", [ServerFault.KILLED, ServerFault.FROZEN], ids=lambda fault: fault.name.lower())
@pytest.mark.parametrize("moment", [Moment.COPY, Moment.COMMIT, Moment.LOAD])
def test_server_fails_under_speculation(stand: Stand, salt: str, moment: Moment, fault: ServerFault) -> None:
    stand.survive(moment, fault, salt)
