"""When a lookup begins and how it ends, for the metrics. Pure: read off two records and the event between them.

A lookup is open from the first question until it is promised and admitted, or not. Each ends exactly once: as a hit, or
as a miss with one reason.
"""

from __future__ import annotations

from dataclasses import dataclass

from lmcache_mp_safe.metrics.counts import Count, Miss
from lmcache_mp_safe.scheduler.machine import RequestRecord
from lmcache_mp_safe.scheduler.phases import (
    Admitted,
    AdmittedOtherwise,
    AdmittedWithoutLoad,
    Event,
    Expired,
    Finished,
    Phase,
    Polled,
)

_OPEN = frozenset({Phase.LOOKING_UP, Phase.PROBING, Phase.HOLDING, Phase.PROMISED})
_ENDS: dict[type[Event], Count | Miss] = {
    Admitted: Count.HITS,
    AdmittedOtherwise: Miss.OTHER_NUMBER,
    AdmittedWithoutLoad: Miss.NOT_TAKEN,
    Expired: Miss.EXPIRED,
    Finished: Miss.ENDED,
}


@dataclass(frozen=True)
class Verdict:
    """`begun`: the event began a lookup. `end`: how one ended, if one did."""

    begun: bool
    end: Count | Miss | None


def verdict(before: RequestRecord, event: Event, after: RequestRecord) -> Verdict:
    """What the event meant for the request's lookup. Both may be true at once: a lookup that starts over."""
    was_open, is_open = before.phase in _OPEN, after.phase in _OPEN
    asked = isinstance(event, Polled)
    if asked and before.phase is Phase.PROMISED and is_open and after.phase is not Phase.PROMISED:
        return Verdict(begun=True, end=Miss.LOCAL_CHANGED)
    begun = asked and before.phase in (Phase.NEW, Phase.COMPUTING)
    ended = (was_open or begun) and not is_open
    if not ended:
        return Verdict(begun, None)
    return Verdict(begun, after.miss if after.phase is Phase.MISSED else _ENDS[type(event)])
