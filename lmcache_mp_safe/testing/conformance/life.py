"""Registration, silence and restarts."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from typing import Any

from lmcache_mp_safe.testing.conformance.behaviours import Flavour, behaviour
from lmcache_mp_safe.testing.conformance.bench import SMALL, Bench
from lmcache_mp_safe.testing.conformance.subjects import POOL_BYTES, REAP_S
from lmcache_mp_safe.wire.connecting import new_instance
from lmcache_mp_safe.wire.keys import registration

_REAPED_BY_THEN_S = REAP_S * 1.25 + 2.0


@behaviour()
def a_registration_names_the_pool_and_its_size(bench: Bench) -> None:
    answer = bench.answer(
        bench.client.register_kv_cache_engine_driven_context(registration(new_instance(), bench.namespace, SMALL))
    )
    assert answer.pool_size == POOL_BYTES
    assert bench.segment().stat().st_size >= POOL_BYTES
    assert bench.segment().stat().st_mode & 0o777 == 0o600


@behaviour()
def registering_again_is_answered_and_changes_nothing(bench: Bench) -> None:
    key = bench.key(bench.sequence(1))
    bench.prepare(key)
    bench.register(instance=bench.instance)
    assert bench.commit(key) is True


@behaviour()
def an_instance_that_is_registered_keeps_its_layout_without_a_word(bench: Bench) -> None:
    bench.register(4 * SMALL, instance=bench.instance)
    answer = bench.answer(bench.client.prepare_store(bench.key(bench.sequence(1)), bench.instance))
    assert [slot["length"] for slot in answer.context["slots"]] == [SMALL]


@behaviour()
def each_instance_reserves_by_its_own_layout_and_reads_by_the_writers(bench: Bench) -> None:
    sequence, larger = bench.sequence(1), bench.register(4 * SMALL)
    key = bench.key(sequence)
    answer = bench.answer(bench.client.prepare_store(key, larger))
    assert [slot["length"] for slot in answer.context["slots"]] == [4 * SMALL]
    bench.commit(key, larger)
    bench.look_up(key)
    answer = bench.answer(bench.client.prepare_retrieve(key, bench.instance))
    assert [slot["length"] for slot in answer.context["slots"]] == [4 * SMALL]


@behaviour()
def a_registration_with_an_unknown_dtype_or_no_slots_gets_no_answer(bench: Bench) -> None:
    for changes in ({"dtype_str": "nothing"}, {"num_physical_slots": 0}):
        payload = registration(new_instance(), bench.namespace, SMALL)
        for name, value in changes.items():
            setattr(payload, name, value)
        assert bench.silent(bench.client.register_kv_cache_engine_driven_context(payload))


@behaviour()
def calls_of_an_instance_that_is_not_registered_get_no_answer_but_its_pings_do(bench: Bench) -> None:
    stranger, key = new_instance(), bench.key(bench.sequence(1))
    assert all(bench.silent(future) for future in _calls(bench, key, stranger))
    assert bench.answer(bench.client.ping(stranger)) is True
    assert bench.answer(bench.client.ping(None)) is True


@behaviour()
def unregistering_a_stranger_is_answered(bench: Bench) -> None:
    bench.unregister(new_instance())


@behaviour()
def a_namespace_that_nobody_is_registered_in_finds_nothing_and_its_frees_and_ends_get_no_answer(bench: Bench) -> None:
    sequence = bench.sequence(1)
    bench.store(sequence)
    key = bench.key(sequence)
    assert bench.look_up(key) == 1
    bench.unregister(bench.instance)
    assert bench.look_up(bench.key(sequence)) == 0
    assert bench.silent(bench.client.free_lookup_locks(key, 1))
    assert bench.silent(bench.client.end_session(key.request_id))


@behaviour()
def a_namespace_lives_until_its_last_instance_is_unregistered(bench: Bench) -> None:
    sequence, second = bench.sequence(1), bench.register()
    bench.store(sequence)
    bench.unregister(bench.instance)
    assert bench.found(sequence) == 1
    bench.unregister(second)
    assert bench.look_up(bench.key(sequence)) == 0


@behaviour()
def objects_outlive_their_writer(bench: Bench) -> None:
    sequence, writer = bench.sequence(1), bench.register()
    key = bench.key(sequence)
    bench.prepare(key, writer)
    bench.commit(key, writer)
    bench.unregister(writer)
    assert bench.found(sequence) == 1


@behaviour(Flavour.PATIENT)
def an_instance_that_has_pinged_is_reaped_when_it_falls_silent_and_registering_heals_it(
    bench: Bench,
) -> Iterator[float]:
    sequence, silent = bench.sequence(1), bench.register()
    key = bench.key(sequence)
    bench.prepare(key, silent)
    assert bench.answer(bench.client.ping(silent)) is True
    yield _REAPED_BY_THEN_S
    assert bench.found(sequence) == 1, "what it had prepared was published"
    assert bench.silent(bench.client.prepare_store(key, silent))
    bench.register(instance=silent)
    assert list(bench.prepare(bench.key(bench.sequence(1)), silent)) == [0]


@behaviour(Flavour.PATIENT)
def an_instance_that_has_never_pinged_may_be_silent_for_long(bench: Bench) -> Iterator[float]:
    yield _REAPED_BY_THEN_S
    assert list(bench.prepare(bench.key(bench.sequence(1)))) == [0]


@behaviour()
def a_restart_unlinks_the_pool_and_makes_another_of_the_same_name(bench: Bench) -> None:
    before = bench.segment()
    with before.open("rb") as pool:
        assert os.fstat(pool.fileno()).st_nlink == 1
        inode = os.fstat(pool.fileno()).st_ino
        pool.read(1)
        bench.subject.restart()
        assert os.fstat(pool.fileno()).st_nlink == 0
        assert pool.seek(0) == 0
        assert len(pool.read(SMALL)) == SMALL, "the old one stays readable"
        bench.register(instance=bench.instance)
        assert bench.segment() == before
        assert bench.segment().stat().st_ino != inode


@behaviour()
def a_restart_forgets_objects_sessions_and_registrations(bench: Bench) -> None:
    first, second, session = bench.sequence(1), bench.sequence(1), bench.session()
    bench.store(first)
    bench.prepare(bench.key(second, session=session))
    bench.subject.restart()
    assert bench.silent(bench.client.prepare_store(bench.key(first), bench.instance))
    assert bench.answer(bench.client.ping(bench.instance)) is True
    bench.register(instance=bench.instance)
    assert bench.found(first) == 0
    key = bench.key(first, session=session)
    assert list(bench.prepare(key)) == [0]
    bench.commit(key)
    assert bench.found(first) == 1


def _calls(bench: Bench, key: Any, instance: int) -> list[Any]:
    client = bench.client
    return [
        client.prepare_store(dataclasses.replace(key, request_id=bench.session()), instance),
        client.commit_store(key, instance, b""),
        client.prepare_retrieve(key, instance),
        client.commit_retrieve(key, instance),
    ]
