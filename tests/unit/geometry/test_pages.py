"""Page layouts out of tensors as vLLM makes them, and byte runs out of block ids, each against a plain reference."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lmcache_mp_safe.contract import SKIP
from lmcache_mp_safe.errors import ConfigError, LocalError
from lmcache_mp_safe.geometry.pages import PageLayout, Segment, TensorView, layer_pages
from lmcache_mp_safe.geometry.spans import Span, Spans, spans
from lmcache_mp_safe.testing.pools import simple_pages

BLOCKS = 6


def view(tensor: torch.Tensor) -> TensorView:
    size = tensor.element_size()
    return TensorView(
        0,
        tensor.storage_offset() * size,
        tuple(tensor.shape),
        tuple(stride * size for stride in tensor.stride()),
        size,
        str(tensor.dtype),
    )


def bytes_of(tensor: torch.Tensor, block: int, dimension: int, kernel_blocks: int) -> set[int]:
    """Byte positions in the buffer of every element of one block."""
    size = tensor.element_size()
    chosen = tensor.narrow(dimension, block * kernel_blocks, kernel_blocks)
    positions: set[int] = set()
    for index in range(chosen.numel()):
        at, rest = chosen.storage_offset(), index
        for extent, stride in zip(reversed(chosen.shape), reversed(chosen.stride()), strict=True):
            rest, coordinate = divmod(rest, extent)
            at += coordinate * stride
        positions |= set(range(at * size, (at + 1) * size))
    return positions


def covered(segments: tuple[Segment, ...], block: int) -> set[int]:
    return {
        position
        for segment in segments
        for position in range(
            segment.offset + block * segment.stride, segment.offset + block * segment.stride + segment.length
        )
    }


LAYOUTS = {
    "block major": (torch.zeros(BLOCKS, 2, 4, 8, dtype=torch.int16), 0, 1),
    "keys and values apart": (torch.zeros(2, BLOCKS, 4, 8, dtype=torch.int16), 1, 1),
    "heads outermost": (torch.zeros(3, BLOCKS, 4, 8, dtype=torch.int16).permute(1, 0, 2, 3), 0, 1),
    "kernel blocks": (torch.zeros(BLOCKS * 4, 2, 8, dtype=torch.int16), 0, 4),
    "kernel blocks, keys and values apart": (torch.zeros(2, BLOCKS * 4, 8, dtype=torch.int16), 1, 4),
    "one layer of a packed block": (torch.zeros(BLOCKS, 5, 2, 8, dtype=torch.int16)[:, 3], 0, 1),
    "states of one head": (torch.zeros(BLOCKS, 1, 1, 8, dtype=torch.int16), 0, 1),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_pages_cover_exactly_the_bytes_of_their_block(name: str) -> None:
    tensor, dimension, kernel_blocks = LAYOUTS[name]
    page = tensor.numel() // BLOCKS * tensor.element_size()
    layer = layer_pages("l", [view(tensor)], BLOCKS, page)
    assert layer.page_bytes == page
    for block in range(BLOCKS):
        assert covered(layer.segments, block) == bytes_of(tensor, block, dimension, kernel_blocks)


def test_padding_of_a_page_is_part_of_it() -> None:
    raw = torch.zeros(BLOCKS * 100, dtype=torch.int8)
    tensor = torch.as_strided(raw, (BLOCKS, 10, 8), (100, 8, 1))
    assert layer_pages("l", [view(tensor)], BLOCKS, 100).segments == (Segment(0, 0, 100, 100),)


def test_states_of_a_recurrent_layer_share_one_page() -> None:
    raw = torch.zeros(BLOCKS * 100, dtype=torch.int8)
    convolution = torch.as_strided(raw, (BLOCKS, 3, 4), (100, 4, 1))
    state = torch.as_strided(raw.view(torch.int16), (BLOCKS, 30), (50, 1), storage_offset=6)
    assert layer_pages("l", [view(convolution), view(state)], BLOCKS, 100).segments == (Segment(0, 0, 100, 100),)


@pytest.mark.parametrize(
    ("tensors", "page"),
    [
        ([torch.zeros(BLOCKS - 1, 8)], 32),  # fewer blocks than the pool has
        ([torch.zeros(BLOCKS, 8)], 64),  # a page larger than the stride
        ([torch.zeros(BLOCKS, 8)], 16),  # a page smaller than its content
        ([torch.zeros(BLOCKS, 8), torch.zeros(BLOCKS, 4)], 32),  # states with pages of their own
    ],
)
def test_layout_that_is_not_known_is_an_error_that_names_the_layer(tensors: list[torch.Tensor], page: int) -> None:
    with pytest.raises(ConfigError, match=r"layer model\.7"):
        layer_pages("model.7", [view(tensor) for tensor in tensors], BLOCKS, page)


def test_digest_ignores_the_number_of_blocks_and_nothing_else() -> None:
    def digest(tensor: torch.Tensor, blocks: int, name: str = "l") -> bytes:
        page = tensor.numel() // blocks * tensor.element_size()
        return PageLayout(((layer_pages(name, [view(tensor)], blocks, page),),), blocks).digest

    base = digest(torch.zeros(6, 2, 8, dtype=torch.int16), 6)
    assert digest(torch.zeros(60, 2, 8, dtype=torch.int16), 60) == base
    assert digest(torch.zeros(6, 2, 8, dtype=torch.int16), 6, "m") != base
    assert digest(torch.zeros(6, 2, 8, dtype=torch.bfloat16), 6) != base
    assert digest(torch.zeros(6, 8, 2, dtype=torch.int16), 6) != base
    assert digest(torch.zeros(6, 8, 2, dtype=torch.int16).transpose(1, 2), 6) != base
    assert digest(torch.zeros(2, 6, 8, dtype=torch.int16), 6) != base


def digest_of(tensors: list[torch.Tensor], blocks: int, page: int) -> bytes:
    return PageLayout(((layer_pages("l", [view(tensor) for tensor in tensors], blocks, page),),), blocks).digest


@pytest.mark.parametrize("blocks", [3, 4, 8, 9, 16, 32])
def test_digest_is_the_same_where_another_dimension_happens_to_be_a_multiple_of_the_blocks(blocks: int) -> None:
    def digest(number: int) -> bytes:
        return digest_of([torch.zeros(number, 8, 4, 32, dtype=torch.int16)], number, 2048)

    def split(number: int) -> bytes:
        return digest_of([torch.zeros(2, number, 4, 32, dtype=torch.int16)], number, 512)

    assert digest(blocks) == digest(1000)
    assert split(blocks) == split(1000)


def test_digest_tells_where_in_a_page_bytes_lie() -> None:
    def states(offset: int, page: int = 100) -> bytes:
        raw = torch.zeros(BLOCKS * page, dtype=torch.int8)
        convolution = torch.as_strided(raw, (BLOCKS, 3, 4), (page, 4, 1))
        state = torch.as_strided(raw.view(torch.int16), (BLOCKS, 30), (page // 2, 1), storage_offset=offset)
        return digest_of([convolution, state], BLOCKS, page)

    def rows(stride: int) -> bytes:
        raw = torch.zeros(BLOCKS * 100, dtype=torch.int8)
        return digest_of([torch.as_strided(raw, (BLOCKS, 4, 8), (100, stride, 1))], BLOCKS, 100)

    assert states(6) != states(10)
    assert rows(8) != rows(16)


def test_blocks_are_not_guessed_where_they_could_be_keys_and_values() -> None:
    with pytest.raises(ConfigError, match="more than one way"):
        layer_pages("l", [view(torch.zeros(2, 2, 4, 8, dtype=torch.int16))], 2, 128)
    (segment, _) = layer_pages("l", [view(torch.zeros(2, 3, 4, 8, dtype=torch.int16))], 3, 128).segments
    assert segment == Segment(0, 0, 64, 64)


@pytest.mark.parametrize("capacity", [0, -128])
def test_slice_without_room_for_payload_is_an_error(capacity: int) -> None:
    with pytest.raises(LocalError, match="no payload"):
        spans([[1]], simple_pages([[8]], 4)[0], capacity)


BLOCK_IDS = st.lists(st.integers(0, 7) | st.just(SKIP), max_size=6)


@given(
    st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=3), min_size=1, max_size=3),
    st.lists(BLOCK_IDS, min_size=3, max_size=3),
    st.integers(1, 40),
)
def test_spans_equal_a_map_made_byte_by_byte(groups: list[list[int]], ids: list[list[int]], capacity: int) -> None:
    layout, _ = simple_pages(groups, 8)
    blocks = ids[: len(groups)]
    expected: list[int] = []
    for part, layers in zip(blocks, layout.groups, strict=True):
        for layer in layers:
            (segment,) = layer.segments
            for block in part:
                for byte in range(segment.length):
                    expected.append(SKIP if block == SKIP else segment.offset + block * segment.stride + byte)
    found: list[int] = []
    made = spans(blocks, layout, capacity)
    for span in made:
        assert span.piece * capacity + span.piece_offset == len(found)
        assert span.piece_offset + span.length <= capacity
        found += [SKIP if span.page_offset == SKIP else span.page_offset + byte for byte in range(span.length)]
    assert found == expected
    for before, after in itertools.pairwise(made):
        joined = before.page_offset + before.length == after.page_offset and SKIP not in (
            before.page_offset,
            after.page_offset,
        )
        assert before.piece != after.piece or not joined, "runs that could be one"


@given(st.lists(st.tuples(st.lists(st.integers(0, 7) | st.just(SKIP), min_size=1, max_size=6), st.integers(5, 40))))
def test_joined_payloads_are_the_payloads_one_after_the_other(payloads: list[tuple[list[int], int]]) -> None:
    layout, _ = simple_pages([[3, 5]], 8)
    parts = []
    for ids, capacity in payloads or [([1], 5)]:
        made = spans([ids], layout, capacity)
        parts.append((made, -(-len(ids) * 8 // capacity)))
    joined = Spans.joined(parts)
    expected: list[Span] = []
    before = 0
    for made, pieces in parts:
        expected += [span._replace(piece=span.piece + before) for span in made]
        before += pieces
    assert list(joined) == expected
