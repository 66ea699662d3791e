"""Columns of chunk and boundary objects, against a reference that works token by token."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_mp_safe.geometry.groups import Group, GroupKind, ModelGeometry, payload_bytes

FULL = Group(GroupKind.APPEND_ONLY, 16)
STATE = Group(GroupKind.RECURRENT, 64)
WINDOW = Group(GroupKind.WINDOW, 16, 40)
LOCAL = Group(GroupKind.CHUNKED_LOCAL, 16, 64)
SCRATCH = Group(GroupKind.IGNORED, 7)


def test_chunk_is_the_smallest_multiple_of_the_scheduler_block_that_is_long_enough() -> None:
    assert ModelGeometry.of([FULL], 256).chunk_tokens == 256
    assert ModelGeometry.of([FULL], 250).chunk_tokens == 256
    assert ModelGeometry.of([Group(GroupKind.APPEND_ONLY, 640)], 256).chunk_tokens == 640
    assert ModelGeometry.of([Group(GroupKind.APPEND_ONLY, 640)], 1000).chunk_tokens == 1280


def test_scheduler_block_is_the_common_multiple_of_groups_that_count() -> None:
    geometry = ModelGeometry.of([FULL, Group(GroupKind.WINDOW, 24, 48), SCRATCH], 1)
    assert (geometry.block_tokens, geometry.chunk_tokens) == (48, 48)


def test_chunk_object_holds_only_append_only_pages() -> None:
    geometry = ModelGeometry.of([FULL, STATE, WINDOW, SCRATCH], 128)
    assert geometry.chunk_columns(2) == (range(16, 24), range(0), range(0), range(0))


def test_boundary_object_holds_the_tail_the_state_and_the_window() -> None:
    geometry = ModelGeometry.of([FULL, STATE, WINDOW], 128)
    assert geometry.boundary_columns(192) == (range(8, 12), range(2, 3), range(9, 12))
    assert geometry.boundary_columns(256) == (range(16, 16), range(3, 4), range(13, 16))


@given(st.integers(1, 40), st.integers(1, 9), st.integers(1, 200))
def test_window_columns_are_those_that_the_next_token_sees(columns: int, block: int, window: int) -> None:
    boundary = columns * block
    seen = {token // block for token in range(max(0, boundary - window + 1), boundary)}
    assert set(Group(GroupKind.WINDOW, block, window).columns_at(boundary)) == seen


@given(st.integers(1, 40), st.integers(1, 9), st.integers(1, 9))
def test_local_attention_columns_are_those_of_the_chunk_that_the_next_token_is_in(
    columns: int, block: int, blocks_a_chunk: int
) -> None:
    boundary, chunk = columns * block, blocks_a_chunk * block
    seen = {token // block for token in range(boundary) if token // chunk == boundary // chunk}
    assert set(Group(GroupKind.CHUNKED_LOCAL, block, chunk).columns_at(boundary)) == seen


@pytest.mark.parametrize(
    ("groups", "boundary", "needed"),
    [
        ([FULL], 256, False),
        ([FULL], 240, True),
        ([FULL, STATE], 256, True),
        ([FULL, WINDOW], 256, True),
        ([FULL, LOCAL], 256, False),  # a local attention chunk starts anew there: nothing before it is seen
        ([FULL, LOCAL], 272, True),
    ],
)
def test_boundary_object_is_needed_when_something_beyond_chunks_is(
    groups: list[Group], boundary: int, needed: bool
) -> None:
    assert ModelGeometry.of(groups, 128).needs_boundary_object(boundary) is needed


def test_payload_counts_pages_of_every_group() -> None:
    assert payload_bytes((range(2), range(1, 2), range(0)), (100, 7, 5)) == 207
