"""The scheduler half: vLLM's scheduler hooks come in as plain calls, answers of server and workers are fed to the part
that waits for them, and a `StepPlan` goes out with every engine step.

No hook raises: whatever goes wrong with one request makes that request a miss (I16).
"""

from __future__ import annotations

import itertools
import logging
import sys
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import msgspec

from lmcache_mp_safe.announcements import Announcements, News
from lmcache_mp_safe.config import MAX_OFFLOAD_TOKENS, SafeConfig
from lmcache_mp_safe.contract import JobOutcome, LoadJob, PoolSegment, RankLayout, StepPlan, StepReport
from lmcache_mp_safe.errors import ConfigError, UnnameableError
from lmcache_mp_safe.geometry.groups import ModelGeometry
from lmcache_mp_safe.identity import PrefixDigests
from lmcache_mp_safe.ids import JobId, RequestId, ServerEpoch
from lmcache_mp_safe.metrics.counts import Count, Jobs, Level, Miss, Slots
from lmcache_mp_safe.metrics.tally import Sample, Tally
from lmcache_mp_safe.scheduler.certify import BlockPool
from lmcache_mp_safe.scheduler.hits import NO_EPOCH, Hit, Hits, with_limit
from lmcache_mp_safe.scheduler.known import Known
from lmcache_mp_safe.scheduler.machine import RequestRecord, Rules
from lmcache_mp_safe.scheduler.objects import ModelObjects
from lmcache_mp_safe.scheduler.phases import Phase
from lmcache_mp_safe.scheduler.progress import Prefix, Progress, Source
from lmcache_mp_safe.scheduler.stores import Stores
from lmcache_mp_safe.wire import Connected, Lost, Wire, WireEvent

logger = logging.getLogger(__name__)

# Boundaries for which a poll computes whether this process remembers them: more cost more than they find.
_REMEMBERED_LOOKBACK = 64
_REMEMBERED_LOOKBACK_TAIL_ONLY = 16


class RequestSource(Source, Protocol):
    """One vLLM request as `compat/requests.py` shows it."""

    @property
    def salt(self) -> str: ...
    @property
    def skips_reading(self) -> bool: ...
    @property
    def is_resumable(self) -> bool: ...
    @property
    def user_configs(self) -> dict[str, object]: ...
    def extra_keys(self, start: int, end: int) -> object: ...


@dataclass(frozen=True)
class Role:
    """What `kv_role` allows: a producer stores only, a consumer loads only."""

    may_load: bool
    may_store: bool


@dataclass(frozen=True)
class CachedTokens:
    """What one request did not have to compute, as of its last admission.

    Attributes:
        local: prompt tokens that vLLM's own cache served.
        external: tokens from the start of the prompt that a load has brought or completed; 0 without one.
    """

    local: int = 0
    external: int = 0


@dataclass
class Tracked:
    """Everything known about one request.

    Attributes:
        answered: vLLM has a final answer and has not admitted the request yet.
        declined: this lookup was answered without asking anybody, and counted.
        asked: vLLM has asked since the last admission.
        local_tokens: its own hit when it asked last.
    """

    source: RequestSource
    prefix: Prefix
    hit: Hit
    store_limit: int | None
    bypassed: bool = False
    answered: bool = False
    declined: bool = False
    asked: bool = False
    local_tokens: int = 0
    cached: CachedTokens = field(default_factory=CachedTokens)


@dataclass
class _JobAnswers:
    """Reports of the ranks for one job."""

    ranks: set[int] = field(default_factory=set)
    outcomes: set[JobOutcome] = field(default_factory=set)
    bad_objects: set[int] = field(default_factory=set)


@dataclass
class _Attachment:
    """Everything that belongs to one namespace on the server."""

    wire: Wire
    known: Known
    hits: Hits
    stores: Stores

    @property
    def is_busy(self) -> bool:
        """Whether copies or answers are under way."""
        return self.stores.busy or bool(self.hits.running_loads) or self.wire.unsettled


class SchedulerHalf:
    """Decides for one engine.

    Args:
        make_wire: a wire for (object size in bytes, generation text of the namespace, first epoch).
        keep_tokens: prompt tokens that a hit must leave to be computed.
        margin_tokens: further tokens below the last block boundary, a multiple of the block.
        clock: monotonic seconds.
        tally: what is counted; the wires may count into the same one.
        announcements: takes what is stored and what is gone; None: nobody wants to know.
        random_text: fresh random text, for the generation after a cache reset.
    """

    def __init__(
        self,
        config: SafeConfig,
        geometry: ModelGeometry,
        role: Role,
        *,
        make_wire: Callable[[int, str, ServerEpoch], Wire],
        keep_tokens: int,
        margin_tokens: int = 0,
        clock: Callable[[], float],
        random_text: Callable[[], str],
        tally: Tally | None = None,
        announcements: Announcements | None = None,
    ) -> None:
        self._config = config
        self._geometry = geometry
        self._role = role
        self._make_wire = make_wire
        self._keep_tokens = keep_tokens
        self._margin_tokens = margin_tokens
        self._clock = clock
        self._random_text = random_text
        self._job_ids = itertools.count(1)
        self._plan_number = 0
        self._book: dict[RequestId, Tracked] = {}
        self._answers: dict[JobId, _JobAnswers] = {}
        self._pool: BlockPool | None = None
        self._ranks: tuple[RankLayout, ...] = ()
        self._objects: ModelObjects | None = None
        self._live: _Attachment | None = None
        self._retired: list[_Attachment] = []
        self._refused: list[LoadJob] = []
        self._refused_loads: dict[JobId, RequestId] = {}
        self._unusable_epoch: ServerEpoch | None = None
        self._told_segment: PoolSegment | None = None  # what the workers map, by the last plan
        self._next_epoch = ServerEpoch(1)
        self._tally = tally if tally is not None else Tally()
        self._announcements = announcements
        self._last_plan: float | None = None

    # --- start and end ----------------------------------------------------------------------------------------------

    def bind_pool(self, pool: BlockPool) -> None:
        self._pool = pool

    def set_ranks(self, ranks: Sequence[RankLayout]) -> None:
        """The layouts of all ranks are known: the object size follows, and the server can be asked."""
        if self._pool is None:
            raise ConfigError("vLLM did not bind its block pool before the workers' layouts arrived")
        self._ranks = tuple(sorted(ranks, key=lambda rank: rank.rank))
        self._objects = ModelObjects(self._geometry, self._ranks)
        self._live = self._attach("")

    def wait_until_up(self, deadline_s: float, sleep: Callable[[float], None]) -> bool:
        """Poll until the server is registered and its pool is proven.

        Waits `deadline_s`, and up to a minute for the first attempt to end, so that `wire.why_down` says why; every
        step of an attempt has a deadline of its own.
        """
        start = self._clock()
        while (waited := self._clock() - start) < deadline_s or (waited < 60 and not self.wire.has_tried):
            self._advance(self._clock())
            if self._usable():
                return True
            sleep(0.01)
        return False

    @property
    def objects(self) -> ModelObjects:
        if self._objects is None:
            raise ConfigError("the workers' layouts are not known yet")
        return self._objects

    @property
    def wire(self) -> Wire:
        if self._live is None:
            raise ConfigError("the workers' layouts are not known yet")
        return self._live.wire

    def _attach(self, generation: str) -> _Attachment:
        assert self._pool is not None
        now, known = self._clock(), Known(announcements=self._announcements)
        wire = self._make_wire(self.objects.layout.object_bytes, generation, self._next_epoch)
        wire.start(now)
        rules = Rules(
            chunk_tokens=self._geometry.chunk_tokens,
            block_tokens=self._geometry.block_tokens,
            has_chunks=self._geometry.has_append_only,
            needs_boundary=self._geometry.needs_boundary_object,
            max_probes=self._config.max_probes if self._geometry.has_boundary_groups else 2,
        )
        hits = Hits(
            wire,
            self.objects,
            rules,
            known,
            lookup_timeout_s=self._config.lookup_timeout_s,
            hold_s=self._config.hold_s,
            next_job=self._next_job,
            tally=self._tally,
        )
        stores = Stores(
            wire,
            self.objects,
            known,
            self._pool,
            pin_fraction=self._config.pin_fraction,
            call_bytes=self._config.call_bytes,
            lease_s=self._config.lease_s,
            save_decode=self._config.save_decode_cache,
            next_job=self._next_job,
            tally=self._tally,
        )
        return _Attachment(wire, known, hits, stores)

    def shutdown(self, deadline_s: float) -> None:
        for attachment in [a for a in (self._live, *self._retired) if a is not None]:
            attachment.wire.shutdown(deadline_s)
        self._live, self._retired = None, []

    def reset(self) -> bool:
        """Nothing from before may be hit again, by this process or another: move to a fresh namespace."""
        if self._live is None:
            return True
        now = self._clock()
        old = self._live
        old.stores.drop_undispatched_pins()
        self._end_epoch(old, now)
        self._next_epoch = ServerEpoch(max(self._next_epoch, old.wire.epoch + 1))
        self._retired.append(old)
        self._live = self._attach(self._random_text())
        for tracked in self._book.values():
            self._live.hits.track(tracked.hit)
            self._live.stores.follow(tracked.prefix)
        self._tally.add(Count.RESETS)
        return True

    # --- scheduler hooks --------------------------------------------------------------------------------------------

    def arrived(self, source: RequestSource) -> None:
        """A request came in; with eager prefetch its lookup starts now."""
        if self._config.eager_prefetch:
            self._ask(source, 0)

    def matched_tokens(self, source: RequestSource, local_tokens: int) -> int | None:
        """Tokens beyond the local prefix-cache hit that can be loaded; None while that is being found out."""
        tracked = self._book.get(source.request_id)
        if tracked is not None and tracked.answered and self._live is not None:
            # Asked again after an answer: vLLM found no room. Blocks that only a store still holds may be missing.
            self._live.stores.give_way(self._plan_number)
        answer = self._ask(source, local_tokens)
        if tracked is not None:
            tracked.answered = answer is not None
        return answer

    def _ask(self, source: RequestSource, local_tokens: int) -> int | None:
        try:
            return self._matched_tokens(source, local_tokens)
        except Exception:
            self._give_up(source.request_id, "lookup")
            return 0

    def _matched_tokens(self, source: RequestSource, local_tokens: int) -> int | None:
        now = self._clock()
        self._advance(now)
        if self._live is None or not self._role.may_load:
            return 0
        tracked = self._track(source)
        tracked.asked, tracked.local_tokens = True, local_tokens
        before = tracked.hit.record
        why = self._why_not(tracked)
        if why is not None:
            if not tracked.declined:
                self._tally.add(Count.LOOKUPS)
                self._tally.add(why)
            tracked.declined = True
            return 0
        if before.phase in (Phase.NEW, Phase.COMPUTING):
            limit = self._deepest_hit(source.num_tokens)
            remembered = self._remembered(tracked.prefix.digests, limit, local_tokens)
            tracked.hit.record = with_limit(before, limit, remembered)
            tracked.hit.whole_chunks = source.num_tokens // self._geometry.chunk_tokens
        return self._live.hits.poll(tracked.hit, local_tokens, now)

    def _why_not(self, tracked: Tracked) -> Miss | None:
        """Why nobody needs to be asked."""
        if tracked.source.skips_reading:
            return Miss.UNWANTED
        if tracked.bypassed:
            return Miss.BYPASSED
        if not self._usable() and tracked.hit.record.phase in (Phase.NEW, Phase.COMPUTING):
            return Miss.SERVER_DOWN
        return None

    def _deepest_hit(self, num_tokens: int) -> int:
        """The deepest boundary at which a prompt of this length may be resumed."""
        block = self._geometry.block_tokens
        return max(0, max(0, num_tokens - self._keep_tokens) // block * block - self._margin_tokens)

    def allocated(self, source: RequestSource, external_tokens: int, blocks: Sequence[Sequence[int]]) -> None:
        """vLLM allocated blocks (ids per group) and expects this many tokens to be loaded into them."""
        try:
            if self._live is None:
                if external_tokens:
                    self._refuse(source.request_id)
                return
            tracked = self._track(source)
            if tracked.asked:  # vLLM calls again when a load has arrived
                tracked.cached = CachedTokens(tracked.local_tokens)
            tracked.answered = tracked.declined = tracked.asked = False
            self._live.hits.admitted(tracked.hit, external_tokens, blocks, self._clock())
        except Exception:
            self._give_up(source.request_id, "allocation")
            if external_tokens:
                self._refuse(source.request_id)  # vLLM waits for a load; silence would hang the request

    def build_plan(self, scheduled: Container[RequestId], preempted: bool) -> StepPlan:
        """What the workers are to do in the step that was just scheduled."""
        now = self._clock()
        self._plan_number += 1
        refused, self._refused = tuple(self._refused), []
        if self._live is None:
            return StepPlan(self._plan_number, loads=refused)
        self._advance(now)
        if self._last_plan is not None and not self._usable():
            self._tally.add(Count.BYPASS_SECONDS, now - self._last_plan)
        self._last_plan = now
        stores = self._live.stores
        if preempted:
            stores.give_way(self._plan_number)
        if self._role.may_store and self._usable():
            for request_id in stores.due(scheduled):
                self._consider(request_id, now)
        jobs, moved = stores.plan(self._plan_number, now)
        loads = (*self._live.hits.take_loads(), *refused)
        self._told_segment = self._segment()
        return StepPlan(self._plan_number, self._told_segment, tuple(jobs), loads, tuple(moved))

    def finished(self, source: RequestSource) -> None:
        """The request ended; its blocks are freed right after. Last chance to certify what it leaves behind."""
        tracked = self._book.get(source.request_id)
        if tracked is None or self._live is None:
            return
        now = self._clock()
        try:
            self._advance(now)
            loading = tracked.hit.record.phase is Phase.LOADING
            if self._role.may_store and self._usable() and not loading:
                self._consider(source.request_id, now)
            self._live.hits.finished(tracked.hit, now)
            self._live.stores.request_ended(tracked.prefix, now)
        except Exception:
            self._give_up(source.request_id, "finish")
        self._book.pop(source.request_id, None)

    def reported(self, report: StepReport) -> set[RequestId]:
        """What the workers had to say after a step.

        Returns:
            Requests whose load failed.
        """
        failed: set[RequestId] = set()
        for rank, epoch, why in report.unusable:
            logger.error("rank %d cannot use the LMCache server's memory: %s", rank, why)
            self._unusable_epoch = epoch
        now = self._clock()
        for job in report.jobs:
            answers = self._answers.setdefault(job.job_id, _JobAnswers())
            answers.ranks.add(job.rank)
            answers.outcomes.add(job.outcome)
            answers.bad_objects.update(job.bad_objects)
            if job.outcome is not JobOutcome.DONE:
                logger.warning("job %d, rank %d: %s %s", job.job_id, job.rank, job.outcome.value, job.detail)
            if len(answers.ranks) == len(self._ranks):
                del self._answers[job.job_id]
                failed |= self._job_ended(job.job_id, answers, now)
        return failed

    @property
    def has_pending_work(self) -> bool:
        """Whether the engine must keep stepping so that copies and answers get through.

        The loss of a server has to get through too: its pool takes memory for as long as a worker maps it.
        """
        if self._live is not None and self._told_segment is not None and not self.wire.up:
            return True
        return bool(self._refused_loads) or any(a.is_busy for a in self._attachments())

    @property
    def has_pending_block_frees(self) -> bool:
        """Whether workers hold jobs whose end gives blocks back, so that vLLM may wait instead of preempting."""
        return any(a.stores.copying for a in self._attachments())

    @property
    def pinned_blocks(self) -> int:
        return sum(a.stores.pinned_blocks for a in self._attachments())

    @property
    def counters(self) -> Mapping[str, float]:
        """What was counted since the start, by the names in `metrics/counts.py`."""
        return self._tally.totals

    def take_sample(self) -> Sample | None:
        """What is new for the metrics since the last call; None if nothing is."""
        return None if self._live is None else self._tally.take(self._levels(self._live))

    def take_announcements(self) -> list[News]:
        """What is stored and what is gone since the last call."""
        return [] if self._announcements is None else self._announcements.take()

    def _levels(self, live: _Attachment) -> dict[str, float]:
        attachments = list(self._attachments())
        return {
            Level.PINNED_BLOCKS: self.pinned_blocks,
            Level.EPOCH: live.wire.epoch,
            Level.SERVER_UP: int(self._usable()),
            Level.CALLS_UNANSWERED: sum(a.wire.unanswered for a in attachments),
            Slots.WRITING: sum(a.stores.slots_written for a in attachments),
            Slots.READING: sum(a.hits.slots_read for a in attachments),
            Jobs.STORE: sum(a.stores.jobs for a in attachments),
            Jobs.LOAD: sum(a.hits.running_loads for a in attachments),
        }

    def cached_tokens(self, request_id: RequestId) -> CachedTokens:
        """What a live request did not have to compute."""
        tracked = self._book.get(request_id)
        return CachedTokens() if tracked is None else tracked.cached

    def num_stored_tokens(self, request_id: RequestId) -> int:
        """Tokens of a live request that the server has acknowledged, contiguous from 0 or from what it loaded."""
        return self._book[request_id].prefix.progress.num_stored_tokens

    # --- inside -----------------------------------------------------------------------------------------------------

    def _next_job(self) -> JobId:
        return JobId(next(self._job_ids))

    def _attachments(self) -> Iterator[_Attachment]:
        if self._live is not None:
            yield self._live
        yield from self._retired

    def _usable(self) -> bool:
        return self._live is not None and self._live.wire.up and self._live.wire.epoch != self._unusable_epoch

    def _segment(self) -> PoolSegment | None:
        segment = self.wire.segment
        if segment is None:
            return None
        slices = tuple((part.offset, part.size) for part in self.objects.layout.slices)
        return msgspec.structs.replace(segment, slices=slices, namespace=self.wire.namespace)

    def _track(self, source: RequestSource) -> Tracked:
        tracked = self._book.get(source.request_id)
        if tracked is not None and tracked.source is source:
            return tracked
        if tracked is not None:
            self.finished(tracked.source)  # another request under a reused id
        digests = PrefixDigests(source.tokens, source.extra_keys, self._geometry.chunk_tokens)
        hit = Hit(RequestRecord(source.request_id), digests, source.salt)
        limit = source.user_configs.get(MAX_OFFLOAD_TOKENS)
        store_limit = limit if isinstance(limit, int) and not isinstance(limit, bool) and limit >= 0 else None
        prefix = Prefix(source, digests, source.salt, Progress())
        tracked = Tracked(source, prefix, hit, store_limit, bypassed=source.is_resumable)
        self._book[source.request_id] = tracked
        assert self._live is not None
        self._live.hits.track(hit)
        self._live.stores.follow(prefix)
        return tracked

    def source_of(self, request_id: RequestId) -> RequestSource | None:
        tracked = self._book.get(request_id)
        return None if tracked is None else tracked.source

    def _remembered(self, digests: PrefixDigests, limit: int, local_tokens: int) -> tuple[int, ...]:
        assert self._live is not None
        known = self._live.known
        if not len(known.acknowledged) and not len(known.loaded):
            return ()
        lookback = _REMEMBERED_LOOKBACK if self._geometry.has_boundary_groups else _REMEMBERED_LOOKBACK_TAIL_ONLY
        candidates = itertools.islice(range(limit, local_tokens, -self._geometry.block_tokens), lookback)
        return tuple(
            boundary
            for boundary in candidates
            if self._geometry.needs_boundary_object(boundary)
            and self._remembers_chunk_below(known, digests, boundary)
            and known.remembers(digests.boundary(boundary))
        )

    def _remembers_chunk_below(self, known: Known, digests: PrefixDigests, boundary: int) -> bool:
        """Whether a hit at the boundary has its last chunk, as far as this process knows. Cheaper than a new digest."""
        below = boundary // self._geometry.chunk_tokens
        return not below or not self._geometry.has_append_only or known.remembers(digests.chunk(below - 1))

    def _consider(self, request_id: RequestId, now: float) -> None:
        tracked = self._book.get(request_id)
        if tracked is None or tracked.bypassed or self._live is None:
            return
        try:
            self._live.stores.consider(tracked.prefix, tracked.store_limit, self._plan_number, now)
        except Exception:
            self._give_up(request_id, "store")

    def _advance(self, now: float) -> None:
        """Take in whatever the server has answered."""
        if self._live is None:
            return
        for attachment in list(self._retired):
            attachment.wire.poll(now)
            if not attachment.is_busy and not attachment.wire.owes:
                attachment.wire.shutdown(0.0)
                self._retired.remove(attachment)
        live = self._live
        for event in live.wire.poll(now):
            if isinstance(event, Lost):
                self._tally.add(Count.CONNECTIONS_LOST)
                logger.warning("LMCache server lost: %s; requests are computed without it", event.why)
                self._end_epoch(live, now)
            elif isinstance(event, Connected):
                self._tally.add(Count.CONNECTIONS)
                logger.info("LMCache server is up: epoch %d, pool %s", event.epoch, event.segment.name)
            elif live.hits.owns(event.session):
                self._feed(live.hits.handle, event, now)
            elif live.stores.owns(event.session):
                self._feed(live.stores.handle, event, now)

    def _feed(self, handle: Callable[[WireEvent, float], None], event: WireEvent, now: float) -> None:
        try:
            handle(event, now)
        except Exception:
            # The request that waits for this answer times out into a miss.
            self._tally.add(Count.INTERNAL_ERRORS)
            logger.exception("an answer of the LMCache server could not be handled")

    def _end_epoch(self, attachment: _Attachment, now: float) -> None:
        attachment.hits.epoch_ended(now)
        attachment.stores.epoch_ended(now)
        for tracked in self._book.values():
            if tracked.prefix.progress.session is not None:
                attachment.wire.close(tracked.prefix.progress.session, now)
            tracked.prefix.progress.forget()
            attachment.stores.follow(tracked.prefix)

    def _job_ended(self, job_id: JobId, answers: _JobAnswers, now: float) -> set[RequestId]:
        """Returns the request whose load has failed with this, if any."""
        refused = self._refused_loads.pop(job_id, None)
        if refused is not None:
            return {refused}
        for attachment in [a for a in (self._live, *self._retired) if a is not None]:
            if attachment.hits.runs_load(job_id):
                ended = attachment.hits.load_ended(job_id, answers.outcomes, answers.bad_objects, now)
                tracked = self._book.get(ended.request_id)
                if ended.arrived and tracked is not None:
                    tracked.cached = replace(tracked.cached, external=ended.boundary)
                    tracked.prefix.progress.num_loaded_tokens = ended.boundary
                return set() if ended.arrived else {ended.request_id}
            if attachment.stores.runs_job(job_id):
                attachment.stores.job_ended(job_id, answers.outcomes, now)
        return set()

    def _refuse(self, request_id: RequestId) -> None:
        self._tally.add(Count.LOADS_REFUSED)
        job = LoadJob(self._next_job(), NO_EPOCH, request_id, ())
        self._refused.append(job)
        self._refused_loads[job.job_id] = request_id

    def _give_up(self, request_id: RequestId, doing: str) -> None:
        """An unnameable request or a bug: compute it without the cache from here on."""
        if isinstance(why := sys.exception(), UnnameableError):
            logger.info("request %s is computed without the cache: %s", request_id, why)
        else:
            self._tally.add(Count.INTERNAL_ERRORS)
            logger.exception("request %s is computed without the cache from here on (%s failed)", request_id, doing)
        tracked = self._book.get(request_id)
        if tracked is not None:
            tracked.bypassed = True
