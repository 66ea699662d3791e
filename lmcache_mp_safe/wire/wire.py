"""The wire layer's face: calls go out, events come in, nothing blocks.

Called from one thread, the scheduler's. Time is an argument. Every call has a deadline; what is still owed when it has
passed (locks of a lookup that is answered late, a retrieve that succeeded after all) is settled here when the answer
comes, without the caller.
"""

from __future__ import annotations

import itertools
import logging
import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from lmcache_mp_safe.contract import PoolSegment
from lmcache_mp_safe.errors import LocalError, ServerError
from lmcache_mp_safe.ids import ServerEpoch
from lmcache_mp_safe.metrics.counts import CallTime, Failure
from lmcache_mp_safe.metrics.tally import Tally
from lmcache_mp_safe.turns import ShortTurns
from lmcache_mp_safe.wire.calls import Call, Kind, Link
from lmcache_mp_safe.wire.config import WireConfig
from lmcache_mp_safe.wire.connecting import Maker, Target
from lmcache_mp_safe.wire.debts import Debts, debts_of
from lmcache_mp_safe.wire.events import (
    CallFailed,
    CallId,
    Committed,
    Connected,
    FailureKind,
    LookupAnswered,
    Lost,
    Reserved,
    Retrieved,
    SessionEvent,
    SessionId,
    WireEvent,
)
from lmcache_mp_safe.wire.keys import object_key, registration
from lmcache_mp_safe.wire.pool import PoolView
from lmcache_mp_safe.wire.replies import check_apart, found_objects, reserved_offsets, retrieved_offsets, said_yes
from lmcache_mp_safe.wire.salts import wire_salt
from lmcache_mp_safe.wire.sessions import Reservation, Session

logger = logging.getLogger("vllm.lmcache_mp_safe.wire")

# Seconds between two questions for a lookup's status: quick at first, the answer is usually there.
_STATUS_PACE_S = 0.001
_LATE_STATUS_PACE_S = 0.1
# A call without an answer this long after its deadline is given up: what it may own is given back, a lookup that still
# runs is left to the server's lock time.
_ORPHAN_S = 60.0
_FIRST_BACKOFF_S = 0.5
_SUFFIX_INTS = 2

_TIMES = {kind: CallTime[kind.name] for kind in Kind}
_FAILURES = {kind: Failure[kind.name] for kind in FailureKind}


@dataclass(frozen=True)
class Held:
    """What is still owned on the server; all zero when idle."""

    sessions: int
    locks: int
    retrieves: int
    unanswered: int


class Wire:
    """Calls to one server in one namespace."""

    def __init__(
        self,
        config: WireConfig,
        *,
        maker: Maker | None = None,
        process: str | None = None,
        tally: Tally | None = None,
    ) -> None:
        """Nothing goes over the network before `start`.

        Args:
            process: text that no other process uses; random by default.
            tally: takes the times of calls and the failed ones.
        """
        self._config = config
        self._maker = maker or Maker()
        self._tally = tally if tally is not None else Tally()
        self._process = process or secrets.token_hex(12)
        self._numbers = itertools.count(1)
        self._epochs = itertools.count(config.first_epoch)
        self._sessions: dict[SessionId, Session] = {}
        self._closing: dict[SessionId, Session] = {}
        self._debts: list[Debts] = []
        self._events: list[WireEvent] = []
        self._link: Link | None = None
        self._last_epoch = config.first_epoch
        self._making = False
        self._retry_at = self._polled_at = 0.0
        self._backoff_s = _FIRST_BACKOFF_S
        self._turns = ShortTurns()
        self._stopped = False
        self.has_tried = False  # an attempt to connect has ended, one way or the other
        self.why_down = "not connected yet"

    # --- state ------------------------------------------------------------------------------------------------------

    @property
    def up(self) -> bool:
        return self._link is not None

    @property
    def epoch(self) -> ServerEpoch:
        """The epoch in use, or the last one."""
        return self._last_epoch

    @property
    def namespace(self) -> str:
        return self._config.namespace

    @property
    def segment(self) -> PoolSegment | None:
        return None if self._link is None else self._link.segment

    @property
    def pool(self) -> PoolView | None:
        """The server's pool, to read from."""
        return None if self._link is None else self._link.connection.pool

    @property
    def unsettled(self) -> bool:
        """Whether answers are on their way that polls should take in soon."""
        return self._link is not None and any(not call.told for call in self._link.open.values())

    @property
    def owes(self) -> bool:
        """Whether something is not ended yet: late answers may tell what to give back, and a server that only stands
        still may be back in time for it."""
        waits = any(self._polled_at - debt.since <= self._config.write_time_s for debt in self._debts)
        return waits if self._link is None else bool(self._sessions or self._closing)

    @property
    def unanswered(self) -> int:
        """Calls that wait for an answer, those that timed out included."""
        return 0 if self._link is None else len(self._link.open)

    def held(self) -> Held:
        sessions = [*self._sessions.values(), *self._closing.values()]
        return Held(
            sessions=sum(session.used for session in sessions),
            locks=sum(len(part) for session in sessions for part in session.locked),
            retrieves=sum(session.reading is not None for session in sessions),
            unanswered=self.unanswered,
        )

    # --- life -------------------------------------------------------------------------------------------------------

    def start(self, now: float) -> None:
        """Begin connecting."""
        self._make()

    def poll(self, now: float) -> list[WireEvent]:
        """Take in what has come, look after deadlines and the heartbeat. Never blocks."""
        self._polled_at = now
        if self._link is None:
            self._poll_making(now)
        link = self._link
        if link is not None:
            self._beat(link, now)
            for call in list(link.open.values()):
                if self._link is link:
                    self._advance(link, call, now)
            if self._link is link and link.late >= self._config.max_unanswered_calls:
                self._lose(f"{link.late} calls are unanswered", now)
            if self._link is link and self._closing:
                self._settle_closing(link, now)
        self._turns.want(self.unsettled)
        events, self._events = self._events, []
        return events

    def shutdown(self, deadline_s: float) -> None:
        """End what can be ended without waiting for it, and close the client within the deadline."""
        if self._stopped:
            return
        self._stopped = True
        link, self._link = self._link, None
        try:
            if link is not None:
                self._say_goodbye(link, deadline_s)
                self._maker.close(link.connection)
            self._sessions.clear()
            self._closing.clear()
            self._maker.stop(deadline_s)
        finally:
            self._turns.want(False)  # last: what is said in parting are calls, too

    def _say_goodbye(self, link: Link, deadline_s: float) -> None:
        client, last, now = link.connection.client, None, self._polled_at
        self._end_lookups(link, deadline_s)
        # With slots pending an unregistration would publish them, unsealed.
        may_unregister = not any(call.kind is Kind.RESERVE for call in link.open.values())
        debts = debts_of(link, [*self._sessions.values(), *self._closing.values()], now)
        for session in debts.sessions:
            if (lookup := debts.lookups.get(session.number)) is not None:
                # One that nobody asks about stays in the server for ever, and it frees no more than it noted.
                client.query_prefetch_status(session.name)
                session.locked, session.locked_at = [range(lookup.objects)], lookup.sent
            self._publish(link, session, now)
            self._release_reads(link, session, now)
            if session.used:
                last = client.end_session(session.name)
        if may_unregister and not link.granted:
            last = client.unregister_kv_cache_engine_driven_context(link.connection.instance)
        if last is not None:
            last.wait(min(deadline_s, 1.0))

    def _end_lookups(self, link: Link, deadline_s: float) -> None:
        """What a running lookup has locked can be freed only once its status was told."""
        end = time.monotonic() + deadline_s
        for call in [call for call in link.open.values() if call.kind is Kind.LOOKUP]:
            session, future = self._session_of(call), call.future
            while session is not None and (left := end - time.monotonic()) > 0:
                answer = _result(future) if future is not None and future.wait(left) else None
                if type(answer) is int:
                    session.lock(max(0, min(answer, call.end)), call.sent)
                    del link.open[call.number]
                    break
                if future is not None and not future.query():
                    break
                future = link.connection.client.query_prefetch_status(session.name)

    def _make(self) -> None:
        self._making = True
        config = self._config
        self._maker.make(Target(config.url, config.namespace, config.object_bytes, config.connect_timeout_s / 2))

    def _poll_making(self, now: float) -> None:
        if not self._making:
            if now >= self._retry_at and not self._stopped:
                self._make()
            return
        result = self._maker.result()
        if result is None:
            return
        self._making, self.has_tried = False, True
        if isinstance(result, ServerError):
            self._down(str(result), now)
            return
        epoch = ServerEpoch(next(self._epochs))
        segment = PoolSegment(epoch, result.shm_name, result.pool.size, result.pool.inode)
        self._link = Link(result, epoch, segment, next_beat=now + self._config.heartbeat_s)
        self._last_epoch, self._backoff_s, self.why_down = epoch, _FIRST_BACKOFF_S, ""
        self._inherit(self._link, now)
        self._events.append(Connected(epoch, segment, result.server_chunk))

    def _down(self, why: str, now: float) -> None:
        if why != self.why_down:
            logger.warning("LMCache server %s: %s", self._config.url, why)
        self.why_down = why
        self._retry_at = now + self._backoff_s
        self._backoff_s = min(2 * self._backoff_s, self._config.backoff_max_s)

    def _lose(self, why: str, now: float) -> None:
        """The server is gone or not to be trusted: nothing of what was owned there may be used any more."""
        link, self._link = self._link, None
        assert link is not None
        self._debts.append(debts_of(link, [*self._sessions.values(), *self._closing.values()], now))
        self._events = [Lost(link.epoch, why)]
        for call in link.open.values():
            self._count_failure(call, FailureKind.LOST)
            self._tell(call, CallFailed(call.number, call.session, FailureKind.LOST, why))
        self._sessions.clear()
        self._closing.clear()
        self._maker.close(link.connection)
        self._down(why, now)
        self._retry_at = now

    def _inherit(self, link: Link, now: float) -> None:
        """Close what earlier connections left open on this very server. What does not fit into the queue is left to
        the server's lock time.

        Of a server that is gone only the lookups: what was sent before that was noticed may have reached this one.
        """
        debts, self._debts = self._debts, []
        for debt in debts:
            same = debt.inode == link.segment.inode
            for session in debt.sessions:
                if not same:
                    session.locked, session.reading, session.reservations = [], None, {}
                    if session.number not in debt.lookups:
                        continue
                lookup = debt.lookups.get(session.number)
                self._closing[session.number] = session
                if lookup is not None and link.has_room(1, self._config.max_unanswered_calls):
                    status = link.connection.client.query_prefetch_status(session.name)
                    call = self._send(link, Kind.LOOKUP, session, status, now, end=lookup.objects)
                    call.acknowledged, call.inherited, call.sent, call.asked_at = True, True, lookup.sent, now
                    session.looking_up = call.number

    def _beat(self, link: Link, now: float) -> None:
        """Registering is the heartbeat: it proves our registration, which a ping does not, and heals a lost one."""
        if link.beat is None:
            if now < link.next_beat and not link.doubted:
                return
            if not link.is_still_mapped:
                self._lose("its shared memory was replaced: the server restarted", now)
                return
            payload = registration(link.connection.instance, self._config.namespace, self._config.object_bytes)
            link.beat = link.connection.client.register_kv_cache_engine_driven_context(payload)
            link.beat_deadline, link.doubted = now + self._config.call_timeout_s, False
            return
        if link.beat.query():
            self._heard(link, now)
        elif now > link.beat_deadline:
            self._lose(f"no answer to a heartbeat for {self._config.call_timeout_s:g} s", now)

    def _heard(self, link: Link, now: float) -> None:
        answer, link.beat = _result(link.beat), None
        link.next_beat = now + self._config.heartbeat_s
        same = getattr(answer, "shm_name", None), getattr(answer, "pool_size", None)
        if same != (link.segment.name, link.segment.size) or not link.is_still_mapped:
            self._lose("another server answers at this address", now)

    # --- sessions ---------------------------------------------------------------------------------------------------

    def open(self, digests: Sequence[bytes], salt: str = "") -> SessionId:
        """A new sequence of objects with these digests (32 bytes each). Nothing is sent."""
        number = SessionId(next(self._numbers))
        self._sessions[number] = Session(number, f"{self._process}-{number}", wire_salt(salt), list(digests))
        return number

    def extend(self, session: SessionId, digests: Sequence[bytes]) -> None:
        """Append further objects of the same chain."""
        found = self._sessions.get(session)
        if found is not None:
            found.digests.extend(digests)

    def close(self, session: SessionId, now: float) -> None:
        """Give back whatever the session holds, then end it. From any state, any number of times."""
        self.close_in_order([session], now)

    def close_in_order(self, sessions: Sequence[SessionId], now: float) -> None:
        """Close several; they end on the server in this order."""
        before: SessionId | None = None
        for number in sessions:
            session = self._sessions.pop(number, None)
            if session is None:
                continue
            session.closing, session.after = True, before
            self._closing[number] = session
            before = number
        if self._link is not None:
            self._settle_closing(self._link, now)
        else:
            self._closing.clear()

    def _settle_closing(self, link: Link, now: float) -> None:
        for session in list(self._closing.values()):
            if session.running or session.looking_up is not None:
                continue  # its answers tell what has to be given back
            if not link.has_room(2 + len(session.locked), self._config.max_unanswered_calls):
                return
            self._publish(link, session, now)
            if session.reading is not None or session.locked:
                self._release_reads(link, session, now)
            elif not session.running and not session.reservations and session.after not in self._closing:
                del self._closing[session.number]
                if session.used:
                    self._send(link, Kind.SETTLE, session, link.connection.client.end_session(session.name), now)

    def _release_reads(self, link: Link, session: Session, now: float) -> None:
        client = link.connection.client
        locked, session.locked = session.locked, []
        if session.reading is not None:
            self._end_reading(link, session, session.reading, session.reader, now)
        if now - session.locked_at > self._config.lock_time_s:
            return  # the server took them back, and its counts are anonymous: a release would be another reader's
        for part in locked:
            freed = client.free_lookup_locks(self._key(link, session, part.start, part.stop), 1)
            self._send(link, Kind.SETTLE, session, freed, now)

    def _end_reading(self, link: Link, session: Session, key: Any, reader: int, now: float) -> None:
        """However old it is: the server keeps it open until the reader is unregistered, and releases its locks then."""
        session.reading = None
        future = link.connection.client.commit_retrieve(key, reader)
        self._send(link, Kind.SETTLE, session, future, now).ends = (key, reader)

    def _publish(self, link: Link, session: Session, now: float) -> None:
        """Publish what was given back: the server knows no other way to take slots back, and nobody believes an object
        without its seal. Reservations whose time is over may be another writer's by now."""
        for number, reservation in list(session.reservations.items()):
            if now - reservation.sent > self._config.write_time_s:
                del session.reservations[number]
            elif reservation.given_back and link.has_room(1, self._config.max_unanswered_calls):
                del session.reservations[number]
                link.granted.pop(number, None)
                future = link.connection.client.commit_store(reservation.key, reservation.instance, b"")
                self._send(link, Kind.SETTLE, session, future, now, start=number).reservation = reservation

    # --- calls ------------------------------------------------------------------------------------------------------

    def lookup(self, session: SessionId, objects: int, now: float) -> CallId:
        """How many of the first `objects` exist; locks them. Answer: `LookupAnswered`.

        Raises:
            LocalError: the session still holds locks of an earlier lookup.
        """
        found, link = self._usable(session)
        if found is None or link is None:
            return self._fail_at_once(session)
        if found.locked or found.looking_up is not None:
            raise LocalError(f"session {session} holds, or may hold, locks of an earlier lookup")
        key = self._key(link, found, 0, objects)
        call = self._send(
            link, Kind.LOOKUP, found, link.connection.client.lookup(key, 1), now, end=objects,
            timeout_s=self._config.lookup_timeout_s,
        )  # fmt: skip
        found.looking_up = call.number
        return call.number

    def retrieve(self, session: SessionId, start: int, end: int, now: float) -> CallId:
        """Pool offsets of the locked objects [start, end). Answer: `Retrieved`."""
        found, link = self._usable(session)
        if found is None or link is None:
            return self._fail_at_once(session)
        if found.reading is not None:
            raise LocalError(f"session {session} has an open retrieve")
        # From here on the locks are the server's to account for: a retrieve that fails releases them itself.
        found.unlock(start, end)
        key = self._key(link, found, start, end, unique=True)
        future = link.connection.client.prepare_retrieve(key, link.connection.instance)
        return self._send(link, Kind.RETRIEVE, found, future, now, start=start, end=end, key=key).number

    def done_reading(self, session: SessionId, now: float) -> None:
        """End the open retrieve, which releases its locks; nothing without one."""
        found, link = self._usable(session)
        if found is None or link is None or found.reading is None:
            return  # with no room for the call it is made when the session closes
        self._end_reading(link, found, found.reading, found.reader, now)

    def free(self, session: SessionId, start: int, end: int, now: float) -> None:
        """Release locks that are still held on [start, end)."""
        found, link = self._usable(session)
        if found is None or link is None or start >= end:
            return  # with no room for the call it is made when the session closes
        found.unlock(start, end)
        if now - found.locked_at > self._config.lock_time_s:
            return
        future = link.connection.client.free_lookup_locks(self._key(link, found, start, end), 1)
        self._send(link, Kind.SETTLE, found, future, now)

    def reserve(self, session: SessionId, start: int, end: int, now: float) -> CallId:
        """Ask for slots for the objects [start, end). Answer: `Reserved`."""
        found, link = self._usable(session)
        if found is None or link is None:
            return self._fail_at_once(session)
        key = self._key(link, found, start, end, unique=True)
        future = link.connection.client.prepare_store(key, link.connection.instance)
        return self._send(link, Kind.RESERVE, found, future, now, start=start, end=end, key=key).number

    def commit(self, session: SessionId, reserve_call: CallId, now: float) -> CallId:
        """Publish everything in the slots of a reservation. Answer: `Committed`.

        Raises:
            LocalError: the reservation's lease is over: the server may have given its slots to another writer, whose
                half-written object this would publish.
        """
        found, link = self._usable(session)
        if found is None or link is None or reserve_call not in found.reservations:
            return self._fail_at_once(session)
        if now > found.reservations[reserve_call].lease_until:
            raise LocalError(f"commit of reservation {reserve_call} after its lease")
        reservation = found.reservations.pop(reserve_call)
        future = link.connection.client.commit_store(reservation.key, reservation.instance, b"")
        call = self._send(link, Kind.COMMIT, found, future, now, start=reserve_call)
        call.reservation = reservation
        return call.number

    def give_back(self, reserve_call: CallId, now: float) -> None:
        """Nobody writes into the slots of this reservation any more, and nobody is going to commit it.

        They are published as they are, which is a miss for whoever finds them: otherwise nothing could be stored there
        for the server's own time. Also after the session was closed or the server lost; nothing for what was committed.
        """
        owner = self._owner_of(reserve_call)
        if owner is not None:
            owner.reservations[reserve_call].given_back = True
            if self._link is not None:
                self._publish(self._link, owner, now)

    def leave(self, reserve_call: CallId) -> None:
        """As `give_back`, for slots that may have no memory behind them, which the server must not be made to read.
        Their range cannot be stored until the server's own time for a write is over."""
        owner = self._owner_of(reserve_call)
        if owner is not None:
            del owner.reservations[reserve_call]

    def _owner_of(self, reserve_call: CallId) -> Session | None:
        owed = (session for debt in self._debts for session in debt.sessions)
        everyone = itertools.chain(self._sessions.values(), self._closing.values(), owed)
        return next((session for session in everyone if reserve_call in session.reservations), None)

    def _usable(self, session: SessionId) -> tuple[Session | None, Link | None]:
        link = self._link
        usable = link is not None and link.has_room(1, self._config.max_unanswered_calls)
        return self._sessions.get(session), link if usable else None

    def _fail_at_once(self, session: SessionId) -> CallId:
        call = CallId(next(self._numbers))
        why = self.why_down or "the session is gone, or too many calls are unanswered"
        self._tally.add(_FAILURES[FailureKind.LOST])
        self._events.append(CallFailed(call, session, FailureKind.LOST, why))
        return call

    def _key(self, link: Link, session: Session, start: int, end: int, *, unique: bool = False) -> Any:
        chunk = link.connection.server_chunk
        suffix = [secrets.randbits(31) for _ in range(_SUFFIX_INTS)] if unique else []
        tokens = session.tokens(end, chunk, suffix)
        return object_key(self._config.namespace, session.name, session.salt, tokens, start * chunk, end * chunk)

    def _send(
        self,
        link: Link,
        kind: Kind,
        session: Session,
        future: Any,
        now: float,
        *,
        start: int = 0,
        end: int = 0,
        key: Any = None,
        timeout_s: float | None = None,
    ) -> Call:
        number = CallId(next(self._numbers))
        deadline = now + (self._config.call_timeout_s if timeout_s is None else timeout_s)
        call = Call(number, kind, session.number, future, deadline, start, end, key, sent=now)
        link.open[number] = call
        self._turns.want(True)
        session.used = True
        session.running.add(number)
        return call

    # --- answers ----------------------------------------------------------------------------------------------------

    def _session_of(self, call: Call) -> Session | None:
        return self._sessions.get(call.session) or self._closing.get(call.session)

    def _owner(self, call: Call) -> Session:
        """The session of a call that may own something: it is there until the call is answered or given up."""
        session = self._session_of(call)
        assert session is not None
        return session

    def _advance(self, link: Link, call: Call, now: float) -> None:
        if call.future is None:
            if now >= call.ask_again_at:
                self._ask_status(link, call, now)
        elif call.future.query():
            self._answered(link, call, now)
        if call.number in link.open and now > call.deadline:
            self._late(link, call, now)

    def _late(self, link: Link, call: Call, now: float) -> None:
        if not call.told:
            self._count_failure(call, FailureKind.TIMEOUT)
            self._tell(call, CallFailed(call.number, call.session, FailureKind.TIMEOUT, f"{call.kind.name} timed out"))
            call.told = link.doubted = True
            call.deadline = now  # an idle engine calls no hook: much time may have passed since the deadline
            link.late += 1
        elif now > call.deadline + _ORPHAN_S and not call.given_up:
            self._give_up(link, call, now)

    def _give_up(self, link: Link, call: Call, now: float) -> None:
        """The answer is lost. It stays among those that are late: the client keeps its future until it is closed."""
        if call.kind is Kind.LOOKUP:
            self._give_up_lookup(link, call, now)
        else:
            self._assume_done(link, call, now)
            call.given_up = True
            self._let_go(call)

    def _give_up_lookup(self, link: Link, call: Call, now: float) -> None:
        """One that nobody asks about once it has ended stays in the server for ever."""
        if not call.acknowledged:
            call.acknowledged = True
            self._ask_status(link, call, now)
        elif not self._may_be_told(call, now):
            # It may have run still when it was asked about last, and that answer be lost. The server has to hear this
            # question; nobody needs the answer.
            question = link.connection.client.query_prefetch_status(self._owner(call).name)
            self._send(link, Kind.SETTLE, self._owner(call), question, now)
            self._assume_done(link, call, now)
            self._forget(link, call)

    def _may_be_told(self, call: Call, now: float) -> bool:
        """Whether the question about a lookup that is long over time deserves an answer still: an engine that was idle
        for hours has not asked since."""
        if call.future is None:  # it was running still when it was asked about last
            return call.questions * _LATE_STATUS_PACE_S < _ORPHAN_S
        return now - call.asked_at <= _ORPHAN_S

    def _answered(self, link: Link, call: Call, now: float) -> None:
        if call.given_up:
            self._forget(link, call)
            return
        try:
            answer = call.future.result(0)
            if call.kind is Kind.LOOKUP and not call.acknowledged:
                call.acknowledged = True
                self._ask_status(link, call, now)
                return
            if call.kind is Kind.LOOKUP and answer is None:
                call.future = None
                call.ask_again_at = now + (_LATE_STATUS_PACE_S if call.told else _STATUS_PACE_S)
                return
            self._take(link, call, answer, now)
        except ServerError as error:
            self._assume_done(link, call, now)
            self._fail(link, call, FailureKind.MALFORMED, str(error))
        except Exception as error:
            self._assume_done(link, call, now)
            self._fail(link, call, FailureKind.REFUSED, repr(error))

    def _fail(self, link: Link, call: Call, kind: FailureKind, detail: str) -> None:
        """An answer that is no answer. Counted also where nobody waits for it."""
        self._count_failure(call, kind)
        logger.debug("%s: %s", call.kind.name, detail)
        self._finish(link, call, CallFailed(call.number, call.session, kind, detail))

    def _assume_done(self, link: Link, call: Call, now: float) -> None:
        """An answer that cannot be read: whatever the call may have done on the server is taken for done.

        To give back what the server never gave releases nothing there.
        """
        if call.kind is Kind.LOOKUP:
            self._locked(link, call, call.end, now)
        elif call.kind is Kind.RETRIEVE:
            self._reading(link, call, now)
        elif call.kind is Kind.RESERVE:
            self._granted(link, call, (), now)

    def _locked(self, link: Link, call: Call, objects: int, now: float) -> None:
        """The lookup's locks are held; nobody waits for those of one that timed out."""
        session = self._owner(call)
        session.lock(objects, call.sent)
        if call.told and not session.closing:
            self._release_reads(link, session, now)

    def _reading(self, link: Link, call: Call, now: float) -> None:
        """The retrieve's end is owed: at once where nobody waits for the retrieve any more."""
        session = self._owner(call)
        if call.told and not session.closing:
            self._end_reading(link, session, call.key, link.connection.instance, now)
        else:
            session.read(call.key, link.connection.instance, call.sent)

    def _granted(self, link: Link, call: Call, offsets: tuple[int, ...], now: float) -> None:
        """Slots are the caller's; without a caller, or without a place, they are given back."""
        session, lease_until = self._owner(call), call.sent + self._config.lease_s
        unused = call.told or session.closing or not offsets
        reservation = Reservation(call.key, link.connection.instance, call.sent, lease_until, offsets, unused)
        link.granted[call.number] = session.reservations[call.number] = reservation
        self._publish(link, session, now)

    def _ask_status(self, link: Link, call: Call, now: float) -> None:
        call.asked_at = now
        call.questions += call.told
        call.future = link.connection.client.query_prefetch_status(self._owner(call).name)

    def _take(self, link: Link, call: Call, answer: Any, now: float) -> None:
        """A final answer. What was told to be lost is settled, not told again.

        Raises:
            ServerError: it makes no sense.
        """
        if not call.inherited:
            self._tally.observe(_TIMES[call.kind], now - call.sent)
        if call.kind in (Kind.RETRIEVE, Kind.RESERVE) and not link.connection.pool.is_alive:
            self._lose("its shared memory was replaced: the server restarted", now)
        elif call.kind is Kind.LOOKUP:
            self._take_lookup(link, call, answer, now)
        elif call.kind is Kind.RETRIEVE:
            self._take_retrieve(link, call, answer, now)
        elif call.kind is Kind.RESERVE:
            self._take_reservation(link, call, answer, now)
        elif call.kind is Kind.COMMIT:
            accepted = said_yes(answer)
            link.granted.pop(CallId(call.start), None)
            self._finish(link, call, Committed(call.number, call.session, accepted))
        else:
            self._forget(link, call)

    def _take_lookup(self, link: Link, call: Call, answer: Any, now: float) -> None:
        found = found_objects(answer, call.end)
        # The server frees no more than it noted.
        self._locked(link, call, call.end if call.inherited else found, now)
        self._finish(link, call, LookupAnswered(call.number, call.session, found))

    def _take_retrieve(self, link: Link, call: Call, answer: Any, now: float) -> None:
        success = getattr(answer, "success", None)
        if success is False:
            # The server released these locks itself: freeing them as well would strip other readers.
            self._fail(link, call, FailureKind.REFUSED, "not readable")
            return
        said_yes(success)
        count, size = call.end - call.start, self._config.object_bytes
        offsets = retrieved_offsets(getattr(answer, "context", None), count, size, link.segment.size)
        check_apart(offsets, link.being_written(now), size)
        self._owner(call).reading_at = offsets
        self._reading(link, call, now)
        self._finish(link, call, Retrieved(call.number, call.session, offsets))

    def _take_reservation(self, link: Link, call: Call, answer: Any, now: float) -> None:
        size = self._config.object_bytes
        offsets = reserved_offsets(getattr(answer, "context", None), call.start, call.end, size, link.segment.size)
        check_apart(offsets.values(), [*link.being_written(now), *self._being_read()], size)
        if offsets:
            self._granted(link, call, tuple(offsets.values()), now)
        lease_until = call.sent + self._config.lease_s
        self._finish(link, call, Reserved(call.number, call.session, call.start, offsets, lease_until))

    def _being_read(self) -> Iterator[int]:
        """Offsets of slots that somebody here reads."""
        for session in [*self._sessions.values(), *self._closing.values()]:
            if session.reading is not None:
                yield from session.reading_at

    def _finish(self, link: Link, call: Call, event: SessionEvent) -> None:
        self._forget(link, call)
        self._tell(call, event)

    def _forget(self, link: Link, call: Call) -> None:
        if link.open.pop(call.number, None) is not None and call.told:
            link.late -= 1
        self._let_go(call)

    def _let_go(self, call: Call) -> None:
        """Its session waits for it no longer."""
        session = self._session_of(call)
        if session is not None:
            session.running.discard(call.number)
            if session.looking_up == call.number:
                session.looking_up = None

    def _count_failure(self, call: Call, kind: FailureKind) -> None:
        """Once a call: one that timed out may still get an answer, or be lost."""
        if not call.told:
            self._tally.add(_FAILURES[kind])

    def _tell(self, call: Call, event: SessionEvent) -> None:
        """Only open sessions have somebody who waits, and nobody is told twice."""
        if call.session in self._sessions and call.kind is not Kind.SETTLE and not call.told:
            self._events.append(event)


def _result(future: Any) -> Any:
    try:
        return future.result(0)
    except Exception:
        return None
