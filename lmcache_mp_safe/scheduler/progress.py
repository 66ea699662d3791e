"""How far one request's prefix is computed and stored. Arithmetic on tokens; nothing here asks anybody anything."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from lmcache_mp_safe.identity import PrefixDigests
from lmcache_mp_safe.ids import RequestId
from lmcache_mp_safe.scheduler.certify import HashSource
from lmcache_mp_safe.wire import SessionId


class Source(HashSource, Protocol):
    """The request whose prefix is stored."""

    @property
    def request_id(self) -> RequestId: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def num_prompt_tokens(self) -> int: ...
    @property
    def num_computed_tokens(self) -> int: ...
    def tokens(self, start: int, end: int) -> Sequence[int]: ...


def verified_tokens(source: Source) -> int:
    """Tokens whose KV is certainly written by earlier steps, as of the start of this one.

    While decoding, the last known token was sampled by the step that wrote the KV of the one before it; its own KV may
    not be written, and drafts never count. `num_computed_tokens` alone would not do: with asynchronous scheduling it
    runs ahead of the accepted tokens.
    """
    if source.num_computed_tokens <= source.num_prompt_tokens:
        return source.num_computed_tokens
    return min(source.num_computed_tokens, source.num_tokens - 1)


@dataclass
class Progress:
    """How far one request's prefix is stored.

        [0, num_loaded_tokens)                   arrived from the server and checked
        [.., num_stored_tokens)                  acknowledged by the server, contiguous
        chunks in `acknowledged` beyond that     acknowledged, but with a gap before them
        chunks in `open`                         being stored

    Attributes:
        next_boundary: boundaries below it were considered.
        attempts: failed tries per chunk index or boundary.
        retry_at: chunk index -> time before which it is not tried again.
        session: chunk sequence through which this request's chunks are stored.
    """

    num_stored_tokens: int = 0
    num_loaded_tokens: int = 0
    acknowledged: set[int] = field(default_factory=set)
    open: set[int] = field(default_factory=set)
    open_boundaries: set[int] = field(default_factory=set)
    next_boundary: int = 0
    missed_boundaries: set[int] = field(default_factory=set)
    attempts: dict[int, int] = field(default_factory=dict)
    retry_at: dict[int, float] = field(default_factory=dict)
    session: SessionId | None = None
    session_chunks: int = 0
    ended: bool = False

    @property
    def start_tokens(self) -> int:
        return max(self.num_stored_tokens, self.num_loaded_tokens)

    def acknowledge(self, chunk: int, chunk_tokens: int) -> None:
        """The server acknowledged this chunk; the watermark advances over the contiguous run only."""
        self.acknowledged.add(chunk)
        next_chunk = self.start_tokens // chunk_tokens
        while next_chunk in self.acknowledged:
            self.acknowledged.discard(next_chunk)
            next_chunk += 1
            self.num_stored_tokens = next_chunk * chunk_tokens

    def forget(self) -> None:
        """The server that acknowledged all of this is gone."""
        self.num_stored_tokens = self.num_loaded_tokens = self.next_boundary = 0
        for marks in (self.acknowledged, self.open, self.open_boundaries, self.missed_boundaries):
            marks.clear()
        self.attempts.clear()
        self.retry_at.clear()
        self.session = None


@dataclass(frozen=True)
class Prefix:
    """One request's prefix: where it comes from, what its objects are called, and how far it is stored.

    Attributes:
        salt: keeps tenants apart on the server.
    """

    source: Source
    digests: PrefixDigests
    salt: str
    progress: Progress
