"""Any bytes are the promised seal or a ServerError."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_mp_safe.errors import ServerError
from lmcache_mp_safe.geometry.payload import SEAL_BYTES
from lmcache_mp_safe.geometry.seal import CLEARED, Seal, check_seal, decode_seal

SEALS = st.builds(
    Seal,
    layout_digest=st.binary(min_size=16, max_size=16),
    object_digest=st.binary(min_size=32, max_size=32),
    rank=st.integers(0, 2**16 - 1),
    piece=st.integers(0, 2**16 - 1),
    pieces=st.integers(0, 2**16 - 1),
    payload_bytes=st.integers(0, 2**64 - 1),
    checksum=st.integers(0, 2**64 - 1),
    nonce=st.binary(min_size=16, max_size=16),
)

GOOD = Seal(b"l" * 16, b"o" * 32, 1, 2, 3, 1000, 77, b"n" * 16)


def check(raw: bytes) -> Seal:
    return check_seal(
        raw, layout_digest=b"l" * 16, object_digest=b"o" * 32, rank=1, piece=2, pieces=3, payload_bytes=1000
    )


@given(SEALS)
def test_encoded_seal_decodes_to_itself(seal: Seal) -> None:
    raw = seal.encode()
    assert len(raw) == SEAL_BYTES
    assert decode_seal(raw) == seal


@given(st.binary(max_size=2 * SEAL_BYTES))
def test_any_other_bytes_are_a_server_error(raw: bytes) -> None:
    with pytest.raises(ServerError):
        decode_seal(raw)


@given(SEALS, st.integers(0, SEAL_BYTES * 8 - 1))
def test_every_flipped_bit_is_noticed(seal: Seal, bit: int) -> None:
    raw = bytearray(seal.encode())
    raw[bit // 8] ^= 1 << bit % 8
    with pytest.raises(ServerError):
        decode_seal(bytes(raw))


def test_cleared_seal_is_none() -> None:
    with pytest.raises(ServerError, match="never completed"):
        check(CLEARED)


def test_promised_seal_is_accepted_whatever_its_checksum_and_writer() -> None:
    assert check(GOOD.encode()) == GOOD
    other = replace(GOOD, checksum=5, nonce=b"m" * 16)
    assert check(other.encode()) == other


@pytest.mark.parametrize(
    "other",
    [
        replace(GOOD, layout_digest=b"x" * 16),
        replace(GOOD, object_digest=b"x" * 32),
        replace(GOOD, rank=0),
        replace(GOOD, piece=1),
        replace(GOOD, pieces=4),
        replace(GOOD, payload_bytes=999),
    ],
)
def test_seal_of_another_object_layout_rank_or_piece_is_refused(other: Seal) -> None:
    with pytest.raises(ServerError, match="another object"):
        check(other.encode())
