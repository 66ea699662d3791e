"""Reservations and commits."""

from __future__ import annotations

import itertools

from lmcache_mp_safe.testing.conformance.behaviours import Flavour, behaviour
from lmcache_mp_safe.testing.conformance.bench import SMALL, Bench
from lmcache_mp_safe.testing.conformance.subjects import LOCK_S

_LOCKS_ARE_OVER_S = LOCK_S + 0.5


@behaviour()
def what_was_committed_is_found_and_what_was_only_prepared_is_not(bench: Bench) -> None:
    sequence = bench.sequence(2)
    key = bench.key(sequence)
    assert list(bench.prepare(key)) == [0, 1]
    assert bench.found(sequence) == 0
    assert bench.commit(key) is True
    assert bench.found(sequence) == 2


@behaviour()
def a_reservation_does_not_say_why_an_object_gets_no_slot(bench: Bench) -> None:
    sequence = bench.sequence(3)
    bench.store(sequence, 0, 1)
    bench.prepare(bench.key(sequence, 1, 2))
    assert list(bench.prepare(bench.key(sequence))) == [2], "the first is stored, the second being written"


@behaviour()
def a_commit_of_what_nobody_prepared_is_refused(bench: Bench) -> None:
    assert bench.commit(bench.key(bench.sequence(1))) is False


@behaviour()
def a_second_commit_is_refused(bench: Bench) -> None:
    key = bench.key(bench.sequence(1))
    bench.prepare(key)
    assert [bench.commit(key), bench.commit(key)] == [True, False]


@behaviour()
def a_commit_belongs_to_the_instance_that_prepared(bench: Bench) -> None:
    sequence, other = bench.sequence(1), bench.register()
    key = bench.key(sequence)
    bench.prepare(key)
    assert bench.commit(key, other) is False
    assert bench.commit(key) is True


@behaviour()
def a_commit_finds_its_record_under_another_session(bench: Bench) -> None:
    sequence = bench.sequence(1)
    bench.prepare(bench.key(sequence))
    assert bench.commit(bench.key(sequence)) is True
    assert bench.found(sequence) == 1


@behaviour()
def a_retry_of_an_open_range_takes_its_record_over(bench: Bench) -> None:
    """The first commit publishes what the retry was granted, unwritten; the second finds nothing."""
    sequence = bench.sequence(3)
    bench.store(sequence, 0, 1)
    key = bench.key(sequence)
    assert list(bench.prepare(key)) == [1, 2]
    bench.clear(force=False)  # the first object goes, what is being written stays
    assert list(bench.prepare(key)) == [0]
    assert [bench.commit(key), bench.commit(key)] == [True, False]
    assert bench.found(sequence) == 1


@behaviour(Flavour.SHORT)
def a_commit_after_the_write_lock_ran_out_says_true_and_publishes_nothing(bench: Bench) -> None:
    sequence = bench.sequence(1)
    key = bench.key(sequence)
    bench.prepare(key)
    bench.wait(_LOCKS_ARE_OVER_S)
    assert bench.commit(key) is True
    assert bench.found(sequence) == 0


@behaviour(Flavour.SHORT)
def a_buffer_whose_write_lock_ran_out_goes_to_the_next_writer_and_the_first_ones_commit_publishes_it(
    bench: Bench,
) -> None:
    sequence, second = bench.sequence(1), bench.register()
    key = bench.key(sequence)
    before = bench.prepare(key)
    bench.wait(_LOCKS_ARE_OVER_S)
    assert bench.prepare(bench.key(sequence), second) == before, "the same bytes"
    assert bench.commit(key) is True
    assert bench.found(sequence) == 1, "while the second one writes"
    assert bench.commit(bench.key(sequence), second) is True


@behaviour()
def what_was_prepared_and_never_committed_becomes_readable_when_its_writer_is_unregistered(bench: Bench) -> None:
    sequence, writer = bench.sequence(1), bench.register()
    bench.prepare(bench.key(sequence), writer)
    assert bench.found(sequence) == 0
    bench.unregister(writer)
    assert bench.found(sequence) == 1


@behaviour()
def a_store_with_data_is_written_by_the_server(bench: Bench) -> None:
    sequence, content = bench.sequence(1), bytes(range(256)) * (SMALL // 256)
    assert bench.store_inline(bench.key(sequence), [content]) is True
    key = bench.key(sequence)
    assert bench.look_up(key) == 1
    offsets = bench.retrieve(key)
    assert offsets is not None
    assert bench.read(offsets[0], SMALL) == content


@behaviour()
def a_store_with_data_says_true_for_what_is_there_already(bench: Bench) -> None:
    sequence = bench.sequence(1)
    offsets = bench.store(sequence)
    bench.write(offsets[0], b"first" * 8)
    assert bench.store_inline(bench.key(sequence), [b"later" * 8 + bytes(SMALL - 40)]) is True
    assert bench.read(offsets[0], 5) == b"first"


@behaviour()
def a_store_with_data_of_another_layout_is_refused(bench: Bench) -> None:
    sequence = bench.sequence(1)
    assert bench.store_inline(bench.key(sequence), [bytes(2 * SMALL)]) is False
    assert bench.found(sequence) == 0


@behaviour()
def slots_of_one_call_lie_in_the_pool_and_do_not_overlap(bench: Bench) -> None:
    offsets = sorted(bench.prepare(bench.key(bench.sequence(8))).values())
    assert all(offset % 4096 == 0 for offset in offsets)
    assert all(after - before >= SMALL for before, after in itertools.pairwise(offsets))
    assert offsets[-1] + SMALL <= bench.segment().stat().st_size


@behaviour()
def an_object_can_be_mended_in_place_under_a_read_lock(bench: Bench) -> None:
    sequence = bench.sequence(1)
    bench.store(sequence)
    mender, reader = bench.key(sequence), bench.key(sequence, suffix=(1,))
    assert bench.look_up(mender) == 1
    offsets = bench.retrieve(mender)
    assert offsets is not None
    bench.write(offsets[0], b"mended")
    bench.done(mender)
    assert bench.look_up(reader) == 1
    assert bench.retrieve(reader) == offsets
    assert bench.read(offsets[0], 6) == b"mended"
