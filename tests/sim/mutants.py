"""Deliberate mistakes in both halves, each of which the simulator must catch.

Each is a patch of one function. `broken` says what it makes of the design, `caught_by` which invariants notice.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import msgspec

from lmcache_mp_safe import connector, identity
from lmcache_mp_safe.ops import streamed
from lmcache_mp_safe.scheduler import certify, half, hits, machine, progress, stores
from lmcache_mp_safe.wire import wire
from lmcache_mp_safe.worker import copier, jobs
from lmcache_mp_safe.worker import half as worker


@dataclass(frozen=True)
class Mutant:
    """A mistake: `owner.name` is replaced by what `change` makes of it."""

    name: str
    broken: str
    owner: Any
    attribute: str
    change: Callable[[Any], Any]

    def __str__(self) -> str:
        return self.name

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        original = getattr(self.owner, self.attribute)
        with mock.patch.object(self.owner, self.attribute, self.change(original)):
            yield


def nothing(original: Any) -> Any:
    return lambda *arguments, **named: None


def always(value: Any) -> Callable[[Any], Any]:
    return lambda original: lambda *arguments, **named: value


def constant(value: Any) -> Callable[[Any], Any]:
    return lambda original: property(lambda self: value)


def eager(original: Any) -> Any:
    def reserved(self: Any, event: Any, now: float) -> None:
        run = self._run_of(event.session, event.call)
        original(self, event, now)
        if run is not None:
            run.plan_number -= 1

    return reserved


def unpinned_when_dispatched(original: Any) -> Any:
    def dispatch(self: Any, run: Any, plan_number: int, now: float) -> Any:
        made = original(self, run, plan_number, now)
        if made:
            self._unpin(run.items)
        return made

    return dispatch


def first_rank_counts(original: Any) -> Any:
    def reported(self: Any, report: Any) -> Any:
        ranks, self._ranks = self._ranks, self._ranks[:1]
        try:
            return original(self, report)
        finally:
            self._ranks = ranks

    return reported


def over_a_gap(original: Any) -> Any:
    def acknowledge(self: Any, chunk: int, chunk_tokens: int) -> None:
        self.num_stored_tokens = max(self.num_stored_tokens, (chunk + 2) * chunk_tokens)

    return acknowledge


def on_lookup(original: Any) -> Any:
    def matched(self: Any, source: Any, local_tokens: int) -> Any:
        tokens = original(self, source, local_tokens)
        if tokens and source.request_id in self._book:
            chunk = self._geometry.chunk_tokens
            self._book[source.request_id].prefix.progress.num_stored_tokens = -(-tokens // chunk) * chunk + chunk
        return tokens

    return matched


def no_boundary_object(original: Any) -> Any:
    return lambda **fields: replace(original(**fields), needs_boundary=lambda boundary: False)


def every_page(original: Any) -> Any:
    def targets(self: Any, hit: Any, name: Any, blocks: Any) -> Any:
        record, hit.record = hit.record, replace(hit.record, local_tokens=0)
        try:
            return original(self, hit, name, blocks)
        finally:
            hit.record = record

    return targets


def one_column_off(original: Any) -> Any:
    def targets(self: Any, hit: Any, name: Any, blocks: Any) -> Any:
        return original(self, hit, name, [list(part[1:]) + list(part[:1]) for part in blocks])

    return targets


def never_failed(original: Any) -> Any:
    def poll(self: Any) -> Any:
        return replace(original(self), failed=frozenset())

    return poll


def twice(original: Any) -> Any:
    def report(self: Any) -> Any:
        kept = list(self._reports)
        made = original(self)
        self._reports = kept if made is not None and len(kept) == 1 and not hasattr(self, "_said") else []
        self._said = True
        return made

    return report


def passed_at_once(original: Any) -> Any:
    return lambda self: streamed.StreamFence(SimpleNamespace(done=lambda: True))  # type: ignore[arg-type]


def any_epoch(original: Any) -> Any:
    def start(self: Any, planned: Any, fence: Any, *, urgent: bool) -> None:
        epoch = None if self._pool is None else self._pool.segment.epoch
        if epoch is not None:
            planned = [msgspec.structs.replace(job, epoch=epoch) for job in planned]
        original(self, planned, fence, urgent=urgent)

    return start


def without(field: str, value: Any) -> Callable[[Any], Any]:
    def change(original: Any) -> Any:
        def plan(self: Any, *arguments: Any) -> Any:
            return msgspec.structs.replace(original(self, *arguments), **{field: value})

        return plan

    return change


def never_used(original: Any) -> Any:
    def send(self: Any, link: Any, kind: Any, session: Any, *arguments: Any, **named: Any) -> Any:
        call = original(self, link, kind, session, *arguments, **named)
        session.used = False
        return call

    return send


def without_chain(original: Any) -> Any:
    def digest(self: Any, domain: bytes, start: int, end: int) -> bytes:
        chain, self._chain = self._chain, [b""] * len(self._chain)
        try:
            made: bytes = original(self, domain, start, end)
            return made
        finally:
            self._chain = chain

    return digest


def old_epoch_keeps_its_chunks(original: Any) -> Any:
    def forget(self: Any) -> None:
        original(self)
        self.session = -1

    return forget


def sealed_before_the_copy(original: Any) -> Any:
    return property(lambda self: self.submitted)


MUTANTS = (
    Mutant("first_look_is_enough", "copied in the plan that certified it", stores.Stores, "_reserved", eager),
    Mutant("no_second_look", "the block is not looked up again", stores, "still_holds", always(True)),
    Mutant("unpinned_when_dispatched", "sources are free while they are read", stores.Stores, "_dispatch",
           unpinned_when_dispatched),
    Mutant("first_rank_counts", "the first rank's report ends a job", half.SchedulerHalf, "reported",
           first_rank_counts),
    Mutant("pins_are_kept", "pins are not given back", certify.Pins, "unpin", nothing),
    Mutant("locks_are_kept", "an abort releases nothing", machine, "_releases", always(())),
    Mutant("watermark_over_a_gap", "counts chunks that nobody acknowledged", progress.Progress, "acknowledge",
           over_a_gap),
    Mutant("watermark_on_lookup", "a lookup moves the watermark", half.SchedulerHalf, "_matched_tokens", on_lookup),
    Mutant("no_boundary_object", "a hit without its state", half, "Rules", no_boundary_object),
    Mutant("shared_pages_are_written", "a load writes pages of other requests", hits.Hits, "_targets", every_page),
    Mutant("one_column_off", "a load writes into other columns", hits.Hits, "_targets", one_column_off),
    Mutant("loads_not_planned", "an admitted hit is never loaded", half.SchedulerHalf, "build_plan",
           without("loads", ())),
    Mutant("retired_ends_early", "the scheduler says too early that nothing is under way", half.SchedulerHalf,
           "has_pending_work", constant(False)),
    Mutant("end_is_not_told", "the end of a request is ignored", half.SchedulerHalf, "finished", nothing),
    Mutant("content_without_extra_keys", "a salt does not name content", identity, "encode_extra", always(b"")),
    Mutant("content_without_parent", "a chunk is named by its own tokens", identity.PrefixDigests, "_range_digest",
           without_chain),
    Mutant("locks_are_not_freed", "locks that are not needed stay", wire.Wire, "free", nothing),
    Mutant("sessions_do_not_end", "no session ends on the server", wire.Wire, "_send", never_used),
    Mutant("no_end_of_reading", "a closed session keeps its retrieve", wire.Wire, "_release_reads", nothing),
    Mutant("closing_does_nothing", "sessions are not closed", wire.Wire, "close_in_order", nothing),
    Mutant("failed_loads_pass", "a failed load is told as arrived", worker.WorkerHalf, "poll", never_failed),
    Mutant("checksums_are_ignored", "what arrived is not compared", copier.Copier, "_wrong_arrivals", always(())),
    Mutant("over_when_submitted", "a copy is over when it was submitted", jobs.Running, "over",
           sealed_before_the_copy),
    Mutant("no_fence", "copies do not wait for the engine's writes", streamed.StreamedBackend, "record_fence",
           passed_at_once),
    Mutant("reported_twice", "a report is told again", worker.WorkerHalf, "take_report", twice),
    Mutant("reports_are_lost", "the scheduler side drops reports", connector.LMCacheMPSafeConnector,
           "update_connector_output", nothing),
    Mutant("preemption_is_not_told", "vLLM's allocation is not told to the half", connector.LMCacheMPSafeConnector,
           "update_state_after_alloc", nothing),
)  # fmt: skip
