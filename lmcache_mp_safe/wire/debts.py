"""What a connection that was given up still owes its server.

A server that died is owed nothing, but what was sent before that was noticed may have reached the one that took its
place. One that only stood still goes on with what it was sent: its lookups take locks, a lookup whose status nobody
asks for stays in it for ever, and slots that it has granted cannot be stored by anybody until they are published. When
the next connection leads to the same server, which its pool tells, the debts are settled there.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from lmcache_mp_safe.wire.calls import Kind, Link
from lmcache_mp_safe.wire.events import CallId, SessionId
from lmcache_mp_safe.wire.sessions import Reservation, Session


@dataclass(frozen=True)
class UnansweredLookup:
    """Objects that were asked for, and when."""

    objects: int
    sent: float


@dataclass(frozen=True)
class Debts:
    """Sessions to be closed on the server that owns the pool with this inode, and their lookups without an answer."""

    since: float
    inode: int
    sessions: tuple[Session, ...]
    lookups: dict[SessionId, UnansweredLookup]


def debts_of(link: Link, sessions: Iterable[Session], now: float) -> Debts:
    """What is owed once the link is given up; the sessions are no longer anybody else's.

    A retrieve without an answer is taken to have succeeded: ending one that failed releases nothing. So is a request
    for slots. A commit and the end of a retrieve without an answer are said again: a second one finds nothing to
    publish or to release. A free without an answer is taken to have arrived: locks are anonymous counts, and a second
    one would be another reader's.
    """
    owed = {session.number: session for session in sessions}
    lookups: dict[SessionId, UnansweredLookup] = {}
    for call in link.open.values():
        session = owed.get(call.session)
        if session is None or call.given_up:
            continue
        if call.kind is Kind.LOOKUP:
            lookups[call.session] = UnansweredLookup(call.end, call.sent)
        elif call.kind is Kind.RETRIEVE:
            session.read(call.key, link.connection.instance, call.sent)
        elif call.kind is Kind.RESERVE:
            session.reservations[call.number] = Reservation(
                call.key, link.connection.instance, call.sent, lease_until=call.sent, given_back=True
            )
        elif call.ends is not None:
            session.reading, session.reader = call.ends
        elif call.reservation is not None:
            call.reservation.given_back = True
            session.reservations[CallId(call.start)] = call.reservation
    for session in owed.values():
        session.running.clear()
        session.closing, session.looking_up = True, None
    return Debts(now, link.segment.inode, tuple(owed.values()), lookups)
