"""What happened in a world, as far as invariants need it: jobs, blocks handed out, acknowledgements, payloads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock, get_block_hash, get_group_id
from vllm.v1.request import Request

from lmcache_mp_safe.contract import SKIP, JobOutcome, LoadJob, ObjectCopy, StepPlan, StepReport, StoreJob
from lmcache_mp_safe.ids import JobId
from lmcache_mp_safe.testing.fake_server import Call
from lmcache_mp_safe.testing.sim.device import Rank
from lmcache_mp_safe.testing.sim.host import MAX_TOKENS
from lmcache_mp_safe.testing.sim.tokens import BLOCK, Chain, Words


class Handouts:
    """How often the pool handed out each block."""

    def __init__(self, pool: BlockPool) -> None:
        self.times = [0] * pool.num_gpu_blocks
        self._hand_out = pool.get_new_blocks
        pool.get_new_blocks = self._counted

    def _counted(self, count: int) -> list[KVCacheBlock]:
        blocks: list[KVCacheBlock] = self._hand_out(count)
        for block in blocks:
            self.times[block.block_id] += 1
        return blocks


@dataclass
class Job:
    """A job that the workers have.

    Attributes:
        blocks: block ids that it reads or writes, and how often each had been handed out when it was planned.
        waiting: ranks that have not reported.
    """

    job: StoreJob | LoadJob
    blocks: dict[int, int]
    waiting: set[int] = field(default_factory=set)


class Jobs:
    """Jobs from plan to last report.

    Attributes:
        wrong: what a job must not do and did.
        loaded: digests of the objects that loads have brought.
    """

    def __init__(self, pool: BlockPool, ranks: int) -> None:
        self.wrong: list[str] = []
        self.counts: Counter[str] = Counter()
        self._pool = pool
        self._handouts = Handouts(pool)
        self._ranks = range(ranks)
        self.open: dict[JobId, Job] = {}
        self.loaded: set[bytes] = set()
        self._known: set[JobId] = set()

    def planned(self, plan: StepPlan) -> None:
        jobs: list[StoreJob | LoadJob] = [*plan.stores, *plan.loads]
        for job in jobs:
            objects = (job.object,) if isinstance(job, StoreJob) else job.objects
            ids = {block for copy in objects for part in copy.blocks for block in part if block != SKIP}
            if job.job_id in self._known:
                self.wrong.append(f"job {job.job_id} is planned twice")
            self._known.add(job.job_id)
            self.open[job.job_id] = Job(job, {block: self._handouts.times[block] for block in ids}, set(self._ranks))
            if isinstance(job, LoadJob):
                self._check_targets(job, ids)
            self.counts["stores" if isinstance(job, StoreJob) else "loads"] += 1

    def _check_targets(self, job: LoadJob, ids: Iterable[int]) -> None:
        """A load may write only what its request owns alone and nobody can find."""
        for block in (self._pool.blocks[block] for block in ids):
            if block.ref_cnt != 1 or block.block_hash is not None:
                self.wrong.append(
                    f"load {job.job_id} of {job.request_id} writes block {block.block_id}, which is shared or cached"
                )

    def reported(self, rank: int, report: StepReport) -> None:
        for one in report.jobs:
            job = self.open.get(one.job_id)
            if job is None or rank not in job.waiting:
                self.wrong.append(f"rank {rank} reports job {one.job_id} again")
                continue
            moved = [block for block, times in job.blocks.items() if self._handouts.times[block] != times]
            if moved:
                self.wrong.append(f"job {one.job_id} was not over on rank {rank} when blocks {moved} were handed out")
            if one.outcome is not JobOutcome.DONE:
                self.counts[f"job ended: {one.outcome.value}"] += 1
            elif isinstance(job.job, LoadJob) and rank == 0:
                self.counts["hits"] += 1
                self.loaded.update(copy.digest for copy in job.job.objects)
            job.waiting.discard(rank)
            if not job.waiting:
                del self.open[one.job_id]


class Payloads:
    """What each stored object must hold: the tags of its prefix, whatever the pages held when it was copied."""

    def __init__(self, ranks: Sequence[Rank], pool: BlockPool) -> None:
        self._ranks = ranks
        self._pool = pool
        self._blocks: dict[Any, Words] = {}
        self._requests: dict[str, tuple[Request, Chain, int]] = {}
        self.expected: dict[tuple[bytes, int], bytes] = {}

    def arrived(self, request: Request) -> None:
        self._note(request.request_id)
        chain = Chain(request.cache_salt or "", (), MAX_TOKENS)
        self._requests[request.request_id] = (request, chain, 0)

    def _note(self, name: str) -> None:
        """Learn the tags behind the request's block hashes."""
        if name not in self._requests:
            return
        request, chain, known = self._requests[name]
        if len(request.block_hashes) == known:
            return
        end = len(request.block_hashes) * BLOCK
        chain.extend(request.all_token_ids[len(chain) : end])
        tags = chain.tags(end)
        for column in range(known, len(request.block_hashes)):
            self._blocks[request.block_hashes[column]] = tags[column * BLOCK : (column + 1) * BLOCK]
        self._requests[name] = (request, chain, len(request.block_hashes))

    def planned(self, stores: Sequence[StoreJob]) -> None:
        if stores:
            for name in self._requests:
                self._note(name)
        for job in stores:
            for rank in self._ranks:
                self.expected[job.object.digest, rank.number] = self._payload(job.object, rank)

    def _payload(self, copy: ObjectCopy, rank: Rank) -> bytes:
        parts: list[bytes] = []
        for plane in rank.planes:
            for block in copy.blocks[plane.group]:
                named = self._pool.blocks[block].block_hash
                if named is None or get_group_id(named) != plane.group:
                    return b"a block that vLLM would not serve"
                tags = self._blocks[get_block_hash(named)]
                page = np.full(plane.words.shape[1], tags[-1]) if plane.kind == "state" else tags
                parts.append((page ^ plane.mask).tobytes())
        return b"".join(parts)


class Acknowledgements:
    """Chunks that the server has said to hold, to those who stored them; as the tokens that stand for them."""

    def __init__(self) -> None:
        self.chunks: set[tuple[int, ...]] = set()
        self._granted: dict[Any, list[int]] = {}
        self._lookups: dict[str, Any] = {}

    def answered(self, call: Call, *, to_a_store: bool, chunk: int) -> None:
        """An answer has reached the client.

        Args:
            to_a_store: the call belongs to a store, so that a lookup's count tells what is stored.
        """
        if call.operation == "prepare_store":
            self._granted[call.arguments[0]] = list(call.result().context.get("chunk_indices", ()))
        elif call.operation == "commit_store" and call.result() is True:
            key = call.arguments[0]
            self._add(key.token_ids, chunk, [key.start // chunk + index for index in self._granted.get(key, ())])
        elif call.operation == "lookup":
            self._lookups[call.arguments[0].request_id] = call.arguments[0]
        elif call.operation == "query_prefetch_status" and to_a_store and call.result():
            self._add(self._lookups[call.arguments[0]].token_ids, chunk, range(call.result()))

    def _add(self, tokens: Sequence[int], chunk: int, indices: Iterable[int]) -> None:
        self.chunks.update(tuple(tokens[index * chunk : (index + 1) * chunk]) for index in indices)
