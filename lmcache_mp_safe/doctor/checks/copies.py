"""How pages are copied."""

from __future__ import annotations

from collections.abc import Iterator

from lmcache_mp_safe.doctor.facts import Facts
from lmcache_mp_safe.doctor.findings import Finding, ok, problem, warning


def check(facts: Facts) -> Iterator[Finding]:
    copies = facts.probe.copies
    if copies is None:
        return
    if copies.error:
        yield problem("no-backend", f"pages cannot be copied here: {copies.error}", "see the message")
        return
    yield ok("backend", f"pages are copied by {copies.backend}: {copies.why}")
    if copies.pinning is None:
        yield ok("pinning", "page-locking the pool: not applicable, vLLM uses no GPU here")
    elif copies.pinning:
        yield ok("pinning", "page-locking memory in /dev/shm works")
    else:
        yield warning(
            "pinning-refused",
            f"memory in /dev/shm cannot be page-locked, copies are slower: {copies.pinning_error}",
            "raise the limit of locked memory (ulimit -l; docker: --ulimit memlock=-1)",
        )
