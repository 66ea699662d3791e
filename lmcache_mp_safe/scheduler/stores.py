"""What is stored, when, and how far the server has acknowledged it.

Runs (`runs.py`) outlive their request: its blocks survive by their pins.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence

from lmcache_mp_safe.announcements import ObjectStored
from lmcache_mp_safe.contract import SKIP, JobOutcome, ObjectCopy, StoreJob
from lmcache_mp_safe.geometry.groups import Columns
from lmcache_mp_safe.identity import PrefixDigests
from lmcache_mp_safe.ids import JobId, RequestId
from lmcache_mp_safe.metrics.counts import Count, Setback
from lmcache_mp_safe.metrics.tally import Tally
from lmcache_mp_safe.scheduler.certify import BlockPool, Certificate, Pins, certify, still_holds
from lmcache_mp_safe.scheduler.known import Known
from lmcache_mp_safe.scheduler.objects import ModelObjects
from lmcache_mp_safe.scheduler.progress import Prefix, Progress, Source, verified_tokens
from lmcache_mp_safe.scheduler.runs import Item, Question, Run, RunState, split_repairs
from lmcache_mp_safe.wire import (
    CallFailed,
    CallId,
    Committed,
    LookupAnswered,
    Reserved,
    Retrieved,
    SessionId,
    Wire,
    WireEvent,
)

# An object that gets no slot (pool full, another writer) is tried again this often, this many seconds apart.
MAX_ATTEMPTS = 4
RETRY_S = 1.0

# Chunks of one request that a plan takes up at most: a whole prompt that vLLM has and the server has not is spread over
# plans, but not the prompt that is being computed.
CHUNKS_PER_PLAN = 32

# The share of the server's pool that one reservation may ask for: it is granted whole or not at all.
_POOL_SHARE = 16

# A pin that is older than this many plans gives way when vLLM is short of blocks.
_PATIENCE_PLANS = 2


class Stores:
    """All stores: plans them, follows them, and moves the watermarks."""

    def __init__(
        self,
        wire: Wire,
        objects: ModelObjects,
        known: Known,
        pool: BlockPool,
        *,
        pin_fraction: float,
        call_bytes: int,
        lease_s: float,
        save_decode: bool,
        next_job: Callable[[], JobId],
        tally: Tally,
    ) -> None:
        self._wire = wire
        self._objects = objects
        self._geometry = objects.geometry
        self._known = known
        self._pool = pool
        self._pins = Pins(pool, pin_fraction)
        self._call_bytes = call_bytes
        self._lease_s = lease_s
        self._save_decode = save_decode
        self._next_job = next_job
        self._count = tally.add
        self._runs: dict[SessionId, list[Run]] = {}
        self._jobs: dict[JobId, Run] = {}
        self._questions: dict[SessionId, Question] = {}
        # Requests of which something may be left to store, in the order of their arrival.
        self._unsettled: dict[RequestId, None] = {}

    # --- state that others ask for ----------------------------------------------------------------------------------

    @property
    def pinned_blocks(self) -> int:
        return self._pins.held

    @property
    def busy(self) -> bool:
        """Whether anything is under way that the engine must keep stepping for."""
        return bool(self._runs or self._jobs or self._questions)

    @property
    def copying(self) -> bool:
        """Whether workers hold jobs whose end will give pinned blocks back."""
        return bool(self._jobs)

    @property
    def jobs(self) -> int:
        """Jobs that workers have."""
        return len(self._jobs)

    @property
    def slots_written(self) -> int:
        """Objects of the server's pool that are reserved and not yet committed."""
        waiting = (RunState.RESERVING, RunState.LOCATING)
        return sum(len(run.items) for run in self._all_runs() if run.state not in waiting)

    def _all_runs(self) -> Iterator[Run]:
        for runs in self._runs.values():
            yield from runs

    # --- planning ---------------------------------------------------------------------------------------------------

    def follow(self, prefix: Prefix) -> None:
        """Something of this request may have to be stored, from now on or again."""
        self._unsettled[prefix.source.request_id] = None

    def due(self, scheduled: Container[RequestId]) -> list[RequestId]:
        """Scheduled requests that are worth considering. A prompt that is stored costs nothing in later steps."""
        return [request_id for request_id in self._unsettled if request_id in scheduled]

    def consider(
        self,
        prefix: Prefix,
        limit_tokens: int | None,
        plan_number: int,
        now: float,
    ) -> None:
        """Certify, pin and reserve what is newly verified of a request's prefix.

        Args:
            limit_tokens: a cap set by the user for this request, or None.
            plan_number: the plan being built, or the last one built when called between plans. In both cases every
                block that a lookup may return by now is written by a step that lies before the next plan's fence.
        """
        limits = [] if self._save_decode else [prefix.source.num_prompt_tokens]
        limits += [] if limit_tokens is None else [limit_tokens]
        verified = min([verified_tokens(prefix.source), *limits])
        self._consider_chunks(prefix, verified, plan_number, now)
        self._consider_boundaries(prefix, verified, plan_number, now)
        if limits and verified == min(limits) and self._is_settled(prefix.progress, verified):
            self._unsettled.pop(prefix.source.request_id, None)

    def _is_settled(self, progress: Progress, verified: int) -> bool:
        """Whether everything below `verified` is stored or given up, so that looking again finds nothing to do."""
        if progress.open or progress.open_boundaries or progress.missed_boundaries:
            return False
        first = progress.start_tokens // self._geometry.chunk_tokens
        return (
            not self._geometry.has_append_only
            or first >= verified // self._geometry.chunk_tokens
            or progress.attempts.get(first, 0) >= MAX_ATTEMPTS
        )

    def _consider_chunks(self, prefix: Prefix, verified: int, plan_number: int, now: float) -> None:
        if not self._geometry.has_append_only:
            return
        progress, chunk_tokens = prefix.progress, self._geometry.chunk_tokens
        items: list[Item] = []
        for chunk in range(progress.start_tokens // chunk_tokens, verified // chunk_tokens):
            if len(items) == CHUNKS_PER_PLAN:
                break
            if chunk in progress.open or chunk in progress.acknowledged:
                if items:
                    break
                continue
            name = self._objects.chunk(prefix.digests, chunk)
            if name.digest in self._known.acknowledged:
                progress.acknowledge(chunk, chunk_tokens)
                continue
            if progress.attempts.get(chunk, 0) >= MAX_ATTEMPTS or progress.retry_at.get(chunk, 0.0) > now:
                break  # the chain of lookups would stop here: nothing behind it can be found
            certificate = self._certify(prefix.source, name.columns)
            if certificate is None or not self._try_pin(certificate):
                break
            items.append(Item(chunk, name, certificate))
            if name.digest in self._known.poisoned:
                break
        for run_items in split_repairs(items, self._known, self._chunks_per_call):
            self._open_run(prefix, run_items, plan_number, now, is_boundary=False)

    @property
    def _chunks_per_call(self) -> int:
        segment = self._wire.segment
        most = self._call_bytes if segment is None else min(self._call_bytes, segment.size // _POOL_SHARE)
        return max(1, most // self._objects.layout.object_bytes)

    def _consider_boundaries(self, prefix: Prefix, verified: int, plan_number: int, now: float) -> None:
        progress = prefix.progress
        first = max(progress.next_boundary, progress.num_loaded_tokens)
        fresh = self._boundaries(first, verified, prefix.source.num_prompt_tokens)
        retries = [b for b in progress.missed_boundaries if progress.retry_at.get(-b, 0.0) <= now]
        progress.missed_boundaries.difference_update(retries)
        progress.next_boundary = max(first, verified)
        for boundary in (*fresh, *retries):
            if boundary in progress.open_boundaries:
                continue
            certificate = self._certify(prefix.source, self._geometry.boundary_columns(boundary))
            if certificate is None:
                continue  # vLLM would not serve it, and a state that is gone does not come back
            name = self._objects.boundary(prefix.digests, boundary)
            if name.digest in self._known.acknowledged and self._chunks_below_are_known(prefix.digests, boundary):
                continue
            if not self._try_pin(certificate):
                progress.missed_boundaries.add(boundary)
                continue
            item = Item(boundary, name, certificate)
            self._open_run(prefix, [item], plan_number, now, is_boundary=True)

    def _chunks_below_are_known(self, digests: PrefixDigests, boundary: int) -> bool:
        """A boundary object is out of reach, and likely evicted itself, once a chunk below it is gone."""
        below = boundary // self._geometry.chunk_tokens
        if not below or not self._geometry.has_append_only:
            return True
        return digests.chunk(below - 1) in self._known.acknowledged

    def _boundaries(self, after: int, verified: int, num_prompt_tokens: int) -> list[int]:
        """Boundaries in (after, verified] that are worth an object of their own.

        Recurrent states are where certification finds them, so every boundary is asked for. A window costs a whole
        window each time, and a tail without boundary groups saves less than a chunk: multiples of C where there are
        windows, and the last full block of the prompt, also as the same prompt would resume there when sent again.
        """
        block, chunk = self._geometry.block_tokens, self._geometry.chunk_tokens
        last = num_prompt_tokens // block * block
        again = (num_prompt_tokens - 1) // block * block
        if self._geometry.is_recurrent:
            wanted = list(range(after // block * block + block, verified + 1, block))
        else:
            chunks = range(after // chunk * chunk + chunk, verified + 1, chunk)
            wanted = sorted({*chunks, *(b for b in (last, again) if after < b <= verified)})
        return [b for b in wanted if b and self._geometry.needs_boundary_object(b)]

    def _certify(self, source: Source, columns: Columns) -> Certificate | None:
        certificate = certify(self._pool, source, self._geometry, columns)
        if certificate is None:
            self._count(Setback.NOT_CERTIFIED)
        return certificate

    def _try_pin(self, certificate: Certificate) -> bool:
        pinned = self._pins.try_pin(certificate)
        if not pinned:
            self._count(Setback.NO_PINS)
        return pinned

    def _open_run(self, prefix: Prefix, items: list[Item], plan_number: int, now: float, *, is_boundary: bool) -> None:
        is_repair = items[0].name.digest in self._known.poisoned
        if is_boundary or is_repair:
            sequence = items[0].name.pieces if is_boundary else prefix.digests.chunks(items[0].mark + 1)
            session = self._wire.open(sequence, prefix.salt)
        else:
            session = self._chunk_session(prefix, items[-1].mark + 1)
        run = Run(prefix, items, is_boundary, plan_number, session, is_repair=is_repair)
        marks = prefix.progress.open_boundaries if is_boundary else prefix.progress.open
        marks.update(item.mark for item in items)
        self._runs.setdefault(session, []).append(run)
        if is_repair:
            run.state = RunState.LOCATING
            self._wire.lookup(session, run.span[1], now)
            self._count(Count.REPAIRS_STARTED)
        else:
            run.call = run.reservation = self._wire.reserve(session, *run.span, now)

    def _chunk_session(self, prefix: Prefix, chunks: int) -> SessionId:
        progress, digests = prefix.progress, prefix.digests.chunks(chunks)
        if progress.session is None:
            progress.session = self._wire.open(digests, prefix.salt)
        else:
            self._wire.extend(progress.session, digests[progress.session_chunks :])
            chunks = max(progress.session_chunks, chunks)
        progress.session_chunks = chunks
        return progress.session

    # --- the plan ---------------------------------------------------------------------------------------------------

    def plan(self, plan_number: int, now: float) -> tuple[list[StoreJob], list[JobId]]:
        """Jobs that may start in this plan, and running jobs whose source may be written again in this step."""
        jobs: list[StoreJob] = []
        for run in [run for run in self._all_runs() if run.state is RunState.RESERVED]:
            if run.plan_number < plan_number:
                jobs.extend(self._dispatch(run, plan_number, now))
        moved = [job for job, run in self._jobs.items() if run.items[run.jobs[job]].certificate.moved]
        return jobs, moved

    def _dispatch(self, run: Run, plan_number: int, now: float) -> list[StoreJob]:
        if not all(item.pinned for item in run.items):
            self._pin_again(run, plan_number, now)
            return []
        if now > run.lease_until:
            self._count(Setback.LEASE_OVER)
            self._fail(run, now)
            return []
        if not all(still_holds(self._pool, item.certificate) for item in run.items):
            # vLLM would serve another block now. Ids are never swapped inside a job: start again with the new one.
            self._count(Setback.MOVED)
            self._unpin(run.items)
            self._pin_again(run, plan_number, now)
            return []
        run.state = RunState.COPYING
        jobs: list[StoreJob] = []
        for index, item in enumerate(run.items):
            job_id = self._next_job()
            run.jobs[job_id] = index
            self._jobs[job_id] = run
            copy = ObjectCopy(item.name.digest, item.certificate.block_ids, item.slots)
            jobs.append(StoreJob(job_id, self._wire.epoch, copy))
        return jobs

    def _pin_again(self, run: Run, plan_number: int, now: float) -> None:
        """Certify and pin anew; the copy waits for a later plan, as after any first look.

        Blocks that are gone may come back: a preempted request computes its prefix again. A slot that was granted is
        worth waiting for while the request lives and the lease runs, since nobody else gets it before the server's own
        time is over.
        """
        for item in run.items:
            if item.pinned:
                continue
            certificate = certify(self._pool, run.prefix.source, self._geometry, item.name.columns)
            if certificate is None or not self._pins.try_pin(certificate):
                self._unpin(run.items)
                if run.prefix.progress.ended or now > run.lease_until:
                    self._count(Setback.ABANDONED, len(run.items))
                    self._fail(run, now)
                return
            item.certificate, item.pinned = certificate, True
        run.plan_number = plan_number

    def give_way(self, plan_number: int) -> None:
        """vLLM is short of blocks: give back those that only a store holds and no worker reads yet.

        Blocks with another owner help nobody, and pins of the last plans are about to be copied or given back anyway.
        """
        for run in self._all_runs():
            if run.awaits_copy and plan_number - run.plan_number > _PATIENCE_PLANS and run.holds_alone:
                self._unpin(run.items)

    def drop_undispatched_pins(self) -> None:
        """Give back every block that no worker reads yet: vLLM's cache is about to be reset."""
        for run in self._all_runs():
            if run.awaits_copy:
                self._unpin(run.items)

    def _unpin(self, items: Sequence[Item]) -> None:
        for item in items:
            if item.pinned:
                item.pinned = False
                self._pins.unpin(item.certificate)

    # --- what the workers report ------------------------------------------------------------------------------------

    def runs_job(self, job_id: JobId) -> bool:
        return job_id in self._jobs

    def job_ended(self, job_id: JobId, outcomes: set[JobOutcome], now: float) -> None:
        """Every rank has answered for one object."""
        run = self._jobs.pop(job_id)
        index = run.jobs.pop(job_id)
        self._unpin([run.items[index]])
        if outcomes != {JobOutcome.DONE}:
            self._count(Setback.COPY_FAILED)
            run.failed = True
            run.copy_failed |= JobOutcome.COPY_FAILED in outcomes
        if run.jobs:
            return  # other objects are still being copied
        if run.session not in self._runs:
            self._give_back(run, now)  # the server is gone, or only stands still
            return
        # A run is committed whole or not at all: a commit publishes every slot of its reservation.
        if run.failed or run.state is not RunState.COPYING or now > run.lease_until:
            self._fail(run, now)
        elif run.is_repair:
            self._wire.done_reading(run.session, now)
            self._acknowledge(run, now)
        else:
            run.state = RunState.COMMITTING
            assert run.call is not None
            run.call = self._wire.commit(run.session, run.call, now)

    # --- what the server answers ------------------------------------------------------------------------------------

    def owns(self, session: SessionId) -> bool:
        return session in self._runs or session in self._questions

    def handle(self, event: WireEvent, now: float) -> None:
        """Feed one answer of the wire layer to the run or question that waits for it."""
        match event:
            case LookupAnswered(session=session, found=found) if session in self._questions:
                self._answered(self._questions.pop(session), found, now)
            case LookupAnswered(session=session, found=found):
                self._located(self._runs[session][0], found, now)
            case Retrieved(session=session, offsets=offsets):
                self._mendable(self._runs[session][0], offsets, now)
            case Reserved():
                self._reserved(event, now)
            case Committed():
                self._committed(event, now)
            case CallFailed(session=session) if session in self._questions:
                question = self._questions.pop(session)
                self._wire.close(session, now)
                self._missed(question.run, question.items, now)
                self._close_if_ended(question.run.prefix.progress, now)
            case CallFailed():
                for run in [r for r in self._runs.get(event.session, ()) if r.call in (None, event.call)]:
                    self._count(Setback.CALL_FAILED)
                    self._fail(run, now)

    def _run_of(self, session: SessionId, call: CallId) -> Run | None:
        return next((run for run in self._runs.get(session, ()) if run.call == call), None)

    def _reserved(self, event: Reserved, now: float) -> None:
        run = self._run_of(event.session, event.call)
        if run is None:
            return
        run.lease_until = event.lease_until
        first = run.span[0]
        without: list[Item] = []
        kept: list[Item] = []
        for item in run.items:
            start = first if run.is_boundary else item.mark
            pieces = range(start, start + len(item.name.pieces))
            item.slots = tuple(event.offsets.get(piece, SKIP) for piece in pieces)
            (kept if any(slot != SKIP for slot in item.slots) else without).append(item)
        self._unpin(without)
        run.items = kept
        if without:
            self._ask_about(run, without, now)
        if kept:
            run.state = RunState.RESERVED
        else:
            self._end(run, now)

    def _ask_about(self, run: Run, items: list[Item], now: float) -> None:
        """No slot: stored already, being written by another, or no room. Only a lookup tells."""
        self._count(Setback.NO_SLOT, len(items))
        if run.is_boundary:
            sequence: Sequence[bytes] = items[0].name.pieces
        else:
            sequence = run.prefix.digests.chunks(items[-1].mark + 1)
        session = self._wire.open(sequence, run.prefix.salt)
        self._questions[session] = Question(run, items, session)
        self._wire.lookup(session, len(sequence), now)

    def _answered(self, question: Question, found: int, now: float) -> None:
        run = question.run
        self._wire.close(question.session, now)
        missed: list[Item] = []
        for item in question.items:
            needed = len(item.name.pieces) if run.is_boundary else item.mark + 1
            if found >= needed:
                self._acknowledge_item(run, item)
            else:
                missed.append(item)
        if not run.is_boundary:
            self._note_evicted(run, question.items[-1].mark, found)
        self._missed(run, missed, now)
        self._close_if_ended(run.prefix.progress, now)

    def _note_evicted(self, run: Run, asked: int, found: int) -> None:
        """Chunks that were acknowledged once but are gone: they have to be stored again before any behind them."""
        progress, chunk_tokens = run.prefix.progress, self._geometry.chunk_tokens
        for digest in run.prefix.digests.chunks(asked)[found:]:
            self._known.gone(digest)
        evicted_from = found * chunk_tokens
        if evicted_from < progress.start_tokens and found not in progress.open:
            self._count(Count.EVICTED_CHUNKS_SEEN, progress.start_tokens // chunk_tokens - found)
            progress.num_loaded_tokens = min(progress.num_loaded_tokens, evicted_from)
            progress.num_stored_tokens = min(progress.num_stored_tokens, evicted_from)
            if not progress.ended:
                self.follow(run.prefix)

    def _committed(self, event: Committed, now: float) -> None:
        run = self._run_of(event.session, event.call)
        if run is None:
            return
        if event.accepted:
            self._acknowledge(run, now)
        else:
            self._count(Setback.COMMIT_REFUSED)
            self._fail(run, now)

    def _located(self, run: Run, found: int, now: float) -> None:
        start, end = run.span
        if found < end:
            for item in run.items:
                self._known.gone(item.name.digest)  # nothing to mend: it is stored like any other object next time
            self._fail(run, now)
            return
        self._wire.free(run.session, 0, start, now)
        self._wire.retrieve(run.session, start, end, now)

    def _mendable(self, run: Run, offsets: tuple[int, ...], now: float) -> None:
        run.items[0].slots = offsets
        run.lease_until = now + self._lease_s
        run.state = RunState.RESERVED

    # --- ends -------------------------------------------------------------------------------------------------------

    def _acknowledge(self, run: Run, now: float) -> None:
        for item in run.items:
            self._acknowledge_item(run, item)
        if run.is_repair:
            self._count(Count.OBJECTS_MENDED, len(run.items))
        else:
            self._count(Count.OBJECTS_STORED, len(run.items))
            self._count(Count.STORED_TOKENS, sum(self._tokens_in(run, item) for item in run.items))
            self._count(Count.STORED_BYTES, sum(self._objects.payload_bytes(item.name) for item in run.items))
        self._end(run, now)

    def _announcement(self, run: Run, item: Item) -> ObjectStored:
        chunk_tokens = self._geometry.chunk_tokens
        end = item.mark if run.is_boundary else (item.mark + 1) * chunk_tokens
        first = (end - 1) // chunk_tokens  # the chunk in which its last token lies
        parent = run.prefix.digests.chunk(first - 1) if first else None
        group = next(index for index, part in enumerate(item.name.columns) if part)
        return ObjectStored(item.name.digest, parent, run.prefix.source, first * chunk_tokens, end, group)

    def _tokens_in(self, run: Run, item: Item) -> int:
        """Tokens whose append-only pages the object holds."""
        if not run.is_boundary:
            return self._geometry.chunk_tokens
        return item.mark % self._geometry.chunk_tokens if self._geometry.has_append_only else 0

    def _acknowledge_item(self, run: Run, item: Item) -> None:
        progress = run.prefix.progress
        self._known.acknowledge(item.name.digest)
        if self._known.announcements is not None:
            self._known.announcements.stored(self._announcement(run, item))
        if run.is_boundary:
            progress.open_boundaries.discard(item.mark)
        else:
            progress.open.discard(item.mark)
            progress.acknowledge(item.mark, self._geometry.chunk_tokens)

    def _fail(self, run: Run, now: float) -> None:
        if run.jobs:
            run.failed = True  # workers still read the blocks: the last report ends the run
            return
        self._missed(run, run.items, now)
        self._end(run, now)

    def _missed(self, run: Run, items: Sequence[Item], now: float) -> None:
        """Not stored, to be tried again a bounded number of times while the request lives."""
        progress = run.prefix.progress
        for item in items:
            key = -item.mark if run.is_boundary else item.mark
            progress.attempts[key] = progress.attempts.get(key, 0) + 1
            progress.retry_at[key] = now + RETRY_S
            (progress.open_boundaries if run.is_boundary else progress.open).discard(item.mark)
            if run.is_boundary and progress.attempts[key] < MAX_ATTEMPTS:
                progress.missed_boundaries.add(item.mark)

    def _give_back(self, run: Run, now: float) -> None:
        """No copy into its slots runs any more. What has no seal is there from now on, to be mended in place."""
        if run.reservation is None:
            return
        if run.copy_failed:  # for a reason that is not known here: /dev/shm may be full
            self._wire.leave(run.reservation)
            return
        self._wire.give_back(run.reservation, now)
        if not run.sealed:
            for item in run.items:
                self._known.poison(item.name.digest)

    def _end(self, run: Run, now: float) -> None:
        self._give_back(run, now)
        self._unpin(run.items)
        runs = self._runs[run.session]
        runs.remove(run)
        if not runs:
            del self._runs[run.session]
            if run.session != run.prefix.progress.session:
                self._wire.close(run.session, now)
        self._close_if_ended(run.prefix.progress, now)

    def request_ended(self, prefix: Prefix, now: float) -> None:
        """The request is gone; its runs go on, and the last of them closes its chunk session."""
        self._unsettled.pop(prefix.source.request_id, None)
        prefix.progress.ended = True
        self._close_if_ended(prefix.progress, now)

    def _close_if_ended(self, progress: Progress, now: float) -> None:
        session = progress.session
        if not progress.ended or session is None or session in self._runs:
            return
        progress.session = None
        self._wire.close(session, now)

    def epoch_ended(self, now: float) -> None:
        """The server is gone, or left for another namespace. Pins of running jobs wait for the workers' reports."""
        for run in list(self._all_runs()):
            if not run.jobs:
                self._give_back(run, now)
                self._unpin(run.items)
        for session in (*self._runs, *self._questions):
            self._wire.close(session, now)  # nothing happens on a server that is gone
        self._questions.clear()
        self._runs.clear()
        self._known.clear()
