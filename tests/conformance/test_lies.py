"""Fakes that lie: each deliberate untruth must be noticed, and by the behaviour that it contradicts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from lmcache_mp_safe.testing.conformance import SERVER_BEHAVIOURS
from lmcache_mp_safe.testing.conformance.bench import Bench
from lmcache_mp_safe.testing.conformance.subjects import FakeSubject
from lmcache_mp_safe.testing.fake_server import FakeServer, Reply
from lmcache_mp_safe.testing.fake_server.instances import Instances
from lmcache_mp_safe.testing.fake_server.locks import TtlLock
from lmcache_mp_safe.testing.fake_server.objects import ObjectName, Objects
from lmcache_mp_safe.testing.fake_server.recency import Recency
from lmcache_mp_safe.testing.fake_server.room import Room
from lmcache_mp_safe.testing.fake_server.sessions import HandlerError, Session, chunk_hashes

Patch = pytest.MonkeyPatch


def noticed_by() -> set[str]:
    """Behaviours that the fake, as it is patched now, does not have."""
    wrong = set()
    for one in SERVER_BEHAVIOURS:
        subject = FakeSubject(one.flavour)
        try:
            for seconds in one.steps(Bench(subject)):
                subject.wait(seconds)
        except AssertionError:
            wrong.add(one.name)
        finally:
            subject.close()
    return wrong


def forgets_hashes(patch: Patch) -> None:
    """A session hashes the tokens of each call."""

    def fresh(self: Session, start: int, end: int, chunk: int) -> list[bytes]:
        if end > len(self.tokens):
            raise HandlerError
        return chunk_hashes(self.tokens, chunk, start, end)

    patch.setattr(Session, "hashes_of", fresh)


def respects_start(patch: Patch) -> None:
    """A lookup begins where its key begins."""
    honest = FakeServer.lookup

    def lookup(self: FakeServer, key: Any, tp_size: int) -> None:
        honest(self, key, tp_size)
        done = self.lookups[key.request_id]
        found = max(0, done.found - key.start // self.server_chunk)
        self.lookups[key.request_id] = dataclasses.replace(done, found=found)

    patch.setattr(FakeServer, "lookup", lookup)


def counts_indices_from_zero(patch: Patch) -> None:
    honest = FakeServer.prepare_store

    def prepare(self: FakeServer, key: Any, instance_id: int) -> Any:
        answer = honest(self, key, instance_id)
        first = key.start // self.server_chunk
        answer.context["chunk_indices"] = [first + index for index in answer.context["chunk_indices"]]
        return answer

    patch.setattr(FakeServer, "prepare_store", prepare)


def refuses_late_commits(patch: Patch) -> None:
    """A commit whose write lock ran out is answered False."""
    honest = FakeServer.commit_store

    def commit(self: FakeServer, key: Any, instance_id: int, data: bytes) -> bool:
        names = self.writes.get((instance_id, key), [])
        live = all(name in self.objects.reserved and self.objects.reserved[name].writing.count for name in names)
        return honest(self, key, instance_id, data) and live

    patch.setattr(FakeServer, "commit_store", commit)


def publishes_late_commits(patch: Patch) -> None:
    def publish(self: Objects, names: Sequence[ObjectName]) -> None:
        for name in names:
            if name in self.reserved:
                self.readable[name] = self.reserved.pop(name)

    patch.setattr(Objects, "publish", publish)


def gives_an_expired_buffer_to_nobody(patch: Patch) -> None:
    honest = Objects.reserve

    def reserve(self: Objects, names: Sequence[ObjectName], layout: Any) -> Any:
        return honest(self, [name for name in names if name not in self.reserved], layout)

    patch.setattr(Objects, "reserve", reserve)


def drops_writes_at_unregister(patch: Patch) -> None:
    honest = FakeServer._release

    def release(self: FakeServer, instance_id: int) -> None:
        for record in [record for record in self.writes if record[0] == instance_id]:
            self.objects.delete(self.writes.pop(record), force=True)
        honest(self, instance_id)

    patch.setattr(FakeServer, "_release", release)


def answers_strangers(patch: Patch) -> None:
    """An instance that is not registered gets an answer."""
    honest = FakeServer.handle

    def handle(self: FakeServer, operation: str, arguments: Sequence[Any]) -> Any:
        return honest(self, operation, arguments) or Reply(False)

    patch.setattr(FakeServer, "handle", handle)


def allocates_what_fits(patch: Patch) -> None:
    """A reservation gets as many slots as there are."""
    honest = Room.take

    def take(self: Room, length: int, count: int) -> list[int] | None:
        while count and (offsets := honest(self, length, count)) is None:
            count -= 1
        return offsets if count else None

    patch.setattr(Room, "take", take)


def fills_from_the_end(patch: Patch) -> None:
    """Last fit."""

    honest = Room.take

    def take(self: Room, length: int, count: int) -> list[int] | None:
        self._holes.reverse()
        offsets = honest(self, length, count)
        self._holes.sort()
        return offsets

    patch.setattr(Room, "take", take)


def evicts_locked_objects(patch: Patch) -> None:
    patch.setattr(Objects, "_may_go", lambda self, name: True)


def keeps_locks_after_a_failed_retrieve(patch: Patch) -> None:
    honest = FakeServer.prepare_retrieve

    def prepare(self: FakeServer, key: Any, instance_id: int) -> Any:
        names = self._names(key)
        locked = self.objects.locked(names)
        answer = honest(self, key, instance_id)
        if not answer.success:
            self.objects.lock(locked, 1)
        return answer

    patch.setattr(FakeServer, "prepare_retrieve", prepare)


def retrieves_without_a_lock(patch: Patch) -> None:
    patch.setattr(Objects, "locked", lambda self, names: [name for name in names if name in self.readable])


def keeps_a_record_for_each_session(patch: Patch) -> None:
    """The request id is part of the key of a record: two retrieves never share one."""
    for operation in ("prepare_retrieve", "commit_retrieve"):
        honest = getattr(FakeServer, operation)

        def with_session(self: FakeServer, key: Any, instance_id: int, honest: Any = honest) -> Any:
            before, self.reads = self.reads, self.__dict__.setdefault("by_session", {}).setdefault(key.request_id, {})
            try:
                return honest(self, key, instance_id)
            finally:
                self.reads = before

        patch.setattr(FakeServer, operation, with_session)


def keeps_the_first_record_of_a_range(patch: Patch) -> None:
    """A retry of an open range adds to its record."""
    honest = FakeServer.prepare_store

    def prepare(self: FakeServer, key: Any, instance_id: int) -> Any:
        before = self.writes.get((instance_id, key), [])
        answer = honest(self, key, instance_id)
        if before:
            self.writes[instance_id, key] = [*before, *self.writes[instance_id, key]]
        return answer

    patch.setattr(FakeServer, "prepare_store", prepare)


def ends_keep_no_head(patch: Patch) -> None:
    """The end of a session touches nothing."""

    def end(self: FakeServer, request_id: str) -> None:
        self.sessions.pop(request_id, None)

    patch.setattr(FakeServer, "end_session", end)


def always_keeps_heads(patch: Patch) -> None:
    """A later part of a chain counts as older than its head without any end of a session."""

    def created(self: Recency[Any], keys: Sequence[Any]) -> None:
        for key in reversed(keys):
            self._order[key] = None
            self._order.move_to_end(key, last=False)

    patch.setattr(Recency, "created", created)


def clears_only_what_is_free(patch: Patch) -> None:
    honest = Objects.clear
    patch.setattr(Objects, "clear", lambda self, force: honest(self, force=False))


def frees_running_lookups(patch: Patch) -> None:
    honest = FakeServer.free_lookup_locks

    def free(self: FakeServer, key: Any, tp_size: int) -> None:
        if key.request_id in self.lookups:
            self.lookups[key.request_id] = dataclasses.replace(self.lookups[key.request_id], ready_at=0.0)
        honest(self, key, tp_size)

    patch.setattr(FakeServer, "free_lookup_locks", free)


def forgets_what_it_was_asked_about(patch: Patch) -> None:
    """One question is enough, whether the lookup has ended or not."""
    honest = FakeServer.query_prefetch_status

    def status(self: FakeServer, request_id: str) -> int | None:
        found = honest(self, request_id)
        self.lookups.pop(request_id, None)
        return found

    patch.setattr(FakeServer, "query_prefetch_status", status)


def never_waits(patch: Patch) -> None:
    honest = FakeServer.wait_prefetch_status
    patch.setattr(FakeServer, "wait_prefetch_status", lambda self, request_id, timeout: honest(self, request_id, 0.0))


def frees_when_a_session_ends(patch: Patch) -> None:
    honest = FakeServer.end_session

    def end(self: FakeServer, request_id: str) -> None:
        session = self.sessions.get(request_id)
        if session is not None and session.key is not None:
            self.free_lookup_locks(session.key, 1)
        honest(self, request_id)

    patch.setattr(FakeServer, "end_session", end)


def locks_for_ever(patch: Patch) -> None:
    patch.setattr(TtlLock, "count", property(lambda self: self._count))


def gives_each_lock_its_own_time(patch: Patch) -> None:
    """A later lock renews nobody's time but its own."""

    def lock(self: TtlLock, times: int = 1) -> None:
        self._count = self.count + times
        if self._clock() >= self._until:
            self._until = self._clock() + self._ttl_s

    patch.setattr(TtlLock, "lock", lock)


def registers_anew(patch: Patch) -> None:
    """A second registration under one id replaces the first one's layout."""
    honest = Instances.register

    def register(self: Instances, payload: Any, now: float) -> None:
        self._instances.pop(payload.instance_id, None)
        honest(self, payload, now)

    patch.setattr(Instances, "register", register)


def restarts_in_place(patch: Patch) -> None:
    """The pool keeps its inode over a restart."""
    patch.setattr(FakeServer, "restart", lambda self: self._begin())


def remembers_registrations(patch: Patch) -> None:
    def restart(self: FakeServer) -> None:
        self.memory.renew()
        before = self.instances
        self._begin()
        self.instances = before

    patch.setattr(FakeServer, "restart", restart)


def takes_any_token(patch: Patch) -> None:
    import lmcache_mp_safe.testing.fake_server.sessions as sessions

    patch.setattr(sessions, "next_hash", lambda before, tokens: repr((before, tuple(tokens))).encode())


LIES: list[tuple[Callable[[Patch], None], str]] = [
    (forgets_hashes, "a_session_gives_a_second_sequence_the_hashes_of_the_first"),
    (forgets_hashes, "a_session_is_shared_by_all_clients_of_the_server"),
    (respects_start, "a_lookup_counts_from_the_first_object_whatever_its_start"),
    (counts_indices_from_zero, "indices_of_a_reservation_count_from_its_start"),
    (takes_any_token, "token_ids_of_more_than_32_bits_or_below_zero_get_no_answer"),
    (refuses_late_commits, "a_commit_after_the_write_lock_ran_out_says_true_and_publishes_nothing"),
    (publishes_late_commits, "a_commit_after_the_write_lock_ran_out_says_true_and_publishes_nothing"),
    (
        gives_an_expired_buffer_to_nobody,
        "a_buffer_whose_write_lock_ran_out_goes_to_the_next_writer_and_the_first_ones_commit_publishes_it",
    ),
    (
        drops_writes_at_unregister,
        "what_was_prepared_and_never_committed_becomes_readable_when_its_writer_is_unregistered",
    ),
    (keeps_the_first_record_of_a_range, "a_retry_of_an_open_range_takes_its_record_over"),
    (answers_strangers, "calls_of_an_instance_that_is_not_registered_get_no_answer_but_its_pings_do"),
    (allocates_what_fits, "a_reservation_that_does_not_fit_as_a_whole_gets_no_slot_at_all"),
    (fills_from_the_end, "slots_are_the_first_that_fit_and_room_in_holes_that_are_too_small_is_of_no_use"),
    (evicts_locked_objects, "what_is_locked_or_being_written_is_not_evicted"),
    (ends_keep_no_head, "the_head_of_a_chain_is_kept_by_the_end_of_its_session"),
    (
        always_keeps_heads,
        "the_head_of_a_chain_that_was_stored_in_parts_goes_first_without_an_end_of_its_session",
    ),
    (keeps_locks_after_a_failed_retrieve, "freeing_after_a_failed_retrieve_takes_another_readers_lock"),
    (retrieves_without_a_lock, "a_retrieve_needs_a_lock_and_anybodys_will_do"),
    (
        keeps_a_record_for_each_session,
        "two_retrieves_of_one_range_by_one_instance_share_a_record_and_the_second_end_releases_nothing",
    ),
    (clears_only_what_is_free, "a_forced_clear_gives_a_locked_slot_to_the_next_writer"),
    (frees_running_lookups, "a_free_while_the_lookup_runs_does_nothing"),
    (forgets_what_it_was_asked_about, "a_lookup_stays_open_until_it_is_asked_about_after_its_end"),
    (never_waits, "a_wait_for_a_lookup_is_answered_at_its_end_but_not_later_than_it_says"),
    (frees_when_a_session_ends, "the_end_of_a_session_frees_nothing_and_after_it_a_free_does_neither"),
    (locks_for_ever, "locks_run_out_and_then_a_retrieve_fails"),
    (gives_each_lock_its_own_time, "a_lock_that_another_reader_takes_renews_the_time_of_all"),
    (registers_anew, "an_instance_that_is_registered_keeps_its_layout_without_a_word"),
    (restarts_in_place, "a_restart_unlinks_the_pool_and_makes_another_of_the_same_name"),
    (remembers_registrations, "a_restart_forgets_objects_sessions_and_registrations"),
]


@pytest.mark.parametrize(("lie", "behaviour"), LIES, ids=[f"{lie.__name__}-{name[:40]}" for lie, name in LIES])
def test_a_lie_is_noticed_by_the_behaviour_that_it_contradicts(
    lie: Callable[[Patch], None], behaviour: str, monkeypatch: Patch
) -> None:
    lie(monkeypatch)
    assert behaviour in noticed_by()


def test_the_honest_fake_is_not_accused() -> None:
    assert noticed_by() == set()
