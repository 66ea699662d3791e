"""A small world for tests of the scheduler half: a block pool like vLLM's, requests, a wire with a server behind it,
and workers that seal or load at once. Pages have no bytes here: a seal says which object a slot holds, and `copied`
remembers which blocks it was copied from.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from lmcache_mp_safe.announcements import Announcements
from lmcache_mp_safe.config import SafeConfig
from lmcache_mp_safe.contract import SKIP, JobOutcome, JobReport, LoadJob, RankLayout, StepPlan, StepReport, StoreJob
from lmcache_mp_safe.geometry.groups import Group, GroupKind, ModelGeometry
from lmcache_mp_safe.geometry.seal import Seal, layout_in
from lmcache_mp_safe.ids import JobId, RequestId, ServerEpoch
from lmcache_mp_safe.scheduler.half import Role, SchedulerHalf
from lmcache_mp_safe.testing.fake_wire import FakeWire

BLOCK = 4
FULL = Group(GroupKind.APPEND_ONLY, BLOCK)
STATE = Group(GroupKind.RECURRENT, BLOCK)
WINDOW = Group(GroupKind.WINDOW, BLOCK, 2 * BLOCK)


@dataclass
class FakeBlock:
    block_id: int
    ref_cnt: int = 0
    block_hash: Any = None
    is_null: bool = False


class FakePool:
    """vLLM's block pool in small: a freed block keeps its hash until it is handed out again.

    Attributes:
        reuses_at_once: hands out the block that was freed last, where vLLM takes the one that was freed first.
    """

    def __init__(self, total_blocks: int) -> None:
        self.total_blocks = total_blocks
        self.blocks = [FakeBlock(number) for number in range(total_blocks)]
        self.blocks[0].is_null = True
        self.free = self.blocks[1:]
        self.cached: dict[tuple[Any, int], list[FakeBlock]] = {}  # the first is the one that is found
        self.reuses_at_once = False

    def find(self, block_hash: Any, group: int) -> FakeBlock | None:
        blocks = self.cached.get((block_hash, group))
        return blocks[0] if blocks else None

    def find_all(self, block_hashes: Sequence[Any], group: int) -> list[FakeBlock] | None:
        blocks = [block for block_hash in block_hashes if (block := self.find(block_hash, group)) is not None]
        return blocks if len(blocks) == len(block_hashes) else None

    def pin(self, blocks: Sequence[FakeBlock]) -> None:
        for block in blocks:
            if block.ref_cnt == 0:
                self.free.remove(block)
            block.ref_cnt += 1

    def unpin(self, blocks: Sequence[FakeBlock]) -> None:
        """The last block is handed out before the first, and what has no hash before everything else."""
        freed = []
        for block in reversed(blocks):
            assert block.ref_cnt > 0, "unpinned more often than pinned"
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                freed.append(block)
        self.free[:0] = [block for block in freed if block.block_hash is None]
        self.free += [block for block in freed if block.block_hash is not None]

    def take(self) -> FakeBlock:
        block = self.free.pop(-1 if self.reuses_at_once else 0)
        self.uncache(block)
        block.ref_cnt = 1
        return block

    def cache(self, block: FakeBlock, block_hash: Any, group: int) -> None:
        block.block_hash = (block_hash, group)
        self.cached.setdefault(block.block_hash, []).append(block)

    def uncache(self, block: FakeBlock) -> None:
        if block.block_hash is not None:
            self.cached[block.block_hash].remove(block)
        block.block_hash = None

    @property
    def held(self) -> int:
        return sum(block.ref_cnt for block in self.blocks)


@dataclass
class FakeRequest:
    """A request as `compat/requests.py` would show it."""

    name: str
    token_ids: list[int]
    num_prompt_tokens: int = 0
    num_computed_tokens: int = 0
    salt: str = ""
    extra: Any = None
    skips_reading: bool = False
    is_resumable: bool = False
    user_configs: dict[str, Any] = field(default_factory=dict)
    blocks: list[FakeBlock] = field(default_factory=list)
    # (group, column) -> block, as vLLM's block table names it: scratch blocks where no state was left
    table: dict[tuple[int, int], FakeBlock] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.request_id = RequestId(self.name)
        self.num_prompt_tokens = self.num_prompt_tokens or len(self.token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    def tokens(self, start: int, end: int) -> Sequence[int]:
        return self.token_ids[start:end]

    def extra_keys(self, start: int, end: int) -> Any:
        return self.extra

    def block_hashes(self, columns: range, block_tokens: int) -> list[Any] | None:
        hashes = [self.block_hash(column, block_tokens) for column in columns]
        return None if None in hashes else hashes

    def block_hash(self, column: int, block_tokens: int) -> Any | None:
        end = (column + 1) * block_tokens
        if end > len(self.token_ids):
            return None
        return hashlib.sha256(repr((self.salt, self.extra, self.token_ids[:end])).encode()).digest()


class World:
    """One engine with its scheduler half; time stands still unless a test moves it."""

    def __init__(
        self,
        groups: Sequence[Group] = (FULL, STATE),
        *,
        blocks: int = 200,
        ranks: int = 1,
        chunk_tokens: int = BLOCK,
        role: Role | None = None,
        wire: FakeWire | None = None,
        margin_tokens: int = 0,
        layouts: Sequence[RankLayout] | None = None,
        **settings: Any,
    ) -> None:
        self.now = 1000.0
        self.pool = FakePool(blocks)
        self.geometry = ModelGeometry.of(groups, chunk_tokens)
        self.wires: list[FakeWire] = []
        self._given_wire = wire
        self.copied: dict[int, tuple[tuple[int, ...], ...]] = {}
        self.loaded: list[LoadJob] = []
        self.hold_reports = False
        self.outcome = JobOutcome.DONE
        self.running: list[StoreJob | LoadJob] = []
        self.announcements = Announcements()
        generations = itertools.count()
        self.half = SchedulerHalf(
            SafeConfig(**{"pin_fraction": 1.0, "save_decode_cache": True, **settings}),
            self.geometry,
            role or Role(may_load=True, may_store=True),
            make_wire=self._make_wire,  # type: ignore[arg-type]
            keep_tokens=1,
            margin_tokens=margin_tokens,
            clock=lambda: self.now,
            random_text=lambda: f"generation-{next(generations)}",
            announcements=self.announcements,
        )
        self.half.bind_pool(self.pool)
        pages = tuple(100 for _ in groups)
        self.ranks = list(layouts or [RankLayout(rank, pages, bytes([rank]) * 16) for rank in range(ranks)])
        self.half.set_ranks(self.ranks)

    def _make_wire(self, object_bytes: int, generation: str, first_epoch: ServerEpoch) -> FakeWire:
        wire = self._given_wire or FakeWire(object_bytes)
        wire.epoch = max(wire.epoch, first_epoch)
        wire.namespace = generation
        self._given_wire = None
        self.wires.append(wire)
        return wire

    @property
    def wire(self) -> FakeWire:
        return self.wires[-1]

    # --- what an engine does ----------------------------------------------------------------------------------------

    def matched(self, request: FakeRequest, local_tokens: int = 0, polls: int = 20) -> int:
        """Ask until the answer is final."""
        for _ in range(polls):
            tokens = self.half.matched_tokens(request, local_tokens)
            if tokens is not None:
                return tokens
        raise AssertionError("no final answer")

    def compute(self, request: FakeRequest, tokens: int) -> None:
        """One step that computes this many tokens: blocks are cached when the step is scheduled, as vLLM does."""
        first = request.num_computed_tokens // BLOCK
        last = (request.num_computed_tokens + tokens) // BLOCK
        for column in range(first, last):
            block_hash = request.block_hash(column, BLOCK)
            for group, spec in enumerate(self.geometry.groups):
                block = self.pool.take()
                request.blocks.append(block)
                request.table[group, column] = block
                # A step leaves a state at its end only: the other columns are scratch.
                leaves_state = spec.kind is not GroupKind.RECURRENT or column == last - 1
                if block_hash is not None and leaves_state:
                    self.pool.cache(block, block_hash, group)
        self.plan([request])
        request.num_computed_tokens += tokens

    def plan(self, scheduled: Sequence[FakeRequest] = (), *, preempted: bool = False) -> StepPlan:
        """One engine step: the plan goes to the workers, whose reports come back unless they are held."""
        plan = self.half.build_plan([request.request_id for request in scheduled], preempted)
        self.running += [*plan.stores, *plan.loads]
        self.loaded += plan.loads
        if self.outcome is JobOutcome.DONE:
            for job in plan.stores:
                self.seal(job)
        if not self.hold_reports:
            self.report()
        return plan

    def seal(self, job: StoreJob) -> None:
        """Write this job's seals into the pool, as the workers of all ranks would."""
        assert self.wire.pool is not None
        columns = [range(len(blocks)) for blocks in job.object.blocks]
        payload = sum(len(part) * 100 for part in columns)
        for rank, part in zip(self.ranks, self.half.objects.layout.slices, strict=True):
            for piece, slot in enumerate(job.object.slots):
                if slot == SKIP:
                    continue
                seal = Seal(
                    layout_digest=layout_in(self.wire.namespace, rank.digest),
                    object_digest=job.object.digest,
                    rank=rank.rank,
                    piece=piece,
                    pieces=len(job.object.slots),
                    payload_bytes=max(0, min(part.capacity, payload - piece * part.capacity)),
                    checksum=0,
                    nonce=bytes(16),
                ).encode()
                start = slot + part.seal_offset
                self.wire.pool.memory[start : start + len(seal)] = seal
                self.copied[slot] = job.object.blocks

    def report(self, *, ranks: Sequence[int] | None = None, outcome: JobOutcome | None = None) -> set[RequestId]:
        """Reports of these ranks (all) for every job they still run; a job ends with its last rank."""
        answering = range(len(self.ranks)) if ranks is None else ranks
        reports = tuple(
            JobReport(job.job_id, rank, outcome or self.outcome) for job in self.running for rank in answering
        )
        if ranks is None:
            self.running = []
        return self.half.reported(StepReport(jobs=reports))

    def finish(self, request: FakeRequest) -> None:
        self.half.finished(request)
        self.pool.unpin(request.blocks)
        request.blocks = []

    def admit(self, request: FakeRequest, external: int, local: int = 0) -> None:
        """vLLM allocates blocks for a hit (or none) and says so."""
        tables: list[list[int]] = []
        for spec in self.geometry.groups:
            columns = (local + external) // BLOCK
            table = [0] * columns
            needed = range(columns) if spec.kind is GroupKind.APPEND_ONLY else spec.columns_at(local + external)
            for column in needed if external else ():
                block = self.pool.take()
                request.blocks.append(block)
                table[column] = block.block_id
            tables.append(table)
        self.half.allocated(request, external, tables)

    def run(self, request: FakeRequest, step_tokens: int | None = None) -> None:
        """The whole life of a request that hits nothing: computed step by step, stored, finished."""
        assert self.matched(request) == 0
        self.admit(request, 0)
        while request.num_computed_tokens < request.num_prompt_tokens:
            left = request.num_prompt_tokens - request.num_computed_tokens
            self.compute(request, min(step_tokens or left, left))
        self.finish(request)
        self.settle()

    def settle(self, steps: int = 30) -> None:
        """Steps without requests until nothing is under way."""
        for _ in range(steps):
            if not self.half.has_pending_work:
                return
            self.plan()
        raise AssertionError("the connector still has pending work")

    def check_idle(self) -> None:
        """Nothing is held anywhere."""
        assert self.pool.held == 0, "blocks are still held"
        assert self.half.pinned_blocks == 0
        self.check_lookups()
        self.wire.check_settled()

    def check_lookups(self, open_lookups: int = 0) -> None:
        """Every lookup was counted once, and ended as a hit or with exactly one reason."""
        counted = self.half.counters
        ended = counted["hits"] + sum(amount for key, amount in counted.items() if key.startswith("miss:"))
        assert counted["lookups"] == ended + open_lookups, dict(counted)


def prompt(length: int, seed: int = 0) -> list[int]:
    return [(seed * 1_000_003 + index * 7919) % 50_000 for index in range(length)]


JobIds = dict[JobId, StoreJob]
