"""Names of everything that is counted. A closed list: what is not here cannot be counted.

A value is the name in `SchedulerHalf.counters`. In an enumeration whose members differ by a label, what follows the
colon is the label's value.
"""

from __future__ import annotations

from enum import StrEnum


class Count(StrEnum):
    """Things that only grow."""

    LOOKUPS = "lookups"
    HITS = "hits"
    PROBES = "probes"
    LOOKUPS_LATE = "lookups_late"
    LOOKUPS_FAILED = "lookups_failed"
    PROMISED_TOKENS = "promised_tokens"
    PROMISED_BYTES = "promised_bytes"
    LOADED_TOKENS = "loaded_tokens"
    LOADED_BYTES = "loaded_bytes"
    LOADS_FAILED = "loads_failed"
    LOADS_REFUSED = "loads_refused"
    STORED_TOKENS = "stored_tokens"
    STORED_BYTES = "stored_bytes"
    OBJECTS_STORED = "objects_stored"
    OBJECTS_MENDED = "objects_mended"
    REPAIRS_STARTED = "repairs_started"
    EVICTED_CHUNKS_SEEN = "evicted_chunks_seen"
    CONNECTIONS = "connections"
    CONNECTIONS_LOST = "connections_lost"
    BYPASS_SECONDS = "bypass_seconds"
    RESETS = "resets"
    INTERNAL_ERRORS = "internal_errors"


class Miss(StrEnum):
    """Why a lookup ended without a load. Every lookup ends as a hit or with exactly one of these."""

    ABSENT = "miss:absent"  # the server has nothing that a resume could use
    NOT_DEEPER = "miss:not_deeper"  # vLLM's own cache reaches as far, or the prompt is too short for a hit
    LATE = "miss:late"  # not decided within its time
    CALL_FAILED = "miss:call_failed"
    BAD_SEAL = "miss:bad_seal"  # an object was there, but not the one that was looked for, or not complete
    SERVER_DOWN = "miss:server_down"  # not even asked for
    SERVER_LOST = "miss:server_lost"  # lost while the lookup ran or its hit was held
    FAILED_BEFORE = "miss:failed_before"  # a load of this request failed; it does not load again
    BYPASSED = "miss:bypassed"  # nothing can name its tokens: an error, or streaming input
    UNWANTED = "miss:unwanted"  # vLLM wants it computed without reading a cache, e.g. for prompt logprobs
    NOT_TAKEN = "miss:not_taken"  # vLLM admitted it without this hit
    OTHER_NUMBER = "miss:other_number"  # vLLM wanted a number of tokens that was not promised
    LOCAL_CHANGED = "miss:local_changed"  # vLLM's cache lost blocks below the promise; looked up again
    EXPIRED = "miss:expired"  # promised, and not admitted in time; looked up again
    ENDED = "miss:ended"  # the request ended before


class Rejection(StrEnum):
    """Objects that were not believed."""

    AT_PROMISE = "seals_rejected"  # its seal, before it was promised
    AT_LOAD = "objects_rejected"  # its seal or its checksum, by a rank that loaded it


class Setback(StrEnum):
    """Why something was not stored, or not yet."""

    NOT_CERTIFIED = "not_certified"  # vLLM's pool would not serve it, e.g. no state was left at that boundary
    NO_PINS = "pin_budget_used_up"
    NO_SLOT = "slots_refused"  # stored already, being written by another, or no room
    LEASE_OVER = "leases_over"
    MOVED = "second_look_differs"  # the blocks changed between the first and the second look
    ABANDONED = "slots_abandoned"  # the blocks are gone for good
    COPY_FAILED = "store_copies_failed"
    CALL_FAILED = "store_calls_failed"
    COMMIT_REFUSED = "commits_refused"


class Failure(StrEnum):
    """How calls to the server failed."""

    TIMEOUT = "call_failed:timeout"
    LOST = "call_failed:lost"
    MALFORMED = "call_failed:malformed"
    REFUSED = "call_failed:refused"


class CallTime(StrEnum):
    """Seconds from sending a call until the scheduler took in its answer."""

    LOOKUP = "call:lookup"
    RETRIEVE = "call:retrieve"
    RESERVE = "call:reserve"
    COMMIT = "call:commit"
    SETTLE = "call:settle"


class CopyTime(StrEnum):
    """Seconds from a plan's arrival at a rank until its job was over there."""

    STORE = "copy:store"
    LOAD = "copy:load"


class CopiedBytes(StrEnum):
    """Payload bytes that ranks copied."""

    STORE = "copied:store"
    LOAD = "copied:load"


class CopyEnd(StrEnum):
    """How jobs ended, by rank."""

    DONE = "job:done"
    COPY_FAILED = "job:copy_failed"
    BAD_SEAL = "job:bad_seal"
    BAD_CHECKSUM = "job:bad_checksum"
    STALE_EPOCH = "job:stale_epoch"


class Level(StrEnum):
    """Things that go up and down."""

    PINNED_BLOCKS = "pinned_blocks"
    EPOCH = "epoch"
    SERVER_UP = "server_up"
    CALLS_UNANSWERED = "calls_unanswered"


class Slots(StrEnum):
    """Objects of the server's pool that this engine may write or holds read locks on."""

    WRITING = "slots:writing"
    READING = "slots:reading"


class Jobs(StrEnum):
    """Jobs that workers have and not all ranks have reported."""

    STORE = "jobs:store"
    LOAD = "jobs:load"
