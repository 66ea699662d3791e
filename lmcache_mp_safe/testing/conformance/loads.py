"""Read locks, retrieves and their ends."""

from __future__ import annotations

import dataclasses
from typing import Any

from lmcache_mp_safe.testing.conformance.behaviours import Flavour, behaviour
from lmcache_mp_safe.testing.conformance.bench import BIG, SMALL, Bench
from lmcache_mp_safe.testing.conformance.subjects import LOCK_S, LOOKUP_S

_LOCKS_ARE_OVER_S = LOCK_S + 0.5
_LOOKUP_IS_OVER_S = 10 * LOOKUP_S


def stored(bench: Bench, objects: int = 2) -> list[int]:
    sequence = bench.sequence(objects)
    bench.store(sequence)
    return sequence


@behaviour()
def a_retrieve_says_where_each_object_lies(bench: Bench) -> None:
    sequence = bench.sequence(3)
    offsets = bench.store(sequence)
    key = bench.key(sequence, 1, 3)
    assert bench.look_up(bench.key(sequence)) == 3
    assert bench.retrieve(key) == [offsets[1], offsets[2]]


@behaviour()
def a_retrieve_needs_a_lock_and_anybodys_will_do(bench: Bench) -> None:
    sequence = stored(bench)
    assert bench.retrieve(bench.key(sequence)) is None
    assert bench.look_up(bench.key(sequence)) == 2
    assert bench.retrieve(bench.key(sequence)) is not None


@behaviour()
def the_end_of_a_retrieve_releases_one_lock(bench: Bench) -> None:
    sequence = stored(bench)
    for _ in range(3):
        bench.look_up(bench.key(sequence))
    key = bench.key(sequence)
    assert bench.retrieve(key) is not None
    assert bench.done(key) is True
    assert bench.locks(sequence) == 2


@behaviour()
def the_end_of_no_retrieve_is_answered_true_and_releases_nothing(bench: Bench) -> None:
    sequence = stored(bench)
    bench.look_up(bench.key(sequence))
    assert bench.done(bench.key(sequence)) is True
    assert bench.locks(sequence) == 1


@behaviour()
def a_lookup_locks_once_for_each_reader_and_a_free_releases_as_many(bench: Bench) -> None:
    sequence = stored(bench)
    key = dataclasses.replace(bench.key(sequence), num_kv_readers=3)
    bench.look_up(key)
    bench.look_up(other := dataclasses.replace(bench.key(sequence), num_kv_readers=2))
    bench.free(key)
    assert bench.locks(sequence) == 2
    bench.free(other)


@behaviour()
def locks_are_anonymous_and_releasing_twice_takes_another_readers(bench: Bench) -> None:
    sequence = stored(bench)
    mine, others = bench.key(sequence), bench.key(sequence)
    bench.look_up(mine)
    bench.look_up(others)
    bench.free(mine)
    bench.free(mine)
    assert bench.retrieve(others) is None


@behaviour()
def a_free_releases_a_part_of_the_range(bench: Bench) -> None:
    sequence = stored(bench, 3)
    key = bench.key(sequence)
    bench.look_up(key)
    bench.free(bench.key(sequence, 0, 1, session=key.request_id))
    assert bench.retrieve(bench.key(sequence, 0, 1)) is None
    assert bench.retrieve(bench.key(sequence, 1, 3)) is not None


@behaviour()
def a_free_goes_no_further_than_its_lookup_found(bench: Bench) -> None:
    sequence = bench.sequence(2)
    bench.store(sequence, 0, 1)
    mine = bench.key(sequence)
    assert bench.look_up(mine) == 1
    bench.store(sequence, 1, 2)
    assert bench.look_up(others := bench.key(sequence)) == 2
    bench.free(mine)
    assert bench.retrieve(others) is not None


@behaviour()
def a_free_without_a_lookup_releases_nothing(bench: Bench) -> None:
    sequence = stored(bench)
    bench.look_up(bench.key(sequence))
    bench.free(bench.key(sequence))
    assert bench.locks(sequence) == 1


def running_lookup(bench: Bench) -> tuple[list[int], Any]:
    """An object that is not in memory, and the key by which it is being looked up."""
    sequence = stored(bench, 1)
    bench.subject.forget_memory()
    key = bench.key(sequence)
    bench.answer(bench.client.lookup(key, 1))
    return sequence, key


@behaviour()
def a_free_before_the_status_was_asked_for_releases_a_lookup_that_has_ended(bench: Bench) -> None:
    sequence = stored(bench)
    key = bench.key(sequence)
    bench.answer(bench.client.lookup(key, 1))
    bench.free(key)
    assert bench.status(key.request_id) == 0
    assert bench.locks(sequence) == 0


@behaviour(Flavour.SLOW)
def a_free_while_the_lookup_runs_does_nothing(bench: Bench) -> None:
    sequence, key = running_lookup(bench)
    assert bench.answer(bench.client.query_prefetch_status(key.request_id)) is None, "it runs"
    bench.free(key)
    assert bench.status(key.request_id) == 1
    assert bench.locks(sequence) == 1


@behaviour(Flavour.SLOW)
def a_lookup_stays_open_until_it_is_asked_about_after_its_end(bench: Bench) -> None:
    before = bench.subject.open_lookups()
    _, key = running_lookup(bench)
    assert bench.answer(bench.client.query_prefetch_status(key.request_id)) is None, "it runs"
    bench.wait(_LOOKUP_IS_OVER_S)
    assert bench.subject.open_lookups() == before + 1
    assert bench.answer(bench.client.query_prefetch_status(key.request_id)) == 1
    assert bench.subject.open_lookups() == before


@behaviour(Flavour.SLOW)
def a_wait_for_a_lookup_is_answered_at_its_end_but_not_later_than_it_says(bench: Bench) -> None:
    _, key = running_lookup(bench)
    assert bench.answer(bench.client.wait_prefetch_status(key.request_id, 0.01)) is None, "it runs"
    assert bench.answer(bench.client.wait_prefetch_status(key.request_id, _LOOKUP_IS_OVER_S)) == 1


@behaviour()
def the_end_of_a_session_frees_nothing_and_after_it_a_free_does_neither(bench: Bench) -> None:
    sequence = stored(bench)
    key = bench.key(sequence)
    bench.look_up(key)
    bench.end(key.request_id)
    bench.free(key)
    assert bench.locks(sequence) == 1


@behaviour()
def a_second_lookup_under_one_session_loses_what_the_first_has_locked(bench: Bench) -> None:
    sequence = stored(bench)
    key = bench.key(sequence)
    bench.look_up(key)
    bench.look_up(key)
    bench.free(key)
    assert bench.locks(sequence) == 1


@behaviour()
def a_lookup_leaves_no_lock_behind_the_first_gap(bench: Bench) -> None:
    sequence = bench.sequence(3)
    bench.store(sequence, 0, 1)
    bench.store(sequence, 2, 3)
    bench.look_up(bench.key(sequence))
    assert bench.retrieve(bench.key(sequence, 2, 3)) is None


@behaviour()
def a_failed_retrieve_releases_one_lock_on_every_readable_object_of_its_range(bench: Bench) -> None:
    sequence = bench.sequence(2)
    bench.store(sequence, 0, 1)
    for _ in range(3):
        bench.look_up(bench.key(sequence))
    assert bench.retrieve(bench.key(sequence)) is None
    assert bench.locks(sequence) == 2


@behaviour()
def freeing_after_a_failed_retrieve_takes_another_readers_lock(bench: Bench) -> None:
    sequence = bench.sequence(2)
    bench.store(sequence, 0, 1)
    mine, others = bench.key(sequence), bench.key(sequence, 0, 1)
    bench.look_up(mine)
    bench.look_up(others)
    assert bench.retrieve(mine) is None
    bench.free(mine)
    assert bench.retrieve(others) is None


@behaviour()
def two_retrieves_of_one_range_by_one_instance_share_a_record_and_the_second_end_releases_nothing(
    bench: Bench,
) -> None:
    sequence = stored(bench)
    one, other = bench.key(sequence), bench.key(sequence)
    for key in (one, other):
        bench.look_up(key)
    for key in (one, other):
        assert bench.retrieve(key) is not None
    for key in (one, other):
        assert bench.done(key) is True
    assert bench.locks(sequence) == 1


@behaviour()
def retrieves_of_two_instances_have_records_of_their_own(bench: Bench) -> None:
    sequence, second = stored(bench), bench.register()
    key = bench.key(sequence)
    for _ in range(2):
        bench.look_up(bench.key(sequence))
    for instance in (bench.instance, second):
        assert bench.retrieve(key, instance) is not None
    for instance in (bench.instance, second):
        bench.done(key, instance)
    assert bench.locks(sequence) == 0


@behaviour(Flavour.SHORT)
def locks_run_out_and_then_a_retrieve_fails(bench: Bench) -> None:
    sequence = stored(bench)
    key = bench.key(sequence)
    bench.look_up(key)
    bench.wait(_LOCKS_ARE_OVER_S)
    assert bench.retrieve(key) is None


@behaviour(Flavour.SHORT)
def a_lock_that_another_reader_takes_renews_the_time_of_all(bench: Bench) -> None:
    sequence = stored(bench)
    key = bench.key(sequence)
    bench.look_up(key)
    bench.wait(LOCK_S / 2)
    bench.look_up(bench.key(sequence))
    bench.wait(LOCK_S / 2 + 0.5)
    assert bench.locks(sequence) == 2


@behaviour(Flavour.SHORT)
def a_lock_taken_after_all_others_ran_out_is_the_only_one(bench: Bench) -> None:
    sequence = stored(bench)
    for _ in range(3):
        bench.look_up(bench.key(sequence))
    bench.wait(_LOCKS_ARE_OVER_S)
    bench.look_up(bench.key(sequence))
    assert bench.locks(sequence) == 1


@behaviour()
def a_forced_clear_gives_a_locked_slot_to_the_next_writer(bench: Bench) -> None:
    sequence = bench.sequence(1)
    bench.instance = bench.register(BIG)
    (offset,) = bench.store(sequence).values()
    key = bench.key(sequence)
    bench.look_up(key)
    assert bench.retrieve(key) == [offset]
    bench.clear(force=True)
    assert offset in bench.prepare(bench.key(bench.sequence(16))).values(), "under the reader's eyes"


@behaviour()
def a_clear_without_force_leaves_what_is_locked(bench: Bench) -> None:
    locked, free = stored(bench), stored(bench)
    bench.look_up(bench.key(locked))
    bench.clear(force=False)
    assert (bench.found(locked), bench.found(free)) == (2, 0)


@behaviour()
def an_unregistered_reader_loses_its_open_retrieves(bench: Bench) -> None:
    sequence, reader = stored(bench), bench.register(SMALL)
    key = bench.key(sequence)
    bench.look_up(key)
    assert bench.retrieve(key, reader) is not None
    bench.unregister(reader)
    assert bench.locks(sequence) == 0
