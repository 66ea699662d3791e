"""Carries out what `machine.py` decides about hits: sessions, locks, slots, seals and load jobs.

Locks have one owner at any time: a request holds them from the lookup to the promise, a load job from the admission to
the last rank's answer. Whoever lets go closes the sessions, and the wire layer settles whatever they still hold.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto

from lmcache_mp_safe.contract import SKIP, JobOutcome, LoadJob, ObjectCopy
from lmcache_mp_safe.errors import LocalError
from lmcache_mp_safe.identity import PrefixDigests
from lmcache_mp_safe.ids import NULL_BLOCK, JobId, RequestId, ServerEpoch
from lmcache_mp_safe.metrics.counts import Count, Miss, Rejection
from lmcache_mp_safe.metrics.tally import Tally
from lmcache_mp_safe.scheduler import effects, phases
from lmcache_mp_safe.scheduler.known import Known
from lmcache_mp_safe.scheduler.machine import RequestRecord, Rules, step
from lmcache_mp_safe.scheduler.objects import ModelObjects, ObjectName
from lmcache_mp_safe.scheduler.phases import Event, Phase
from lmcache_mp_safe.scheduler.verdicts import verdict
from lmcache_mp_safe.wire import CallFailed, LookupAnswered, Retrieved, SessionId, Wire, WireEvent

logger = logging.getLogger(__name__)

# A job of this epoch exists on no server; workers answer it with STALE_EPOCH, which is a failed load.
NO_EPOCH = ServerEpoch(0)


class _Role(Enum):
    CHUNKS = auto()
    BOUNDARY = auto()


@dataclass
class _Holding:
    """What one request holds on the server, from its lookup to its load.

    Attributes:
        chunks: session of the chunk sequence; also used by the request's stores, which close it.
        boundaries: session of each boundary object that was probed and not yet given back.
        slots: offsets by session, once retrieved.
        awaited: sessions whose slots are still on their way.
    """

    started: float
    chunks: SessionId | None = None
    boundaries: dict[int, SessionId] = field(default_factory=dict)
    slots: dict[SessionId, tuple[int, ...]] = field(default_factory=dict)
    awaited: set[SessionId] = field(default_factory=set)
    promised_at: float = 0.0


@dataclass
class Hit:
    """One request's hit: its record and what it holds. Owned by the book of the scheduler half.

    Attributes:
        whole_chunks: chunks that the request's known tokens fill.
    """

    record: RequestRecord
    digests: PrefixDigests
    salt: str
    whole_chunks: int = 0
    holding: _Holding | None = None


@dataclass(frozen=True)
class EndedLoad:
    """How a load ended. The request may have been aborted meanwhile."""

    request_id: RequestId
    arrived: bool
    boundary: int


@dataclass
class _RunningLoad:
    """A load the workers have, and the sessions whose locks keep its slots."""

    request_id: RequestId
    names: tuple[ObjectName, ...]
    sessions: tuple[SessionId, ...]
    tokens: int
    boundary: int


class Hits:
    """All hits being looked up, promised or loaded."""

    def __init__(
        self,
        wire: Wire,
        objects: ModelObjects,
        rules: Rules,
        known: Known,
        *,
        lookup_timeout_s: float,
        hold_s: float,
        next_job: Callable[[], JobId],
        tally: Tally,
    ) -> None:
        self._wire = wire
        self._objects = objects
        self._rules = rules
        self._known = known
        self._lookup_timeout_s = lookup_timeout_s
        self._hold_s = hold_s
        self._next_job = next_job
        self._count = tally.add
        self._book: dict[RequestId, Hit] = {}
        self._owners: dict[SessionId, tuple[RequestId, _Role, int]] = {}
        self._loads: dict[JobId, _RunningLoad] = {}
        self._planned: list[LoadJob] = []

    # --- what vLLM asks and tells -----------------------------------------------------------------------------------

    def track(self, hit: Hit) -> None:
        self._book[hit.record.request_id] = hit

    def poll(self, hit: Hit, local_tokens: int, now: float) -> int | None:
        """Tokens beyond the local hit that can be loaded; None while undecided. Free of side effects on vLLM."""
        self._expire(hit, now)
        self._apply(hit, phases.Polled(local_tokens), now)
        if hit.record.phase in (Phase.LOOKING_UP, Phase.PROBING, Phase.HOLDING):
            return None
        return hit.record.promised_tokens

    def admitted(self, hit: Hit, external_tokens: int, blocks: Sequence[Sequence[int]], now: float) -> None:
        """vLLM allocated these blocks (ids per group) and wants this many tokens loaded into them."""
        if hit.record.phase is Phase.LOADING:
            return  # vLLM reports the second half of an allocation for a load that is still running
        if external_tokens == 0:
            self._apply(hit, phases.AdmittedWithoutLoad(), now)
        elif external_tokens == hit.record.promised_tokens:
            self._apply(hit, phases.Admitted(), now, blocks)
        else:
            self._count(Count.LOADS_REFUSED)
            self._apply(hit, phases.AdmittedOtherwise(), now)

    def finished(self, hit: Hit, now: float) -> None:
        self._apply(hit, phases.Finished(), now)
        self._book.pop(hit.record.request_id, None)

    def take_loads(self) -> tuple[LoadJob, ...]:
        planned, self._planned = tuple(self._planned), []
        return planned

    @property
    def running_loads(self) -> int:
        return len(self._loads)

    @property
    def slots_read(self) -> int:
        """Objects of the server's pool that running loads hold."""
        return sum(len(load.names) for load in self._loads.values())

    # --- what the server answers ------------------------------------------------------------------------------------

    def owns(self, session: SessionId) -> bool:
        return session in self._owners

    def handle(self, event: WireEvent, now: float) -> None:
        """Feed one answer of the wire layer to the request that waits for it."""
        match event:
            case LookupAnswered(session=session, found=found):
                self._looked_up(session, found, now)
            case Retrieved(session=session, offsets=offsets):
                self._retrieved(session, offsets, now)
            case CallFailed(session=session):
                self._call_failed(session, now)

    def epoch_ended(self, now: float) -> None:
        """The server is gone, or left for another namespace. Workers still answer for running loads."""
        for hit in self._book.values():
            self._release(hit, now)  # nothing happens for sessions of a server that is gone
        self._owners.clear()
        for hit in self._book.values():
            self._apply(hit, phases.EpochEnded(), now)

    def _looked_up(self, session: SessionId, found: int, now: float) -> None:
        request_id, role, boundary = self._owners[session]
        hit = self._book[request_id]
        if role is _Role.CHUNKS:
            self._note_absent_chunks(hit, found)
            self._apply(hit, phases.ChunksCounted(found), now)
            return
        name = self._objects.boundary(hit.digests, boundary)
        exists = found == len(name.pieces)
        if not exists:
            self._known.gone(name.digest)
            self._let_go(hit, boundary, now)
        if hit.record.phase is Phase.PROBING and boundary in hit.record.waiting_for:
            self._apply(hit, phases.Probed(boundary, exists), now)
        elif exists:
            self._let_go(hit, boundary, now)  # a deeper one was taken meanwhile

    def _note_absent_chunks(self, hit: Hit, found: int) -> None:
        """What lies behind the first absent chunk cannot be found any more, whether it is still there or not."""
        if found < hit.record.limit_tokens // self._rules.chunk_tokens:
            for digest in hit.digests.chunks(hit.whole_chunks)[found:]:
                self._known.gone(digest)

    def _retrieved(self, session: SessionId, offsets: tuple[int, ...], now: float) -> None:
        request_id, _, _ = self._owners[session]
        hit = self._book[request_id]
        holding = _held(hit)
        holding.slots[session] = offsets
        holding.awaited.discard(session)
        if holding.awaited:
            return
        bad = [name for name, slots in self._named_slots(hit) if not self._seals_are_right(name, slots)]
        for name in bad:
            self._count(Rejection.AT_PROMISE)
            self._known.poison(name.digest)
        holding.promised_at = now
        self._apply(hit, phases.Unusable(Miss.BAD_SEAL) if bad else phases.Validated(), now)
        if not bad:
            self._count(Count.PROMISED_TOKENS, hit.record.promised_tokens)
            self._count(Count.PROMISED_BYTES, sum(self._objects.payload_bytes(n) for n, _ in self._named_slots(hit)))

    def _seals_are_right(self, name: ObjectName, slots: Sequence[int]) -> bool:
        pool = self._wire.pool
        return pool is not None and self._objects.seals_are_right(pool, self._wire.namespace, name, slots)

    def _call_failed(self, session: SessionId, now: float) -> None:
        request_id, role, boundary = self._owners[session]
        hit = self._book[request_id]
        self._count(Count.LOOKUPS_FAILED)
        if role is _Role.BOUNDARY and hit.record.phase is Phase.PROBING:
            self._let_go(hit, boundary, now)
            if boundary in hit.record.waiting_for:
                self._apply(hit, phases.Probed(boundary, exists=False), now)
        else:
            self._apply(hit, phases.Unusable(Miss.CALL_FAILED), now)

    # --- what the workers report ------------------------------------------------------------------------------------

    def runs_load(self, job_id: JobId) -> bool:
        return job_id in self._loads

    def load_ended(self, job_id: JobId, outcomes: set[JobOutcome], bad_objects: set[int], now: float) -> EndedLoad:
        """Every rank has answered: give the locks back and tell the request, if it still waits."""
        load = self._loads.pop(job_id)
        arrived = outcomes == {JobOutcome.DONE}
        for index in bad_objects:
            self._count(Rejection.AT_LOAD)
            self._known.poison(load.names[index].digest)
        if arrived:
            for name in load.names:
                self._known.loaded.add(name.digest)
        for session in load.sessions:
            self._wire.done_reading(session, now)
        self._wire.close_in_order(load.sessions, now)
        if arrived:
            self._count(Count.LOADED_TOKENS, load.tokens)
            self._count(Count.LOADED_BYTES, sum(map(self._objects.payload_bytes, load.names)))
        else:
            self._count(Count.LOADS_FAILED)
        hit = self._book.get(load.request_id)
        if hit is not None and hit.record.phase is Phase.LOADING:
            self._apply(hit, phases.Loaded() if arrived else phases.LoadFailed(), now)
        return EndedLoad(load.request_id, arrived, load.boundary)

    # --- effects ----------------------------------------------------------------------------------------------------

    def _apply(self, hit: Hit, event: Event, now: float, blocks: Sequence[Sequence[int]] = ()) -> None:
        outcome = step(hit.record, event, self._rules)
        told = verdict(hit.record, event, outcome.record)
        if told.begun:
            self._count(Count.LOOKUPS)
        if told.end is not None:
            self._count(told.end)
        hit.record = outcome.record
        for effect in outcome.effects:
            self._perform(hit, effect, now, blocks)

    def _perform(self, hit: Hit, effect: effects.Effect, now: float, blocks: Sequence[Sequence[int]]) -> None:
        match effect:
            case effects.CountChunks(chunks=chunks):
                self._count_chunks(hit, chunks, now)
            case effects.Probe(boundaries=boundaries):
                self._probe(hit, boundaries, now)
            case effects.Hold(first_chunk=first, boundary=boundary):
                self._hold(hit, first, boundary, now)
            case effects.Release():
                self._release(hit, now)
            case effects.Load():
                self._load(hit, blocks)
            case effects.RefuseLoad():
                self._refuse_load(hit)

    def _count_chunks(self, hit: Hit, chunks: int, now: float) -> None:
        hit.holding = _Holding(started=now)
        session = self._wire.open(hit.digests.chunks(chunks), hit.salt)
        hit.holding.chunks = session
        self._owners[session] = (hit.record.request_id, _Role.CHUNKS, 0)
        self._wire.lookup(session, chunks, now)

    def _probe(self, hit: Hit, boundaries: Sequence[int], now: float) -> None:
        if hit.holding is None:
            hit.holding = _Holding(started=now)
        for boundary in boundaries:
            self._count(Count.PROBES)
            name = self._objects.boundary(hit.digests, boundary)
            session = self._wire.open(name.pieces, hit.salt)
            hit.holding.boundaries[boundary] = session
            self._owners[session] = (hit.record.request_id, _Role.BOUNDARY, boundary)
            self._wire.lookup(session, len(name.pieces), now)

    def _hold(self, hit: Hit, first_chunk: int, boundary: int, now: float) -> None:
        holding = _held(hit)
        whole = boundary // self._rules.chunk_tokens
        for other in [b for b in holding.boundaries if b != boundary]:
            self._let_go(hit, other, now)
        if holding.chunks is not None:
            self._wire.free(holding.chunks, 0, min(first_chunk, whole), now)
            self._wire.free(holding.chunks, whole, hit.record.chunks_found, now)
            if first_chunk < whole:
                self._wire.retrieve(holding.chunks, first_chunk, whole, now)
                holding.awaited.add(holding.chunks)
        if self._rules.needs_boundary(boundary):
            session = holding.boundaries[boundary]
            pieces = len(self._objects.boundary(hit.digests, boundary).pieces)
            self._wire.retrieve(session, 0, pieces, now)
            holding.awaited.add(session)

    def _let_go(self, hit: Hit, boundary: int, now: float) -> None:
        session = _held(hit).boundaries.pop(boundary)
        self._owners.pop(session, None)
        self._wire.close(session, now)

    def _release(self, hit: Hit, now: float) -> None:
        holding, hit.holding = hit.holding, None
        if holding is None:
            return
        sessions = _closing_order(holding)
        for session in sessions:
            self._owners.pop(session, None)
        self._wire.close_in_order(sessions, now)

    def _load(self, hit: Hit, blocks: Sequence[Sequence[int]]) -> None:
        copies = tuple(
            ObjectCopy(name.digest, self._targets(hit, name, blocks), tuple(slots))
            for name, slots in self._named_slots(hit)
        )
        names = tuple(name for name, _ in self._named_slots(hit))
        holding, hit.holding = _held(hit), None
        sessions = tuple(_closing_order(holding))
        for session in sessions:
            self._owners.pop(session, None)
        tokens = hit.record.boundary - hit.record.local_tokens
        load = _RunningLoad(hit.record.request_id, names, sessions, tokens, hit.record.boundary)
        self._plan_load(hit, self._wire.epoch, copies, load)

    def _refuse_load(self, hit: Hit) -> None:
        self._plan_load(hit, NO_EPOCH, (), _RunningLoad(hit.record.request_id, (), (), 0, 0))

    def _plan_load(self, hit: Hit, epoch: ServerEpoch, copies: tuple[ObjectCopy, ...], load: _RunningLoad) -> None:
        job = LoadJob(self._next_job(), epoch, hit.record.request_id, copies)
        self._loads[job.job_id] = load
        self._planned.append(job)

    def _targets(self, hit: Hit, name: ObjectName, blocks: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
        """Block ids to write, per group. Pages below the local hit are shared with other requests: never written."""
        targets: list[tuple[int, ...]] = []
        for group, columns, table in zip(self._objects.geometry.groups, name.columns, blocks, strict=True):
            local_columns = hit.record.local_tokens // group.block_tokens
            targets.append(tuple(SKIP if column < local_columns else table[column] for column in columns))
        if any(target == NULL_BLOCK for part in targets for target in part):
            # The worker refuses to write it and fails the load, which is the right end; say it here, too.
            logger.error("request %s: vLLM allocated no block for a page of the hit", hit.record.request_id)
        return tuple(targets)

    def _named_slots(self, hit: Hit) -> list[tuple[ObjectName, tuple[int, ...]]]:
        """Every object of the held hit with its slots, chunks first."""
        holding, record = _held(hit), hit.record
        named: list[tuple[ObjectName, tuple[int, ...]]] = []
        if holding.chunks is not None:
            for index, slot in enumerate(holding.slots.get(holding.chunks, ()), start=record.first_chunk):
                named.append((self._objects.chunk(hit.digests, index), (slot,)))
        if record.boundary in holding.boundaries:
            slots = holding.slots[holding.boundaries[record.boundary]]
            named.append((self._objects.boundary(hit.digests, record.boundary), slots))
        return named

    def _expire(self, hit: Hit, now: float) -> None:
        holding = hit.holding
        if holding is None:
            return
        undecided = hit.record.phase in (Phase.LOOKING_UP, Phase.PROBING, Phase.HOLDING)
        if undecided and now - holding.started > self._lookup_timeout_s:
            self._count(Count.LOOKUPS_LATE)
            self._apply(hit, phases.Unusable(Miss.LATE), now)
        elif hit.record.phase is Phase.PROMISED and now - holding.promised_at > self._hold_s:
            self._apply(hit, phases.Expired(), now)


def with_limit(record: RequestRecord, limit_tokens: int, remembered: tuple[int, ...]) -> RequestRecord:
    """The record for a question about a prompt of this usable length."""
    return replace(record, limit_tokens=limit_tokens, remembered=remembered)


def _held(hit: Hit) -> _Holding:
    if hit.holding is None:
        raise LocalError(f"request {hit.record.request_id} holds nothing while {hit.record.phase.value}")
    return hit.holding


def _closing_order(holding: _Holding) -> list[SessionId]:
    """Boundary sequences end first, the chunk sequence last: ending refreshes its objects' place in the LRU order."""
    sessions = list(holding.boundaries.values())
    return sessions if holding.chunks is None else [*sessions, holding.chunks]
