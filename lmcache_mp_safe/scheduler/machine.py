"""Decides what happens to a request's hit. Pure: a record and an event in, a new record and effects out."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from lmcache_mp_safe.errors import LocalError
from lmcache_mp_safe.ids import RequestId
from lmcache_mp_safe.metrics.counts import Miss
from lmcache_mp_safe.scheduler.effects import CountChunks, Effect, Hold, Load, Probe, RefuseLoad, Release
from lmcache_mp_safe.scheduler.phases import (
    MOVES,
    Admitted,
    AdmittedOtherwise,
    AdmittedWithoutLoad,
    ChunksCounted,
    EpochEnded,
    Event,
    Expired,
    Finished,
    Loaded,
    LoadFailed,
    Phase,
    Polled,
    Probed,
    Unusable,
    Validated,
)

# Boundary lookups in flight at a time for one request.
PROBE_WAVE = 8


@dataclass(frozen=True)
class Rules:
    """What decisions need to know about the model and the configuration.

    Attributes:
        chunk_tokens: C.
        block_tokens: hits end on multiples of it.
        has_chunks: whether the model has append-only groups, so that chunk objects exist.
        needs_boundary: whether a resume at this boundary needs a boundary object.
        max_probes: boundary lookups for one request beyond remembered ones.
    """

    chunk_tokens: int
    block_tokens: int
    has_chunks: bool
    needs_boundary: Callable[[int], bool]
    max_probes: int


@dataclass(frozen=True)
class RequestRecord:
    """Everything that decides about one request's hit.

    The token axis while a hit is promised:

        [0, local_tokens)         in vLLM's prefix cache
        [local_tokens, boundary)  promised; loaded from LMCache
        [boundary, num_tokens)    computed by vLLM, at least one token

    Attributes:
        limit_tokens: the deepest boundary that may be promised.
        remembered: boundaries at which this process stored or loaded this prefix, deepest first.
        chunks_found: chunk objects the server has; 0 before the answer.
        boundary: resume point of the hit being held, promised or loaded.
        first_chunk: first chunk object held for it.
        waiting_for: boundaries being probed.
        best: deepest boundary object found by the running probes.
        untried: boundaries that may be probed next, in order.
        may_load: False once a load failed; such a request only computes.
        miss: why nothing is loaded, while the phase is MISSED.
    """

    request_id: RequestId
    phase: Phase = Phase.NEW
    limit_tokens: int = 0
    remembered: tuple[int, ...] = ()
    local_tokens: int = 0
    chunks_found: int = 0
    boundary: int = 0
    first_chunk: int = 0
    waiting_for: frozenset[int] = field(default=frozenset())
    best: int = 0
    untried: tuple[int, ...] = ()
    may_load: bool = True
    miss: Miss | None = None

    @property
    def promised_tokens(self) -> int:
        """External tokens to answer to vLLM; 0 where its own hit grew past the boundary while the seals were read."""
        return max(0, self.boundary - self.local_tokens) if self.phase is Phase.PROMISED else 0


@dataclass(frozen=True)
class Outcome:
    record: RequestRecord
    effects: tuple[Effect, ...] = ()


def step(record: RequestRecord, event: Event, rules: Rules) -> Outcome:
    """The record after the event, and what is to be done.

    Raises:
        LocalError: the event is not legal in this phase; the record is unchanged.
    """
    allowed = MOVES.get((record.phase, type(event)))
    if allowed is None:
        raise LocalError(f"request {record.request_id}: {type(event).__name__} while {record.phase.value}")
    outcome = _decide(record, event, rules)
    if outcome.record.phase not in allowed:
        raise LocalError(
            f"request {record.request_id}: {type(event).__name__} must not lead"
            f" from {record.phase.value} to {outcome.record.phase.value}"
        )
    return outcome


def _decide(record: RequestRecord, event: Event, rules: Rules) -> Outcome:
    match event:
        case Polled():
            return _polled(record, event.local_tokens, rules)
        case ChunksCounted():
            return _counted(replace(record, chunks_found=event.found), rules)
        case Probed():
            return _probed(record, event, rules)
        case Validated():
            return Outcome(replace(record, phase=Phase.PROMISED))
        case Unusable():
            return Outcome(_missed(record, event.why), (Release(),))
        case Expired():
            return Outcome(_fresh(record, Phase.NEW), (Release(),))
        case Admitted():
            return Outcome(replace(record, phase=Phase.LOADING), (Load(),))
        case AdmittedWithoutLoad():
            return Outcome(replace(record, phase=Phase.COMPUTING), _releases(record))
        case AdmittedOtherwise():
            return Outcome(replace(record, phase=Phase.LOADING), (*_releases(record), RefuseLoad()))
        case Loaded():
            return Outcome(replace(record, phase=Phase.COMPUTING))
        case LoadFailed():
            # vLLM frees the blocks and asks again; the answer stays "nothing", also after a preemption.
            return Outcome(replace(_missed(record, Miss.FAILED_BEFORE), may_load=False))
        case EpochEnded():
            held = record.phase in (Phase.LOOKING_UP, Phase.PROBING, Phase.HOLDING, Phase.PROMISED)
            return Outcome(_missed(record, Miss.SERVER_LOST) if held else record)
        case Finished():
            return Outcome(replace(record, phase=Phase.ENDED), _releases(record))
    raise LocalError(f"no decision for {type(event).__name__}")


def _releases(record: RequestRecord) -> tuple[Effect, ...]:
    """What a request that leaves this phase owes. While loading the load job owns the locks, not the request."""
    holds = record.phase in (Phase.LOOKING_UP, Phase.PROBING, Phase.HOLDING, Phase.PROMISED)
    return (Release(),) if holds else ()


def _missed(record: RequestRecord, why: Miss) -> RequestRecord:
    return replace(record, phase=Phase.MISSED, miss=why)


def _fresh(record: RequestRecord, phase: Phase) -> RequestRecord:
    return replace(
        record, phase=phase, chunks_found=0, boundary=0, first_chunk=0, waiting_for=frozenset(), best=0, untried=()
    )


def _polled(record: RequestRecord, local_tokens: int, rules: Rules) -> Outcome:
    record = replace(record, local_tokens=local_tokens)
    if record.phase in (Phase.NEW, Phase.COMPUTING):
        return _start(record, rules)
    if record.phase is not Phase.PROMISED:
        return Outcome(record)
    if local_tokens >= record.boundary:
        return Outcome(_missed(record, Miss.NOT_DEEPER), (Release(),))
    if local_tokens // rules.chunk_tokens < record.first_chunk:
        again = _start(record, rules)
        return Outcome(again.record, (Release(), *again.effects))
    return Outcome(record)


def _start(record: RequestRecord, rules: Rules) -> Outcome:
    record = _fresh(record, Phase.LOOKING_UP)
    if not record.may_load:
        return Outcome(_missed(record, Miss.FAILED_BEFORE))
    if record.limit_tokens <= record.local_tokens:
        return Outcome(_missed(record, Miss.NOT_DEEPER))
    chunks = record.limit_tokens // rules.chunk_tokens
    if chunks and rules.has_chunks:
        return Outcome(record, (CountChunks(chunks),))
    # The prompt lies within the first chunk, or the model has no chunk objects: only a boundary object can help.
    return _choose(replace(record, chunks_found=chunks), rules)


def _counted(record: RequestRecord, rules: Rules) -> Outcome:
    return _choose(record, rules)


def _choose(record: RequestRecord, rules: Rules) -> Outcome:
    """Start probing, or hold what needs no boundary object."""
    grid = tuple(_grid(record, rules))
    if not grid:
        return _settle(record, rules)
    remembered = tuple(boundary for boundary in record.remembered if boundary in grid)
    others = [boundary for boundary in grid if boundary not in remembered][: rules.max_probes]
    # Deepest first within a wave: the deepest one that exists wins.
    order = (*remembered, *others)
    return _next_wave(replace(record, phase=Phase.PROBING, untried=order), rules)


def _grid(record: RequestRecord, rules: Rules) -> Iterable[int]:
    """Boundaries that need a boundary object and lie within what the chunk objects cover, deepest first."""
    reach = (record.chunks_found + 1) * rules.chunk_tokens - rules.block_tokens
    top = min(record.limit_tokens, reach) // rules.block_tokens * rules.block_tokens
    for boundary in range(top, record.local_tokens, -rules.block_tokens):
        if rules.needs_boundary(boundary):
            yield boundary
        else:
            return  # chunk objects alone reach this far: nothing below can be better


def _next_wave(record: RequestRecord, rules: Rules) -> Outcome:
    wave, rest = record.untried[:PROBE_WAVE], record.untried[PROBE_WAVE:]
    if not wave:
        return _settle(record, rules)
    record = replace(record, phase=Phase.PROBING, waiting_for=frozenset(wave), untried=rest)
    return Outcome(record, (Probe(wave),))


def _probed(record: RequestRecord, event: Probed, rules: Rules) -> Outcome:
    if event.boundary not in record.waiting_for:
        raise LocalError(f"request {record.request_id}: boundary {event.boundary} was not being probed")
    best = max(record.best, event.boundary) if event.exists else record.best
    record = replace(record, waiting_for=record.waiting_for - {event.boundary}, best=best)
    # Everything still unanswered lies below what was found: no need to wait for it.
    if record.best and all(boundary < record.best for boundary in record.waiting_for):
        return _settle(record, rules)
    if record.waiting_for:
        return Outcome(record)
    return _next_wave(record, rules)


def _settle(record: RequestRecord, rules: Rules) -> Outcome:
    """Hold the deepest resume point there is, or miss."""
    whole = min(record.chunks_found, record.limit_tokens // rules.chunk_tokens) * rules.chunk_tokens
    without_object = 0 if rules.needs_boundary(whole) or not rules.has_chunks else whole
    boundary = max(record.best, without_object)
    if boundary <= record.local_tokens:
        return Outcome(_missed(record, Miss.ABSENT), (Release(),))
    first_chunk = record.local_tokens // rules.chunk_tokens
    record = replace(record, phase=Phase.HOLDING, boundary=boundary, first_chunk=first_chunk, untried=())
    return Outcome(record, (Hold(first_chunk, boundary),))
