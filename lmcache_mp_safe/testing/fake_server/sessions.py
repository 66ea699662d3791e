"""Server sessions: chunk hashes by position, and what the last lookup found."""

from __future__ import annotations

import array
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from lmcache_mp_safe.testing.fake_server.objects import ObjectName

_ROOT = b"no chunk before"


class HandlerError(Exception):
    """What makes the real server's handler raise: the caller gets no answer."""


def next_hash(before: bytes, tokens: Sequence[int]) -> bytes:
    """Hash of the chunk that follows another one.

    Raises:
        HandlerError: a token id is no unsigned int of 32 bits.
    """
    try:
        packed = array.array("I", tokens)
    except OverflowError as error:
        raise HandlerError(f"token id out of range: {error}") from error
    return hashlib.blake2b(before + packed.tobytes(), digest_size=32).digest()


def chunk_hashes(tokens: Sequence[int], chunk: int, start: int, end: int) -> list[bytes]:
    """Hashes of the whole chunks in [start, end) tokens, computed from these tokens and no others."""
    hashes: list[bytes] = []
    before = _ROOT
    for position in range(0, min(len(tokens), end) // chunk * chunk, chunk):
        before = next_hash(before, tokens[position : position + chunk])
        if position >= start:
            hashes.append(before)
    return hashes


@dataclass
class Session:
    """What the server keeps under one request id, whoever uses that id.

    Attributes:
        hashes: chunk hashes by position. Once computed they stay, also for other tokens under the same request id.
        key: key of the first call, which names the objects that the end of the session touches.
        found: objects that the last lookup found, once its status was asked for; negative before.
    """

    created: float
    tokens: Sequence[int] = ()
    hashes: list[bytes] = field(default_factory=list)
    key: Any = None
    found: int = -1

    def hashes_of(self, start: int, end: int, chunk: int) -> list[bytes]:
        """Hashes of the chunks in [start, end) tokens; from the cache as far as it goes.

        Raises:
            HandlerError: not whole chunks, or behind the end of the tokens, or a token id out of range.
        """
        if end > len(self.tokens) or start % chunk or end % chunk:
            raise HandlerError(f"[{start}, {end}) of {len(self.tokens)} tokens in chunks of {chunk}")
        while len(self.hashes) < end // chunk:
            position = len(self.hashes) * chunk
            before = self.hashes[-1] if self.hashes else _ROOT
            self.hashes.append(next_hash(before, self.tokens[position : position + chunk]))
        return self.hashes[start // chunk : end // chunk]


@dataclass(frozen=True)
class Lookup:
    """A lookup whose status nobody has asked for; its locks are taken."""

    found: int
    ready_at: float


def names_of(key: Any, hashes: Sequence[bytes]) -> list[ObjectName]:
    """Names of the objects with these chunk hashes; of every rank where the key has no worker."""
    ranks = range(key.world_size) if key.worker_id is None else [key.worker_id]
    return [ObjectName(one, key.model_name, key.world_size, rank, key.cache_salt) for one in hashes for rank in ranks]
