"""The one table of what Prometheus is told. Everything that names a series is derived from it or compared with it."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from lmcache_mp_safe.metrics import counts
from lmcache_mp_safe.metrics.counts import Count, Level

PREFIX = "vllm:lmcache_mp_safe_"

_CALL_BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
_COPY_BUCKETS = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)


class Kind(enum.Enum):
    """How values of several steps and ranks become one."""

    COUNTER = "counter"  # summed
    GAUGE = "gauge"  # the last one; only the scheduler has any, for ranks could not be told apart
    HISTOGRAM = "histogram"  # all observations


class Role(enum.Enum):
    """Who counts it."""

    SCHEDULER = "scheduler"
    WORKER = "worker"  # every rank; the series is the sum over ranks


@dataclass(frozen=True)
class Series:
    """One metric.

    Attributes:
        name: without the prefix, and without the ending that Prometheus gives to counters.
        unit: of its values.
        keys: what the halves count it under; several, told apart by the label.
        label: name of the label that tells the keys apart, or empty.
    """

    name: str
    kind: Kind
    role: Role
    unit: str
    help: str
    keys: tuple[StrEnum, ...]
    label: str = ""
    buckets: tuple[float, ...] = ()

    @property
    def full_name(self) -> str:
        """As `/metrics` shows it."""
        return PREFIX + self.name + ("_total" if self.kind is Kind.COUNTER else "")

    def label_value(self, key: StrEnum) -> str:
        """What the label says for this key: its own text, or the part behind the colon."""
        return key.value.rpartition(":")[2] if self.label else ""


def _sum(count: Count, unit: str, text: str) -> Series:
    return Series(count.value, Kind.COUNTER, Role.SCHEDULER, unit, text, (count,))


def _level(level: Level, unit: str, text: str) -> Series:
    return Series(level.value, Kind.GAUGE, Role.SCHEDULER, unit, text, (level,))


def _sums(name: str, role: Role, unit: str, label: str, keys: Iterable[StrEnum], text: str) -> Series:
    return Series(name, Kind.COUNTER, role, unit, text, tuple(keys), label)


def _levels(name: str, unit: str, label: str, keys: Iterable[StrEnum], text: str) -> Series:
    return Series(name, Kind.GAUGE, Role.SCHEDULER, unit, text, tuple(keys), label)


def _times(name: str, role: Role, label: str, keys: Iterable[StrEnum], buckets: tuple[float, ...], text: str) -> Series:
    return Series(name, Kind.HISTOGRAM, role, "seconds", text, tuple(keys), label, buckets)


_BOTH = "of all ranks; whole pages, without seals and padding"

SERIES: tuple[Series, ...] = (
    # hits
    _sum(Count.LOOKUPS, "lookups", "Questions of vLLM that were looked into: once when a request is first asked about,"
         " again after a preemption or when a promise had to be taken back."),
    _sum(Count.HITS, "lookups", "Lookups that ended in a load."),
    _sums("misses", Role.SCHEDULER, "lookups", "reason", counts.Miss,
          "Lookups that ended without a load. Lookups that are decided are hits plus misses."),
    _sum(Count.PROBES, "calls", "Boundary objects that the server was asked for."),
    _sum(Count.LOOKUPS_LATE, "lookups", "Lookups that were given up because they took too long."),
    _sum(Count.LOOKUPS_FAILED, "calls", "Calls for lookups and slots that failed."),
    _sum(Count.PROMISED_TOKENS, "tokens", "Tokens that were promised to vLLM, every seal checked."),
    _sum(Count.PROMISED_BYTES, "bytes", f"Payload of the promised objects, {_BOTH}."),
    _sum(Count.LOADED_TOKENS, "tokens", "Tokens whose load arrived on every rank and was right."),
    _sum(Count.LOADED_BYTES, "bytes", f"Payload of the objects of those loads, {_BOTH}."),
    _sum(Count.LOADS_FAILED, "loads", "Loads that a rank did not get, or not rightly; the request is computed."),
    _sum(Count.LOADS_REFUSED, "loads", "Loads that vLLM wanted and that were not promised."),
    _sums("objects_rejected", Role.SCHEDULER, "objects", "when", counts.Rejection,
          "Objects whose seal or checksum was wrong, found before a promise or while loading."),
    # stores
    _sum(Count.STORED_TOKENS, "tokens", "Tokens whose attention pages were stored and acknowledged by the server."),
    _sum(Count.STORED_BYTES, "bytes", f"Payload of the acknowledged objects, {_BOTH}."),
    _sum(Count.OBJECTS_STORED, "objects", "Objects that were stored and acknowledged."),
    _sum(Count.OBJECTS_MENDED, "objects", "Objects that were wrong on the server and have been mended in place."),
    _sum(Count.REPAIRS_STARTED, "objects", "Attempts to mend an object."),
    _sums("store_setbacks", Role.SCHEDULER, "objects or calls", "reason", counts.Setback,
          "Reasons for which something was not stored, or not yet."),
    _sum(Count.EVICTED_CHUNKS_SEEN, "objects", "Chunks that were stored once and that the server has no more."),
    # copies
    _sums("copied_bytes", Role.WORKER, "bytes", "direction", counts.CopiedBytes,
          "Payload of the pages that were copied, failed copies left out."),
    _sums("copies", Role.WORKER, "jobs", "outcome", counts.CopyEnd, "Jobs that ended, once for each rank."),
    _times("copy_seconds", Role.WORKER, "direction", counts.CopyTime, _COPY_BUCKETS,
           "From a plan's arrival at a rank until its job is over there, queueing included."),
    # the server
    _times("call_seconds", Role.SCHEDULER, "call", counts.CallTime, _CALL_BUCKETS,
           "From sending a call until the scheduler took in its answer, which it looks for in its hooks."),
    _sums("calls_failed", Role.SCHEDULER, "calls", "reason", counts.Failure, "Calls without a usable answer."),
    _sum(Count.CONNECTIONS, "connections", "Times that a server was connected to; each begins an epoch."),
    _sum(Count.CONNECTIONS_LOST, "connections", "Times that the server was given up."),
    _sum(Count.BYPASS_SECONDS, "seconds", "Time without a usable server, counted while the engine steps."),
    _sum(Count.RESETS, "resets", "Cache resets: nothing from before is used any more."),
    _sum(Count.INTERNAL_ERRORS, "errors", "Errors that were caught in a hook. Should stay 0; the log has them."),
    # what is held now
    _level(Level.PINNED_BLOCKS, "blocks", "vLLM's blocks that unfinished stores hold."),
    _levels("slots", "objects", "use", counts.Slots, "Objects of the server's pool that are in use by this engine."),
    _levels("jobs", "jobs", "direction", counts.Jobs, "Jobs that workers have and not every rank has reported."),
    _level(Level.CALLS_UNANSWERED, "calls", "Calls that wait for an answer, those that timed out included."),
    _level(Level.EPOCH, "number", "Number of the connection in use, or of the last one."),
    _level(Level.SERVER_UP, "0 or 1", "Whether the server can be used now."),
)  # fmt: skip

# key -> its series
SERIES_OF: dict[str, Series] = {key.value: series for series in SERIES for key in series.keys}
