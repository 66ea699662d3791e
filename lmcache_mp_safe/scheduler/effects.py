"""What a decision asks the world to do. Values only; `hits.py` carries them out, in order."""

from __future__ import annotations

from dataclasses import dataclass


class Effect:
    """Something to be done for one request."""


@dataclass(frozen=True)
class CountChunks(Effect):
    """Ask the server how many of the first `chunks` chunk objects exist; locks what it counts."""

    chunks: int


@dataclass(frozen=True)
class Probe(Effect):
    """Ask the server for the boundary objects of these boundaries; locks what it finds."""

    boundaries: tuple[int, ...]


@dataclass(frozen=True)
class Hold(Effect):
    """Get the slots of chunk objects [first_chunk, boundary // C) and of the boundary object, and check their seals.

    Locks outside of that are given back at once.
    """

    first_chunk: int
    boundary: int


@dataclass(frozen=True)
class Release(Effect):
    """Give back every lock the request holds and end the sessions it holds them through."""


@dataclass(frozen=True)
class Load(Effect):
    """Hand the held slots and the request's blocks to the workers."""


@dataclass(frozen=True)
class RefuseLoad(Effect):
    """vLLM waits for a load that was never promised: have the workers report it as failed."""
