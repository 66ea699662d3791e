"""A user's cache salt in a form that the server takes."""

from __future__ import annotations

import hashlib

_FORBIDDEN = frozenset("@/\\\x00")
_MAX_CHARACTERS = 128


def wire_salt(salt: str) -> str:
    """The salt itself where the server allows it, so that its quotas per tenant keep working; else a digest of it."""
    plain = len(salt) <= _MAX_CHARACTERS and salt.isascii() and salt.isprintable() and not _FORBIDDEN & set(salt)
    # A digest is never taken for a salt of the same spelling: that one is hashed, too.
    if plain and not salt.startswith("digest-"):
        return salt
    return "digest-" + hashlib.blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=24).hexdigest()
