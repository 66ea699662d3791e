"""What must hold after every step, and what at rest. Each check returns what is wrong; nothing means all is well."""

from __future__ import annotations

import contextlib
import logging
import traceback
from collections import Counter
from collections.abc import Iterator, Set

import numpy as np

from lmcache_mp_safe.errors import ServerError
from lmcache_mp_safe.geometry.checksum import PayloadChecksum
from lmcache_mp_safe.geometry.seal import Seal, decode_seal, layout_in
from lmcache_mp_safe.identity import PrefixDigests
from lmcache_mp_safe.ids import RequestId
from lmcache_mp_safe.scheduler.half import SchedulerHalf
from lmcache_mp_safe.testing.fake_server import FakeServer, SharedMemory
from lmcache_mp_safe.testing.sim.engine import Engine
from lmcache_mp_safe.testing.sim.host import groups_of
from lmcache_mp_safe.testing.sim.watch import Acknowledgements, Jobs, Payloads
from lmcache_mp_safe.wire.tokens import plain_tokens, synthetic_tokens

LOGGERS = ("lmcache_mp_safe", "vllm.lmcache_mp_safe")


class InvariantError(AssertionError):
    """An invariant does not hold. `name` is one of the checks below, or what stopped the world."""

    def __init__(self, name: str, text: str) -> None:
        super().__init__(f"{name}: {text}")
        self.name = name
        self.text = text


class Caught(logging.Handler):
    """Exceptions that hooks have caught and logged."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and record.exc_info[1] is not None:
            error = record.exc_info[1]
            frame = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{frame.filename.rsplit('/', 1)[-1]}:{frame.lineno}"
            self.texts.append(f"{record.getMessage()}: {type(error).__name__}: {error} ({where})")


@contextlib.contextmanager
def heard() -> Iterator[Caught]:
    """Take what the connector logs meanwhile, and keep vLLM's chatter away. The loggers are as before afterwards."""
    caught = Caught()
    loggers = [logging.getLogger(name) for name in LOGGERS]
    vllm = logging.getLogger("vllm")
    before = [(logger, logger.propagate, logger.level) for logger in (*loggers, vllm)]
    try:
        vllm.setLevel(logging.ERROR)
        for logger in loggers:
            logger.addHandler(caught)
            logger.propagate = False
        yield caught
    finally:
        for logger, propagate, level in before:
            logger.removeHandler(caught)
            logger.propagate = propagate
            logger.setLevel(level)


def wrong_tags(engine: Engine) -> Iterator[str]:
    """No forward ever reads a wrong tag."""
    for rank in engine.ranks:
        yield from rank.wrong


def misused_blocks(jobs: Jobs) -> Iterator[str]:
    """No block is read or written by a job after it was handed out again; every job is reported once by every rank."""
    yield from jobs.wrong


def exceptions(caught: Caught) -> Iterator[str]:
    """No hook has anything to catch; an illegal move of a phase is one such thing."""
    yield from caught.texts


def unaccounted_pins(engine: Engine, half: SchedulerHalf | None, squeezed: int) -> Iterator[str]:
    """Every reference on a block is vLLM's or that of a pin."""
    ours: Counter[int] = Counter()
    for manager in engine.scheduler.kv_cache_manager.coordinator.single_type_managers:
        for blocks in manager.req_to_blocks.values():
            ours.update(block.block_id for block in blocks if not block.is_null)
    for _, blocks in engine.scheduler.deferred_frees:
        ours.update(block.block_id for block in blocks if not block.is_null)
    extra = 0
    for block in engine.pool.blocks:
        if block.is_null:
            continue
        more = block.ref_cnt - ours[block.block_id]
        if more < 0:
            yield f"block {block.block_id} has {block.ref_cnt} references and {ours[block.block_id]} owners"
        extra += more
    pinned = 0 if half is None else half.pinned_blocks
    if extra != pinned + squeezed:
        yield f"{extra - squeezed} references are not vLLM's, {pinned} blocks are pinned"


class Watermarks:
    """`num_stored_tokens` never exceeds what the server acknowledged, contiguous from 0 or from what was loaded.

    What was loaded may lack an acknowledgement: the answer to its commit was lost, or another process stored it.
    """

    def __init__(
        self, acknowledged: Acknowledgements, loaded: Set[bytes], chunk_tokens: int, server_chunk: int
    ) -> None:
        self._acknowledged, self._loaded = acknowledged, loaded
        self._chunk_tokens = chunk_tokens
        self._server_chunk = server_chunk
        self._seen: dict[str, int] = {}

    def check(self, engine: Engine, half: SchedulerHalf) -> Iterator[str]:
        for name in engine.scheduler.requests:
            source = half.source_of(RequestId(name))
            stored = 0 if source is None else half.num_stored_tokens(RequestId(name))
            before = self._seen.get(name, 0)
            self._seen[name] = stored
            if source is None or stored <= before:
                continue
            digests = PrefixDigests(source.tokens, source.extra_keys, self._chunk_tokens)
            chain = list(digests.chunks(stored // self._chunk_tokens))
            for index in range(before // self._chunk_tokens, len(chain)):
                tokens = plain_tokens(synthetic_tokens([chain[index]], self._server_chunk))
                if tokens not in self._acknowledged.chunks and chain[index] not in self._loaded:
                    yield f"{name} counts {stored} tokens as stored, but chunk {index} was never acknowledged"


def dead_end(engine: Engine, half: SchedulerHalf | None, jobs: Jobs) -> list[str]:
    """Requests whose loads have ended and that keep each other's last blocks, while nothing of ours is under way.

    Before it admits a load, vLLM sets blocks aside for what the requests before it have still to compute, but none for
    their windows. Afterwards it wants them at once, for a load that failed as well; it looks at no request behind one
    that it cannot admit, and never preempts one that waits.
    """
    scheduler = engine.scheduler
    if (
        half is None
        or scheduler.running
        or jobs.open
        or half.pinned_blocks
        or "window" not in groups_of(engine.settings)
    ):
        return []
    loaded = [request.request_id for request in scheduler.kv_holding_waiting]
    return loaded if len(loaded) > 1 else []


# --- at rest ----------------------------------------------------------------------------------------------------------


def wrong_objects(server: FakeServer, memory: SharedMemory, half: SchedulerHalf, payloads: Payloads) -> Iterator[str]:
    """What is sealed, and would be believed, holds the tags of its prefix."""
    namespace = half.wire.namespace
    layouts = [layout_in(namespace, rank.digest) for rank in half.objects.ranks]
    for name, stored in server.objects.readable.items():
        if name.namespace != namespace:
            continue  # nobody asks for it
        for rank, part in enumerate(half.objects.layout.slices):
            if stored.layout.length != half.objects.layout.object_bytes:
                continue  # the connector's own probe
            raw = memory.read(stored.offset + part.offset, part.size)
            seal = _seal(raw[part.capacity :])
            expected = None if seal is None else payloads.expected.get((seal.object_digest, rank))
            if seal is None or expected is None or (seal.rank, seal.layout_digest) != (rank, layouts[rank]):
                continue  # nobody believes it: slots that were given back hold what was there before
            payload = raw[: seal.payload_bytes]
            if _checksum(payload) != seal.checksum:
                continue  # a reader would notice
            begin = seal.piece * part.capacity
            if payload != expected[begin : begin + part.capacity]:
                yield f"object {seal.object_digest.hex()[:12]} at {stored.offset} is sealed on rank {rank}, and wrong"


def _seal(raw: bytes) -> Seal | None:
    try:
        return decode_seal(raw)
    except ServerError:
        return None


def _checksum(payload: bytes) -> int:
    state = PayloadChecksum()
    state.update(np.frombuffer(payload, np.uint8))
    return int(state.intdigest())


def leftovers_of_the_engine(engine: Engine, half: SchedulerHalf | None, jobs: Jobs) -> Iterator[str]:
    """Nothing is under way, nothing is held."""
    if engine.scheduler.requests:
        yield f"requests {sorted(engine.scheduler.requests)} have not ended"
    for job in jobs.open.values():
        yield f"job {job.job.job_id} was not reported by ranks {sorted(job.waiting)}"
    for rank in engine.ranks:
        if not rank.worker.idle:
            yield f"rank {rank.number} is not idle"
    held = [block.block_id for block in engine.pool.blocks if block.ref_cnt and not block.is_null]
    if held:
        yield f"blocks {held} are held"
    if half is not None:
        if half.pinned_blocks:
            yield f"{half.pinned_blocks} blocks are pinned"
        if half.has_pending_work:
            yield "the scheduler half has pending work"
        owned = half.wire.held()
        if (owned.sessions, owned.locks, owned.retrieves) != (0, 0, 0):
            yield f"the wire still owns {owned}"


def leftovers_on_the_server(server: FakeServer) -> Iterator[str]:
    """No lock, session, lookup, open read, and no slot that nobody can store into."""
    reserved = [name for name, stored in server.objects.reserved.items() if stored.writing.count]
    locked = [name for name, stored in server.objects.readable.items() if stored.reading.count]
    for what, there in (
        ("locks", locked),
        ("sessions", list(server.sessions)),
        ("lookups that nobody asked about", list(server.lookups)),
        ("open reads", [key.request_id for _, key in server.reads]),
        ("slots", reserved),
    ):
        if there:
            yield f"{len(there)} {what} are left on the server: {there[:3]}"


def first(name: str, found: Iterator[str]) -> None:
    """
    Raises:
        InvariantError: there is one.
    """
    for text in found:
        raise InvariantError(name, text)
