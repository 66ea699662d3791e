"""Allocation and eviction. The pool holds `subjects.POOL_BYTES`, which are 16 big objects."""

from __future__ import annotations

from lmcache_mp_safe.testing.conformance.behaviours import behaviour
from lmcache_mp_safe.testing.conformance.bench import BIG, SMALL, Bench
from lmcache_mp_safe.testing.conformance.subjects import POOL_BYTES

_FITS = POOL_BYTES // BIG
_EVICTED_BY_THEN_S = 2.5
# The whole pool is 16 big objects; from 13 on eviction runs, and takes a fifth of them by number.
_OVER_THE_WATERMARK = 14
_GO = 2


@behaviour()
def a_reservation_that_does_not_fit_as_a_whole_gets_no_slot_at_all(bench: Bench) -> None:
    bench.instance = bench.register(BIG)
    assert bench.prepare(bench.key(bench.sequence(_FITS + 1))) == {}
    assert len(bench.prepare(bench.key(bench.sequence(_FITS)))) == _FITS


@behaviour()
def no_room_looks_like_stored(bench: Bench) -> None:
    bench.instance = bench.register(BIG)
    bench.prepare(bench.key(bench.sequence(_FITS)))
    sequence = bench.sequence(1)
    assert bench.prepare(bench.key(sequence)) == {}
    assert bench.found(sequence) == 0


@behaviour()
def a_store_with_data_says_true_also_without_room(bench: Bench) -> None:
    big = bench.register(BIG)
    bench.prepare(bench.key(bench.sequence(_FITS)), big)
    sequence = bench.sequence(1)
    assert bench.store_inline(bench.key(sequence), [bytes(SMALL)]) is True
    assert bench.found(sequence) == 0


@behaviour()
def slots_are_the_first_that_fit_and_room_in_holes_that_are_too_small_is_of_no_use(bench: Bench) -> None:
    big, small = bench.register(2 * BIG), bench.register(4096)
    stored: list[int] = []
    sequences = [bench.sequence(1) for _ in range(_FITS // 2 - 1)]
    for sequence in sequences:
        slots = bench.prepare(bench.key(sequence), big)
        bench.commit(bench.key(sequence), big)
        bench.prepare(bench.key(bench.sequence(1)), small)  # stays reserved, and keeps two holes apart
        stored += slots.values()
    bench.clear(force=False)
    larger = bench.register(3 * BIG)
    assert bench.prepare(bench.key(bench.sequence(1)), larger) == {}, "nearly all of the pool is free"
    bench.wait(_EVICTED_BY_THEN_S)
    assert bench.prepare(bench.key(bench.sequence(1)), larger) == {}, "and it does not mend by itself"
    assert bench.prepare(bench.key(bench.sequence(2)), big) == {0: stored[0], 1: stored[1]}


@behaviour()
def nothing_is_evicted_below_four_fifths(bench: Bench) -> None:
    bench.instance = bench.register(BIG)
    sequence = bench.sequence(_FITS * 4 // 5)
    bench.store(sequence)
    bench.wait(_EVICTED_BY_THEN_S)
    assert bench.found(sequence) == _FITS * 4 // 5


@behaviour()
def a_full_pool_has_room_again_a_little_later(bench: Bench) -> None:
    bench.instance = bench.register(BIG)
    bench.store(bench.sequence(_FITS))
    bench.wait(_EVICTED_BY_THEN_S)
    assert len(bench.prepare(bench.key(bench.sequence(2)))) == 2


@behaviour()
def what_is_locked_or_being_written_is_not_evicted(bench: Bench) -> None:
    bench.instance = bench.register(BIG)
    sequence = bench.sequence(_FITS // 2)
    bench.store(sequence)
    assert bench.look_up(bench.key(sequence)) == _FITS // 2
    writing = bench.key(bench.sequence(_FITS // 2))
    bench.prepare(writing)
    bench.wait(_EVICTED_BY_THEN_S)
    assert bench.prepare(bench.key(bench.sequence(1))) == {}
    assert bench.found(sequence) == _FITS // 2


@behaviour()
def the_head_of_a_chain_that_was_stored_in_parts_goes_first_without_an_end_of_its_session(bench: Bench) -> None:
    bench.instance = bench.register(BIG)
    chain, session = bench.sequence(_FITS // 2), bench.session()
    _store_in_parts(bench, chain, session)
    bench.store(bench.sequence(_OVER_THE_WATERMARK - _FITS // 2))
    bench.wait(_EVICTED_BY_THEN_S)
    assert bench.found(chain) == 0
    assert bench.prepare(bench.key(chain, _GO)) == {}, "its tail is still there"


@behaviour()
def the_head_of_a_chain_is_kept_by_the_end_of_its_session(bench: Bench) -> None:
    bench.instance = bench.register(BIG)
    chain, session = bench.sequence(_FITS // 2), bench.session()
    _store_in_parts(bench, chain, session)
    bench.end(session)
    bench.store(bench.sequence(_OVER_THE_WATERMARK - _FITS // 2))
    bench.wait(_EVICTED_BY_THEN_S)
    assert bench.found(chain) == _FITS // 2 - _GO


@behaviour()
def a_lookup_keeps_what_it_finds_from_being_evicted_next(bench: Bench) -> None:
    bench.instance = bench.register(BIG)
    chain = bench.sequence(2)
    bench.store(chain)
    bench.store(bench.sequence(4))
    assert bench.found(chain) == 2
    bench.store(bench.sequence(_OVER_THE_WATERMARK - 6))
    bench.wait(_EVICTED_BY_THEN_S)
    assert bench.found(chain) == 2


def _store_in_parts(bench: Bench, chain: list[int], session: str) -> None:
    """Head and tail in two calls of one session. A call counts its own last object as the oldest, but of two calls the
    first one's objects are older."""
    for start, end in ((0, _GO), (_GO, len(chain) // bench.chunk)):
        key = bench.key(chain, start, end, session=session)
        bench.prepare(key)
        bench.commit(key)
