"""The cases that need no GPU and nothing but this package, vLLM and LMCache."""

from __future__ import annotations

from lmcache_mp_safe.bench.cpu_copies import CpuCopies
from lmcache_mp_safe.bench.runner import Case
from lmcache_mp_safe.bench.scheduler_hooks import SchedulerHooks
from lmcache_mp_safe.bench.ttft import TimeToFirstToken
from lmcache_mp_safe.bench.wire_bytes import WireBytes

CASES: tuple[Case, ...] = (SchedulerHooks(), WireBytes(), CpuCopies(), TimeToFirstToken())
