"""Copies in CPU memory with NumPy, inline: the backend for CPU engines, and the oracle for every other one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lmcache_mp_safe.contract import SKIP
from lmcache_mp_safe.errors import LocalError
from lmcache_mp_safe.geometry.checksum import PayloadChecksum
from lmcache_mp_safe.geometry.spans import Span, Spans
from lmcache_mp_safe.ops.contract import Bytes, Completion, Fence, SlotMemory


class InlineFence:
    """Work on a CPU is done when the call returns."""

    def passed(self) -> bool:
        return True


@dataclass(frozen=True)
class InlineCompletion:
    checksums: tuple[int, ...]

    def done(self) -> bool:
        return True


class PlainMemory:
    """Memory that a CPU can copy as it is."""

    def make_ready(self, offset: int, size: int) -> None:
        """Nothing to prepare."""

    def release(self) -> None:
        """Nothing was prepared."""


class ReferenceBackend:
    """Backend over flat uint8 arrays. Every span is checked before the first byte is written."""

    name = "reference"

    def __init__(self, buffers: Sequence[Bytes], why: str) -> None:
        self.buffers = list(buffers)
        self.why = why

    def record_fence(self) -> Fence:
        return InlineFence()

    def adopt(self, memory: Bytes) -> SlotMemory:
        return PlainMemory()

    def copy_out(self, spans: Spans, slots: Sequence[Bytes | None], after: Fence) -> Completion:
        _require(after)
        runs = [(self._pages(span), _payload(slots[span.piece], span), span.piece) for span in spans]
        states = [PayloadChecksum() for _ in slots]
        for pages, payload, piece in runs:
            if payload is not None:
                payload[:] = pages
                states[piece].update(pages)
        return InlineCompletion(
            tuple(0 if slot is None else state.intdigest() for slot, state in zip(slots, states, strict=True))
        )

    def copy_in(self, spans: Spans, slots: Sequence[Bytes], after: Fence, *, checked: bool) -> Completion:
        _require(after)
        runs = [
            (None if span.page_offset == SKIP else self._pages(span), _payload(slots[span.piece], span), span.piece)
            for span in spans
        ]
        states = [PayloadChecksum() for _ in slots]
        for pages, payload, piece in runs:
            assert payload is not None
            if pages is not None:
                pages[:] = payload
            if checked:
                states[piece].update(payload if pages is None else pages)  # what arrived, not what was sent
        return InlineCompletion(tuple(state.intdigest() if checked else 0 for state in states))

    def hold_compute(self, until: Completion) -> None:
        if not until.done():
            raise LocalError("an inline copy is done when it returns")

    def drain(self) -> None:
        """Inline copies are over already."""

    def _pages(self, span: Span) -> Bytes:
        pages = self.buffers[span.buffer][span.page_offset : span.page_offset + span.length]
        if span.page_offset < 0 or len(pages) != span.length:
            raise LocalError(f"span {span} lies outside of its buffer")
        return pages


def _payload(slot: Bytes | None, span: Span) -> Bytes | None:
    if slot is None:
        return None
    payload = slot[span.piece_offset : span.piece_offset + span.length]
    if len(payload) != span.length:
        raise LocalError(f"span {span} lies outside of its slot")
    return payload


def _require(fence: Fence) -> None:
    if not fence.passed():
        raise LocalError("an inline copy needs a fence that has passed")
