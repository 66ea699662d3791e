"""Deliberate mistakes in both halves, each of which the simulator must catch.

Each is a patch of one function. `broken` says what it makes of the design, `caught_by` which invariants notice.
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
from lmcache_mp_safe.ops import streamed
from lmcache_mp_safe.scheduler import certify, half, hits, machine, progress, stores
from lmcache_mp_safe.wire import wire
from lmcache_mp_safe.worker import copier
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


def copied_in_the_plan_that_found_them(original: Any) -> Any:
    def dispatch(self: Any, run: Any, plan_number: int, now: float) -> Any:
        made = original(self, run, plan_number, now)
        found_anew = not made and all(item.pinned for item in run.items)
        return original(self, run, plan_number, now) if found_anew else made

    return dispatch


def never_recorded(original: Any) -> Any:
    return lambda self: streamed.StreamFence(self._device.event())


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


def given_up_at_once(original: Any) -> Any:
    def give_up(self: Any, link: Any, call: Any, now: float) -> None:
        self._assume_done(link, call, now)
        self._forget(link, call)

    return give_up


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
    Mutant("first_look_is_enough", "what is found anew is copied in the same plan", stores.Stores, "_dispatch",
           copied_in_the_plan_that_found_them),
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
    Mutant("window_without_its_first_page", "a boundary object lacks a page", groups.Group, "columns_at",
           without_its_first_page),
    Mutant("one_namespace_for_ever", "a reset of the cache changes no name", half.SchedulerHalf, "_attach", as_before),
    Mutant("whole_prompt_is_promised", "a hit leaves nothing to compute", half.SchedulerHalf, "_deepest_hit",
           everything),
    Mutant("local_tokens_are_promised", "a promise counts vLLM's own hit again", machine.RequestRecord,
           "promised_tokens", local_ones_too),
    Mutant("shared_pages_are_written", "a load writes pages of other requests", hits.Hits, "_targets", every_page),
    Mutant("one_page_too_few", "a load leaves out the page behind the local hit", hits.Hits, "_targets",
           one_page_too_few),
    Mutant("one_column_off", "a load writes into other columns", hits.Hits, "_targets", one_column_off),
    Mutant("loads_not_planned", "an admitted hit is never loaded", half.SchedulerHalf, "build_plan",
           without("loads", ())),
    Mutant("retired_ends_early", "the scheduler says too early that nothing is under way", half.SchedulerHalf,
           "has_pending_work", constant(False)),
    Mutant("end_is_not_told", "the end of a request is ignored", half.SchedulerHalf, "finished", nothing),
    Mutant("content_without_extra_keys", "a salt does not name content", identity, "encode_extra", always(b"")),
    Mutant("content_without_parent", "a chunk is named by its own tokens", identity.PrefixDigests, "_range_digest",
           without_chain),
    Mutant("locks_are_not_freed", "locks that are not needed stay", wire.Wire, "free", only_noted),
    Mutant("slots_are_not_given_back", "what is reserved and not committed stays so", wire.Wire, "_publish", nothing),
    Mutant("debts_are_forgotten", "nothing is settled with a server that stood still", wire.Wire, "_inherit", nothing),
    Mutant("no_last_question", "a lookup whose answers are lost is not asked about again", wire.Wire,
           "_give_up_lookup", given_up_at_once),
    Mutant("sessions_do_not_end", "no session ends on the server", wire.Wire, "_send", never_used),
    Mutant("no_end_of_reading", "a closed session keeps its retrieve", wire.Wire, "_release_reads", nothing),
    Mutant("closing_does_nothing", "sessions are not closed", wire.Wire, "close_in_order", nothing),
    Mutant("failed_loads_pass", "a failed load is told as arrived", worker.WorkerHalf, "poll", never_failed),
    Mutant("checksums_are_ignored", "what arrived is not compared", copier.Copier, "_wrong_arrivals", always(())),
    Mutant("no_fence", "copies do not wait for the engine's writes", streamed.StreamedBackend, "record_fence",
           never_recorded),
    Mutant("reported_twice", "a report is told again", worker.WorkerHalf, "take_report", again_and_again),
    Mutant("reports_are_lost", "the scheduler side drops reports", connector.LMCacheMPSafeConnector,
           "update_connector_output", nothing),
    Mutant("preemption_is_not_told", "vLLM's allocation is not told to the half", connector.LMCacheMPSafeConnector,
           "update_state_after_alloc", nothing),
)  # fmt: skip
