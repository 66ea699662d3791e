"""One client's view of a server, in units of objects."""

from __future__ import annotations

import itertools
import pickle
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from lmcache_mp_safe.contract import SHARED_MEMORY
from lmcache_mp_safe.wire.connecting import new_instance
from lmcache_mp_safe.wire.keys import object_key, registration

SMALL = 8192
BIG = 4 << 20

Tokens = Sequence[int]
Slots = dict[int, int]  # pool offset by index of the object within the asked range


class Subject(Protocol):
    """A server that behaviours are asked of.

    Attributes:
        patience_s: how long an answer may take.
        silence_s: how long nothing has to come until nothing will.
    """

    patience_s: float
    silence_s: float

    def client(self) -> Any:
        """A client of its own, with the methods of LMCache's `RequestClient`."""

    def wait(self, seconds: float) -> None:
        """Let time pass."""

    def restart(self) -> None:
        """End the server and start it again, with the same names."""

    def open_lookups(self) -> int:
        """Lookups whose status nobody has asked for."""

    def forget_memory(self) -> None:
        """See to it that the next lookup takes its time (of a subject with slow lookups)."""


class NoAnswerError(AssertionError):
    """A call that should have been answered was not."""


class Bench:
    """A client, a namespace of its own, and one registered instance in it.

    Offsets are bytes in the pool; everything else counts objects, of which each is one chunk of the server.
    """

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self.client = subject.client()
        self.chunk: int = self.answer(self.client.get_chunk_size())
        self.namespace = f"conformance-{secrets.token_hex(6)}"
        self.instance = self.register()

    # --- answers ----------------------------------------------------------------------------------------------------

    def answer(self, future: Any) -> Any:
        """What a call is answered with.

        Raises:
            NoAnswerError: nothing came.
        """
        if not future.wait(self.subject.patience_s):
            raise NoAnswerError(f"no answer within {self.subject.patience_s} s")
        return future.result(0)

    def silent(self, future: Any) -> bool:
        """Whether a call gets no answer."""
        return not future.wait(self.subject.silence_s)

    def wait(self, seconds: float) -> None:
        self.subject.wait(seconds)

    # --- names ------------------------------------------------------------------------------------------------------

    def sequence(self, objects: int) -> list[int]:
        """Tokens of so many objects that nobody else has."""
        return [secrets.randbelow(128) for _ in range(objects * self.chunk)]

    def session(self) -> str:
        return f"conformance-{secrets.token_hex(12)}"

    def key(
        self,
        tokens: Tokens,
        start: int = 0,
        end: int | None = None,
        *,
        session: str | None = None,
        namespace: str | None = None,
        salt: str = "",
        suffix: Sequence[int] = (),
    ) -> Any:
        """A key for the objects [start, end); all of them, under a new session, if nothing else is said."""
        last = len(tokens) // self.chunk if end is None else end
        return object_key(
            self.namespace if namespace is None else namespace,
            self.session() if session is None else session,
            salt,
            (*tokens[: last * self.chunk], *suffix),
            start * self.chunk,
            last * self.chunk,
        )

    # --- operations -------------------------------------------------------------------------------------------------

    def register(self, object_bytes: int = SMALL, *, instance: int | None = None, namespace: str | None = None) -> int:
        """Returns the instance id, a new one if none is given."""
        number = new_instance() if instance is None else instance
        payload = registration(number, namespace or self.namespace, object_bytes)
        self.answer(self.client.register_kv_cache_engine_driven_context(payload))
        return number

    def unregister(self, instance: int) -> None:
        self.answer(self.client.unregister_kv_cache_engine_driven_context(instance))

    def prepare(self, key: Any, instance: int | None = None) -> Slots:
        context = self.answer(self.client.prepare_store(key, self._instance(instance))).context
        offsets = [slot["offset"] for slot in context["slots"]]
        return dict(zip(context["chunk_indices"], offsets, strict=True))

    def commit(self, key: Any, instance: int | None = None) -> Any:
        return self.answer(self.client.commit_store(key, self._instance(instance), b""))

    def store_inline(self, key: Any, contents: Sequence[bytes]) -> Any:
        """Have the server write the contents itself."""
        import torch

        tensors = [torch.frombuffer(bytearray(one), dtype=torch.uint8).reshape(1, -1, 4096) for one in contents]
        return self.answer(self.client.commit_store(key, self.instance, pickle.dumps(tensors)))

    def look_up(self, key: Any) -> int:
        """Objects that the lookup found; it holds a lock on each."""
        self.answer(self.client.lookup(key, 1))
        return self.status(key.request_id)

    def status(self, session: str) -> int:
        for _ in range(500):
            found = self.answer(self.client.query_prefetch_status(session))
            if found is not None:
                assert type(found) is int, found
                return found
            self.wait(0.02)
        raise NoAnswerError("the lookup does not end")

    def free(self, key: Any) -> None:
        self.answer(self.client.free_lookup_locks(key, 1))

    def retrieve(self, key: Any, instance: int | None = None) -> list[int] | None:
        """Offsets of the objects, or None for a refusal."""
        answer = self.answer(self.client.prepare_retrieve(key, self._instance(instance)))
        return [slot["offset"] for slot in answer.context["slots"]] if answer.success else None

    def done(self, key: Any, instance: int | None = None) -> Any:
        return self.answer(self.client.commit_retrieve(key, self._instance(instance)))

    def end(self, session: str) -> None:
        self.answer(self.client.end_session(session))

    def clear(self, *, force: bool) -> None:
        self.answer(self.client.clear(force))

    def _instance(self, instance: int | None) -> int:
        return self.instance if instance is None else instance

    # --- several operations in one ----------------------------------------------------------------------------------

    def store(self, tokens: Tokens, start: int = 0, end: int | None = None, *, ends: bool = True) -> Slots:
        """Reserve and commit; by default the session is ended, too."""
        key = self.key(tokens, start, end)
        slots = self.prepare(key)
        assert self.commit(key) is True
        if ends:
            self.end(key.request_id)
        return slots

    def found(self, tokens: Tokens) -> int:
        """Leading objects of the sequence that exist; no lock is left."""
        key = self.key(tokens)
        found = self.look_up(key)
        self.free(key)
        self.end(key.request_id)
        return found

    def locks(self, tokens: Tokens, most: int = 8) -> int:
        """Read locks that others hold on the first object, found out by using them up."""
        key = self.key(tokens, 0, 1)
        for taken in itertools.count():
            if taken == most or self.retrieve(key) is None:
                self.end(key.request_id)
                return taken
            self.done(key)
        raise AssertionError

    # --- memory -----------------------------------------------------------------------------------------------------

    def segment(self) -> Path:
        """Where the pool is, as a registration says."""
        payload = registration(self.instance, self.namespace, SMALL)
        answer = self.answer(self.client.register_kv_cache_engine_driven_context(payload))
        return SHARED_MEMORY / str(answer.shm_name).lstrip("/")

    def write(self, offset: int, content: bytes) -> None:
        with self.segment().open("r+b") as pool:
            pool.seek(offset)
            pool.write(content)

    def read(self, offset: int, length: int) -> bytes:
        with self.segment().open("rb") as pool:
            pool.seek(offset)
            return pool.read(length)
