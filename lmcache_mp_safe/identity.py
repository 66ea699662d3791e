"""Names of objects: digests of prefixes and the namespace of a model.

vLLM's own block hashes differ between processes unless PYTHONHASHSEED is set, so they cannot name an object that
another process shall find. Ours are keyed BLAKE2b over the tokens and everything else that vLLM puts into its hashes.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from lmcache_mp_safe.errors import UnnameableError

# Part of every digest and namespace: a change of the payload, the seal or the digests must change it.
FORMAT_VERSION = "5"

_DIGEST_BYTES = 32
_SLUG_CHARACTERS = 40


def _digest(domain: bytes, *parts: bytes) -> bytes:
    # `person` separates the domains, the length in front of each part keeps (ab, c) apart from (a, bc).
    state = hashlib.blake2b(digest_size=_DIGEST_BYTES, key=b"lmcache_mp_safe " + FORMAT_VERSION.encode(), person=domain)
    for part in parts:
        state.update(len(part).to_bytes(8, "little"))
        state.update(part)
    return state.digest()


def encode_extra(extra: Any) -> bytes:
    """Canonical bytes of what names a request besides its tokens (multimodal hashes, LoRA, embeddings, salt, configs).

    Raises:
        UnnameableError: something in there has no canonical form; such a request must not use the cache.
    """
    try:
        _check_plain(extra)
        return msgspec.msgpack.encode(extra, order="deterministic")
    except Exception as error:  # several types, a recursion that is too deep among them; all mean the same here
        # Nothing of the content goes into the message: it is a user's, and may be as long or as odd as they like.
        raise UnnameableError(f"what a request says besides its tokens has no name: {type(error).__name__}") from error


def _check_plain(value: Any) -> None:
    """Allow what has one form only: msgspec would write a set like a list, and a date like a string."""
    if isinstance(value, dict):
        for key, item in value.items():
            _check_plain(key)
            _check_plain(item)
    elif isinstance(value, list | tuple):
        for item in value:
            _check_plain(item)
    elif not isinstance(value, str | bytes | int | float | None):
        raise TypeError(type(value).__name__)


class PrefixDigests:
    """Digests of one request's prefixes, computed as far as they are asked for.

    Args:
        tokens: returns token ids [start, end) of the request, a list; they never change once known.
        extra: returns vLLM's extra keys for tokens [start, end).
        chunk_tokens: C.
    """

    def __init__(
        self,
        tokens: Callable[[int, int], Sequence[int]],
        extra: Callable[[int, int], Any],
        chunk_tokens: int,
    ) -> None:
        self._tokens = tokens
        self._extra = extra
        self._chunk_tokens = chunk_tokens
        self._chain: list[bytes] = []

    def chunk(self, index: int) -> bytes:
        """Digest of one chunk."""
        if len(self._chain) <= index:
            self.chunks(index + 1)
        return self._chain[index]

    def chunks(self, count: int) -> Sequence[bytes]:
        """Digests of the first `count` chunks, each naming the whole prefix up to the chunk's end.

        Raises:
            UnnameableError: the request has extra keys that cannot be named.
        """
        while len(self._chain) < count:
            start = len(self._chain) * self._chunk_tokens
            self._chain.append(self._range_digest(b"chunk", start, start + self._chunk_tokens))
        return self._chain[:count]

    def boundary(self, boundary: int) -> bytes:
        """Digest of the boundary object that resumes after exactly `boundary` tokens."""
        whole = boundary // self._chunk_tokens
        self.chunks(whole)
        return self._range_digest(b"boundary", whole * self._chunk_tokens, boundary)

    def _range_digest(self, domain: bytes, start: int, end: int) -> bytes:
        parent_index = start // self._chunk_tokens - 1
        parent = self._chain[parent_index] if parent_index >= 0 else b""
        tokens = msgspec.msgpack.encode(self._tokens(start, end))
        extra = encode_extra(self._extra(start, end)) if end > start else b""
        return _digest(domain, parent, end.to_bytes(8, "little"), tokens, extra)


def piece_digests(boundary_digest: bytes, pieces: int) -> tuple[bytes, ...]:
    """Names of the pieces of a boundary object: a chained sequence of their own."""
    return tuple(_digest(b"piece", boundary_digest, index.to_bytes(4, "little")) for index in range(pieces))


def namespace(model_name: str, facts: Sequence[tuple[str, Any]], generation: str = "") -> str:
    """`<slug>-<digest>`: a readable part and a digest of everything that changes the bytes.

    Args:
        model_name: any string; only letters, digits, dots and dashes of it reach the server.
        facts: (name, value) of everything that decides what a page's bytes mean.
        generation: random text after a cache reset, else empty.
    """
    slug = re.sub(r"[^A-Za-z0-9.-]+", "-", model_name)[-_SLUG_CHARACTERS:].strip("-.") or "model"
    described = msgspec.msgpack.encode([(name, repr(value)) for name, value in facts])
    digest = _digest(b"namespace", model_name.encode("utf-8", "surrogatepass"), described, generation.encode())
    return f"{slug}-{digest[:12].hex()}"
