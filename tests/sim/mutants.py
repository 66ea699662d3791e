"""Deliberate mistakes in both halves, each of which the simulator must catch.

Each is a patch of one function. What orders the device (fence, second look) has its mutants in `tests/mutants/`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import msgspec

from lmcache_mp_safe import connector, identity
from lmcache_mp_safe.geometry import groups
from lmcache_mp_safe.scheduler import certify, half, hits, machine, progress, stores
from lmcache_mp_safe.wire import wire
from lmcache_mp_safe.worker import copier
from lmcache_mp_safe.worker import half as worker


@dataclass(frozen=True)
class Mutant:
    """A mistake: `owner.attribute` is replaced by what `change` makes of it.

    Attributes:
        broken: what it makes of the design.
        caught_by: the invariant that notices, within the first `seeds` seeds of 120 steps.
    """

    name: str
    broken: str
    caught_by: str
    seeds: int
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


def again_and_again(original: Any) -> Any:
    def report(self: Any) -> Any:
        made = original(self)
        if made is not None:
            self._reports = list(made.jobs)
        return made

    return report


def only_noted(original: Any) -> Any:
    def free(self: Any, session: Any, start: int, end: int, now: float) -> None:
        found, _ = self._usable(session)
        if found is not None and start < end:
            found.unlock(start, end)

    return free


def one_page_too_few(original: Any) -> Any:
    def targets(self: Any, hit: Any, name: Any, blocks: Any) -> Any:
        block = self._objects.geometry.block_tokens
        record, hit.record = hit.record, replace(hit.record, local_tokens=hit.record.local_tokens + block)
        try:
            return original(self, hit, name, blocks)
        finally:
            hit.record = record

    return targets


def without_its_first_page(original: Any) -> Any:
    def columns(self: Any, boundary: int) -> range:
        made: range = original(self, boundary)
        return made[1:] if self.kind is groups.GroupKind.WINDOW else made

    return columns


def as_before(original: Any) -> Any:
    return lambda self, generation: original(self, "")


def everything(original: Any) -> Any:
    return lambda self, num_tokens: num_tokens // self._geometry.block_tokens * self._geometry.block_tokens


def local_ones_too(original: Any) -> Any:
    return property(lambda self: self.boundary if self.phase is machine.Phase.PROMISED else 0)


MUTANTS = (
    # the scheduler half: stores
    Mutant("unpinned_when_dispatched", "sources are free while they are read", "block", 1,
           stores.Stores, "_dispatch", unpinned_when_dispatched),
    Mutant("first_rank_counts", "the first rank's report ends a job", "block", 2,
           half.SchedulerHalf, "reported", first_rank_counts),
    Mutant("pins_are_kept", "pins are not given back", "leak", 1, certify.Pins, "unpin", nothing),
    Mutant("watermark_over_a_gap", "counts chunks that nobody acknowledged", "watermark", 1,
           progress.Progress, "acknowledge", over_a_gap),
    Mutant("watermark_on_lookup", "a lookup moves the watermark", "watermark", 2,
           half.SchedulerHalf, "_matched_tokens", on_lookup),
    Mutant("window_without_its_first_page", "a boundary object lacks a page", "wrong tag", 8,
           groups.Group, "columns_at", without_its_first_page),
    # the scheduler half: hits
    Mutant("locks_are_kept", "an abort releases nothing", "exception", 1, machine, "_releases", always(())),
    Mutant("no_boundary_object", "a hit without its state", "wrong tag", 1, half, "Rules", no_boundary_object),
    Mutant("whole_prompt_is_promised", "a hit leaves nothing to compute", "wrong tag", 14,
           half.SchedulerHalf, "_deepest_hit", everything),
    Mutant("local_tokens_are_promised", "a promise counts vLLM's own hit again", "engine", 2,
           machine.RequestRecord, "promised_tokens", local_ones_too),
    Mutant("shared_pages_are_written", "a load writes pages of other requests", "block", 2,
           hits.Hits, "_targets", every_page),
    Mutant("one_page_too_few", "a load leaves out the page behind the local hit", "wrong tag", 1,
           hits.Hits, "_targets", one_page_too_few),
    Mutant("one_column_off", "a load writes into other columns", "wrong tag", 1, hits.Hits, "_targets", one_column_off),
    Mutant("loads_not_planned", "an admitted hit is never loaded", "hang", 1,
           half.SchedulerHalf, "build_plan", without("loads", ())),
    # the scheduler half: life
    Mutant("one_namespace_for_ever", "a reset of the cache changes no name", "wrong tag", 4,
           half.SchedulerHalf, "_attach", as_before),
    Mutant("retired_ends_early", "says too early that nothing is under way", "leak", 6,
           half.SchedulerHalf, "has_pending_work", constant(False)),
    Mutant("end_is_not_told", "the end of a request is ignored", "exception", 1,
           half.SchedulerHalf, "finished", nothing),
    # names
    Mutant("content_without_extra_keys", "a salt does not name content", "wrong object", 3,
           identity, "encode_extra", always(b"")),
    Mutant("content_without_parent", "a chunk is named by its own tokens", "wrong object", 3,
           identity.PrefixDigests, "_range_digest", without_chain),
    # the wire
    Mutant("locks_are_not_freed", "locks that are not needed stay", "leak", 11, wire.Wire, "free", only_noted),
    Mutant("slots_are_not_given_back", "what is reserved and not committed stays so", "leak", 9,
           wire.Wire, "_publish", nothing),
    Mutant("debts_are_forgotten", "nothing is settled with a server that stood still", "leak", 1,
           wire.Wire, "_inherit", nothing),
    Mutant("sessions_do_not_end", "no session ends on the server", "leak", 6, wire.Wire, "_send", never_used),
    Mutant("no_end_of_reading", "a closed session keeps its retrieve", "leak", 1, wire.Wire, "_release_reads", nothing),
    Mutant("closing_does_nothing", "sessions are not closed", "leak", 1, wire.Wire, "close_in_order", nothing),
    # the worker half
    Mutant("failed_loads_pass", "a failed load is told as arrived", "wrong tag", 3,
           worker.WorkerHalf, "poll", never_failed),
    Mutant("checksums_are_ignored", "what arrived is not compared", "wrong tag", 3,
           copier.Copier, "_wrong_arrivals", always(())),
    Mutant("reported_twice", "a report is told again", "block", 1,
           worker.WorkerHalf, "take_report", again_and_again),
    # the hooks
    Mutant("reports_are_lost", "the scheduler side drops reports", "hang", 1,
           connector.LMCacheMPSafeConnector, "update_connector_output", nothing),
    Mutant("allocation_is_not_told", "vLLM's allocation is not told to the half", "hang", 1,
           connector.LMCacheMPSafeConnector, "update_state_after_alloc", nothing),
)  # fmt: skip
