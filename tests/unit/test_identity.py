"""Names of objects: complete, stable, and never shared by two contents."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_mp_safe.identity import PrefixDigests, encode_extra, namespace, piece_digests

CHUNK = 8


def digests(tokens: list[int], extra: Any = None, chunk: int = CHUNK) -> PrefixDigests:
    return PrefixDigests(lambda start, end: tokens[start:end], lambda start, end: extra, chunk)


TOKENS = st.lists(st.integers(0, 2**31), min_size=4 * CHUNK, max_size=4 * CHUNK)


@given(TOKENS, st.integers(0, 4 * CHUNK - 1))
def test_changing_one_token_changes_every_name_from_there_on_and_none_before(tokens: list[int], at: int) -> None:
    other = [*tokens]
    other[at] += 1
    mine, theirs = digests(tokens).chunks(4), digests(other).chunks(4)
    assert [a == b for a, b in zip(mine, theirs, strict=True)] == [index < at // CHUNK for index in range(4)]


@given(TOKENS)
def test_prefixes_of_different_length_never_share_a_name(tokens: list[int]) -> None:
    prefix = digests(tokens)
    names = [*prefix.chunks(4), *(prefix.boundary(b) for b in range(1, 4 * CHUNK + 1))]
    assert len(set(names)) == len(names)


def test_boundary_at_a_chunk_end_is_not_named_like_the_chunk() -> None:
    prefix = digests(list(range(32)))
    assert prefix.boundary(CHUNK) != prefix.chunks(1)[0]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (None, (("cache_salt", "a"),)),
        ((("cache_salt", "a"),), (("cache_salt", "b"),)),
        ((("lora", "adapter"),), (("lora", "other"),)),
        (((None, "/adapters/1")), ((None, "/adapters/2"))),
        ((("mm", "image", 3),), (("mm", "image", 4),)),
        ((b"embeds-1",), (b"embeds-2",)),
        (("1",), (1,)),
        (("a", "bc"), ("ab", "c")),
        (("a",), (("a",),)),
    ],
)
def test_contents_that_differ_only_beside_the_tokens_never_share_a_name(one: Any, other: Any) -> None:
    tokens = [0] * 16
    mine, theirs = digests(tokens, one), digests(tokens, other)
    assert mine.chunks(1) != theirs.chunks(1)
    assert mine.boundary(5) != theirs.boundary(5)


def test_extra_keys_without_a_canonical_form_are_refused_not_guessed() -> None:
    for extra in (object(), ("\ud800",), ({1: object()},)):
        with pytest.raises(TypeError):
            encode_extra(extra)


def test_pieces_have_names_of_their_own() -> None:
    prefix = digests(list(range(32)))
    names = piece_digests(prefix.boundary(8), 3) + piece_digests(prefix.boundary(16), 3)
    assert len(set(names)) == 6
    assert piece_digests(prefix.boundary(8), 2) == names[:2]


def test_names_are_the_same_in_every_process_whatever_its_hash_seed() -> None:
    code = (
        "from lmcache_mp_safe.identity import PrefixDigests, namespace\n"
        "p = PrefixDigests(lambda s, e: list(range(s, e)), lambda s, e: (('cache_salt', 'x'),), 8)\n"
        "print(p.chunks(2)[1].hex(), p.boundary(11).hex(), namespace('m', [('dtype', 'bf16')]))"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout
        for seed in ("0", "1", "2")
    }
    assert len(outputs) == 1


NASTY = [
    "",
    "org/model",
    "../../etc/passwd",
    "a@b\\c\x00d",
    "x" * 10_000,
    "模型🙂",
    "\ud800 lone surrogate",
    " \t\n",
    "-" * 50,
]


def test_any_model_name_gives_a_namespace_that_the_server_takes_and_no_two_share_one() -> None:
    names = [namespace(model, []) for model in NASTY]
    assert len(set(names)) == len(NASTY)
    for name in names:
        assert len(name) <= 70
        assert all(character.isascii() and (character.isalnum() or character in ".-") for character in name)


def test_every_fact_and_the_generation_change_the_namespace() -> None:
    base = [("dtype", "bf16"), ("ranks", [(0, (1, 2), b"x")])]
    names = {
        namespace("m", base),
        namespace("m", base, "generation"),
        namespace("m", [("dtype", "fp8"), base[1]]),
        namespace("m", [base[0], ("ranks", [(0, (1, 3), b"x")])]),
        namespace("m", [("dtype", "bf16x"), base[1]]),
        namespace("m2", base),
    }
    assert len(names) == 6
