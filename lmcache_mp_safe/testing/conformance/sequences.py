"""Keys, sequences and sessions."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from lmcache_mp_safe.testing.conformance.behaviours import Flavour, behaviour
from lmcache_mp_safe.testing.conformance.bench import Bench
from lmcache_mp_safe.testing.conformance.subjects import SESSION_S, SESSIONS_CLEANED_S


@behaviour()
def a_session_gives_a_second_sequence_the_hashes_of_the_first(bench: Bench) -> None:
    first, second, session = bench.sequence(2), bench.sequence(2), bench.session()
    key = bench.key(first, session=session)
    bench.prepare(key)
    bench.commit(key)
    assert bench.prepare(bench.key(second, session=session)) == {}, "it says that the second one is stored"
    assert (bench.found(first), bench.found(second)) == (2, 0)


@behaviour()
def a_session_is_shared_by_all_clients_of_the_server(bench: Bench) -> None:
    first, second, session = bench.sequence(2), bench.sequence(2), bench.session()
    bench.retrieve(bench.key(first, session=session))  # names the first sequence and nothing else
    other = bench.subject.client()
    key = bench.key(second, session=session)
    bench.answer(other.prepare_store(key, bench.instance))
    assert bench.answer(other.commit_store(key, bench.instance, b"")) is True
    assert (bench.found(first), bench.found(second)) == (2, 0)


@behaviour()
def a_lookup_hashes_its_own_tokens_whatever_the_session_has_cached(bench: Bench) -> None:
    first, second, session = bench.sequence(1), bench.sequence(1), bench.session()
    bench.store(first)
    bench.retrieve(bench.key(first, session=session))
    assert bench.look_up(bench.key(second, session=session)) == 0


@behaviour()
def an_ended_session_has_forgotten_its_hashes(bench: Bench) -> None:
    first, second, session = bench.sequence(1), bench.sequence(1), bench.session()
    bench.prepare(bench.key(first, session=session))
    bench.end(session)
    key = bench.key(second, session=session)
    assert list(bench.prepare(key)) == [0]
    bench.commit(key)
    assert bench.found(second) == 1


@behaviour()
def a_lookup_counts_from_the_first_object_whatever_its_start(bench: Bench) -> None:
    sequence = bench.sequence(4)
    bench.store(sequence, 0, 3)
    assert bench.look_up(bench.key(sequence, 2, 4)) == 3


@behaviour()
def a_lookup_ends_at_the_first_gap(bench: Bench) -> None:
    sequence = bench.sequence(4)
    bench.store(sequence, 0, 1)
    bench.store(sequence, 2, 4)
    assert bench.found(sequence) == 1


@behaviour()
def an_object_is_named_by_everything_before_it(bench: Bench) -> None:
    sequence = bench.sequence(2)
    bench.store(sequence)
    swapped = [*sequence[bench.chunk :], *sequence[: bench.chunk]]
    assert bench.found(swapped) == 0


@behaviour()
def namespace_and_salt_keep_objects_apart(bench: Bench) -> None:
    sequence = bench.sequence(1)
    bench.store(sequence)
    bench.register(namespace=f"{bench.namespace}-other")
    assert bench.look_up(bench.key(sequence, salt="tenant")) == 0
    assert bench.look_up(bench.key(sequence, namespace=f"{bench.namespace}-other")) == 0
    assert bench.found(sequence) == 1


@behaviour()
def indices_of_a_reservation_count_from_its_start(bench: Bench) -> None:
    sequence = bench.sequence(4)
    bench.store(sequence, 0, 3)
    assert list(bench.prepare(bench.key(sequence, 2, 4))) == [1]


@behaviour()
def tokens_behind_the_last_whole_object_change_no_name(bench: Bench) -> None:
    sequence = bench.sequence(2)
    key = bench.key(sequence, suffix=(1, 2, 3))
    bench.prepare(key)
    bench.commit(key)
    assert bench.found(sequence) == 2


@behaviour()
def operations_with_suffixes_of_their_own_have_records_of_their_own(bench: Bench) -> None:
    sequence = bench.sequence(2)
    one, other = bench.key(sequence, 0, 1, suffix=(1,)), bench.key(sequence, 0, 1, suffix=(2,))
    bench.prepare(one)
    assert bench.commit(other) is False
    assert bench.commit(one) is True


@behaviour()
def a_store_or_a_load_without_the_tokens_from_the_first_on_gets_no_answer(bench: Bench) -> None:
    key = bench.key(bench.sequence(2))
    short = dataclasses.replace(key, token_ids=key.token_ids[bench.chunk :])
    assert bench.silent(bench.client.prepare_store(short, bench.instance))
    assert bench.silent(bench.client.prepare_retrieve(short, bench.instance))


@behaviour()
def token_ids_of_more_than_32_bits_or_below_zero_get_no_answer(bench: Bench) -> None:
    for wrong in (-1, 2**32):
        tokens = bench.sequence(1)
        tokens[3] = wrong
        assert bench.silent(bench.client.lookup(bench.key(tokens), 1))
        assert bench.silent(bench.client.prepare_store(bench.key(tokens), bench.instance))


@behaviour()
def token_ids_up_to_32_bits_are_taken(bench: Bench) -> None:
    tokens = bench.sequence(1)
    tokens[0], tokens[1] = 0, 2**32 - 1
    bench.store(tokens)
    assert bench.found(tokens) == 1


@behaviour()
def a_store_or_a_load_without_a_worker_gets_no_answer(bench: Bench) -> None:
    key = dataclasses.replace(bench.key(bench.sequence(1)), worker_id=None)
    assert bench.silent(bench.client.prepare_store(key, bench.instance))
    assert bench.silent(bench.client.prepare_retrieve(key, bench.instance))


@behaviour()
def a_lookup_for_no_reader_gets_no_answer(bench: Bench) -> None:
    key = dataclasses.replace(bench.key(bench.sequence(1)), num_kv_readers=0)
    assert bench.silent(bench.client.lookup(key, 1))


@behaviour()
def the_status_of_a_lookup_is_told_once_and_of_an_unknown_one_is_zero(bench: Bench) -> None:
    sequence = bench.sequence(1)
    bench.store(sequence)
    key = bench.key(sequence)
    bench.answer(bench.client.lookup(key, 1))
    assert [bench.status(key.request_id) for _ in range(2)] == [1, 0]
    assert bench.status(bench.session()) == 0


@behaviour()
def a_lookup_whose_status_nobody_asks_for_is_kept(bench: Bench) -> None:
    before = bench.subject.open_lookups()
    key = bench.key(bench.sequence(1))
    bench.answer(bench.client.lookup(key, 1))
    bench.end(key.request_id)
    assert bench.subject.open_lookups() == before + 1
    bench.status(key.request_id)
    assert bench.subject.open_lookups() == before


@behaviour()
def the_end_of_an_unknown_session_is_answered(bench: Bench) -> None:
    bench.end(bench.session())


@behaviour(Flavour.PATIENT)
def a_session_that_has_outlived_its_time_frees_nothing(bench: Bench) -> Iterator[float]:
    sequence = bench.sequence(1)
    bench.store(sequence)
    key = bench.key(sequence)
    assert bench.look_up(key) == 1
    yield SESSION_S + SESSIONS_CLEANED_S + 1.0
    bench.free(key)
    assert bench.locks(sequence) == 1
