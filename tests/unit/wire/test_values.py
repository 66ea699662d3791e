"""Tokens, salts, keys and the pool: pure values."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from lmcache.v1.multiprocess.custom_types import IPCCacheServerKey
from lmcache.v1.multiprocess.transport.zmq_impl.mq import msgspec_decode, msgspec_encode

from lmcache_mp_safe.errors import Scope, ServerError
from lmcache_mp_safe.wire.events import SessionId
from lmcache_mp_safe.wire.keys import object_key, registration
from lmcache_mp_safe.wire.pool import PoolView
from lmcache_mp_safe.wire.salts import wire_salt
from lmcache_mp_safe.wire.sessions import Session
from lmcache_mp_safe.wire.tokens import (
    MIN_CHUNK,
    check_chunk,
    encoded_object,
    plain_tokens,
    synthetic_tokens,
    token_array,
)

digests = st.binary(min_size=32, max_size=32)
chunks = st.integers(MIN_CHUNK, 300)


def ints(sequence: Sequence[bytes], chunk: int) -> list[int]:
    """The tokens of a sequence as the server decodes them."""
    return list(plain_tokens(synthetic_tokens(sequence, chunk)))


@given(digests, digests, chunks)
def test_different_digests_get_different_tokens(one: bytes, other: bytes, chunk: int) -> None:
    assume(one != other)
    assert ints([one], chunk) != ints([other], chunk)


@given(digests, st.integers(0, 255), chunks)
def test_every_single_bit_shows(digest: bytes, bit: int, chunk: int) -> None:
    flipped = (int.from_bytes(digest, "big") ^ (1 << bit)).to_bytes(32, "big")
    assert ints([digest], chunk) != ints([flipped], chunk)


@given(st.lists(digests, max_size=5), chunks)
def test_a_sequence_is_its_objects_one_after_the_other(sequence: list[bytes], chunk: int) -> None:
    assert ints(sequence, chunk) == [t for d in sequence for t in ints([d], chunk)]


@given(st.lists(digests, min_size=1, max_size=3), chunks)
def test_the_server_takes_every_token_and_one_object_is_one_chunk(sequence: list[bytes], chunk: int) -> None:
    tokens = ints(sequence, chunk)
    assert len(tokens) == chunk * len(sequence)
    assert all(0 <= token < 2**32 for token in tokens)


@given(digests, st.integers(64, 300))
def test_a_token_is_one_byte_on_the_wire_where_the_chunk_has_room(digest: bytes, chunk: int) -> None:
    assert max(ints([digest], chunk)) <= 127


@pytest.mark.parametrize("chunk", [0, 1, 7])
def test_a_chunk_without_room_for_a_digest_is_refused_with_the_flag_to_change(chunk: int) -> None:
    with pytest.raises(ServerError, match="--chunk-size") as caught:
        check_chunk(chunk)
    assert caught.value.scope is Scope.SERVER


def test_eight_ints_are_enough_for_a_digest() -> None:
    assert len(set(map(tuple, (ints([bytes([n]) * 32], 8) for n in range(256))))) == 256


@given(st.text(st.characters(codec=None)) | st.text(max_size=200))
def test_any_salt_becomes_one_that_the_server_takes(salt: str) -> None:
    sent = wire_salt(salt)
    IPCCacheServerKey("m", 1, 0, (), 0, 0, "r", cache_salt=sent)
    sent.encode()


@given(st.text(st.characters(codec=None), max_size=150), st.text(st.characters(codec=None), max_size=150))
def test_two_salts_never_become_one(one: str, other: str) -> None:
    assume(one != other)
    assert wire_salt(one) != wire_salt(other)
    assert wire_salt(wire_salt(one + "/")) != wire_salt(one + "/")


@pytest.mark.parametrize("salt", ["", "tenant-7", "a b:c=d", "x" * 128])
def test_a_salt_that_the_server_allows_is_sent_as_it_is(salt: str) -> None:
    assert wire_salt(salt) == salt


@pytest.mark.parametrize("salt", ["a@b", "a/b", "a\\b", "a\0b", "x" * 129, "\ud800", "tab\t", "line\n"])
def test_another_salt_is_sent_as_a_digest(salt: str) -> None:
    assert wire_salt(salt) != salt
    assert wire_salt(salt).isascii()


def test_a_suffix_tells_two_keys_apart_and_a_server_session_does_not() -> None:
    plain, renamed, suffixed = (
        object_key("ns", name, "", token_array([bytes(256)], 256, suffix), 0, 256)
        for name, suffix in [("a", ()), ("b", ()), ("a", (1, 2))]
    )
    assert plain == renamed != suffixed


@given(st.lists(digests, max_size=4), chunks, st.lists(st.integers(0, 2**31 - 1), max_size=3))
def test_lmcaches_own_encoder_and_decoder_see_an_ordinary_key(
    sequence: list[bytes], chunk: int, suffix: list[int]
) -> None:
    tokens = token_array([encoded_object(digest, chunk) for digest in sequence], chunk, suffix)
    sent = msgspec_encode(object_key("ns", "a", "", tokens, 0, chunk), IPCCacheServerKey)
    expected = object_key("ns", "a", "", (*ints(sequence, chunk), *suffix), 0, chunk)
    assert msgspec_decode(sent, IPCCacheServerKey) == expected


def test_an_object_is_encoded_once_however_often_its_session_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[bytes] = []
    monkeypatch.setattr(
        "lmcache_mp_safe.wire.sessions.encoded_object",
        lambda digest, chunk: encoded.append(digest) or encoded_object(digest, chunk),
    )
    session = Session(SessionId(1), "name", "", [bytes([n]) * 32 for n in range(30)])
    for objects in (5, 10, 10, 30, 7):
        assert len(plain_tokens(session.tokens(objects, 256))) == 256 * objects
    session.digests += [bytes([77]) * 32] * 5
    session.tokens(35, 256)
    assert len(encoded) == len(set(encoded)) + 4 == 35


@pytest.mark.parametrize("object_bytes", [4096, 3 * 4096, 180 * 2**20])
def test_a_registration_asks_for_exactly_the_object_size(object_bytes: int) -> None:
    payload = registration(1, "ns", object_bytes)
    assert payload.num_physical_slots is not None
    assert payload.num_layers * payload.num_physical_slots * payload.hidden_dim_size == object_bytes
    assert (payload.use_mla, payload.dtype_str) == (True, "uint8")


@pytest.fixture
def segment() -> Iterator[Path]:
    path = Path("/dev/shm") / f"lmcache_mp_safe_wire_{uuid.uuid4().hex}"
    path.touch(mode=0o600)
    os.truncate(path, 8192)
    yield path
    path.unlink(missing_ok=True)


def test_the_pool_reads_what_is_there(segment: Path) -> None:
    segment.write_bytes(bytes(4096) + b"x" * 4096)
    assert PoolView(segment.name, 8192).read(4094, 4) == b"\0\0xx"


@pytest.mark.parametrize(("offset", "length"), [(-1, 1), (0, -1), (8192, 1), (8191, 2), (0, 8193)])
def test_the_pool_refuses_to_read_outside_of_itself(segment: Path, offset: int, length: int) -> None:
    with pytest.raises(ServerError):
        PoolView(segment.name, 8192).read(offset, length)


def test_a_segment_that_is_smaller_than_the_server_says_is_refused(segment: Path) -> None:
    with pytest.raises(ServerError, match="8192"):
        PoolView(segment.name, 16384)


def test_a_segment_that_is_not_there_names_the_remedy() -> None:
    with pytest.raises(ServerError, match="share /dev/shm"):
        PoolView("lmcache_mp_safe_nothing", 4096)


def test_an_unlinked_segment_is_not_alive_and_a_linked_one_is(segment: Path) -> None:
    pool = PoolView(segment.name, 8192)
    assert pool.is_alive
    segment.unlink()
    assert not pool.is_alive
