"""What an arm of the soak found, and whether that is good enough."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.table import Table

# An engine or a server that has grown by more than this since it was warm is taken to leak.
MOST_GROWTH_MIB = 48


@dataclass
class ArmReport:
    """One way of speculation.

    Attributes:
        requests: answered. compared: those whose answer was compared with a recompute's; all but the preempted ones,
            whose decoded tokens were prefilled again and differ by rounding: these are asked again.
        hits: answers with tokens from the connector. partial_hits: those that left more than a block to compute.
        divergences: where an answer left its reference, in words.
        left: what was held at the end beyond what was held after the first hit, on engine and server.
        engine_growth_mib, server_growth_mib: since they were warm; None if the run was too short to tell.
        failure: why the arm could not be run to its end.
    """

    speculation: str
    seconds: float = 0.0
    requests: int = 0
    compared: int = 0
    hits: int = 0
    partial_hits: int = 0
    hit_tokens: int = 0
    local_tokens: int = 0
    prompt_tokens: int = 0
    aborts: int = 0
    preempted: int = 0
    server_kills: int = 0
    server_freezes: int = 0
    divergences: list[str] = field(default_factory=list)
    left: dict[str, int] = field(default_factory=dict)
    engine_mib: int = 0
    engine_growth_mib: float | None = None
    server_mib: int = 0
    server_growth_mib: float | None = None
    counters: dict[str, int] = field(default_factory=dict)
    failure: str = ""

    @property
    def faults(self) -> list[str]:
        """Everything that makes the arm fail, in words."""
        found = [*([self.failure] if self.failure else [])]
        if self.divergences:
            found.append(f"{len(self.divergences)} answers diverged, first: {self.divergences[0]}")
        if self.left:
            found.append(f"left over: {self.left}")
        for name, grown in (("engine", self.engine_growth_mib), ("server", self.server_growth_mib)):
            if grown is not None and grown > MOST_GROWTH_MIB:
                found.append(f"the {name} has grown by {grown:.0f} MiB, more than {MOST_GROWTH_MIB}")
        if self.counters.get("internal_errors"):
            found.append(f"{self.counters['internal_errors']} internal errors in the connector")
        if not self.failure and not (self.hits and self.compared):
            found.append("no request was hit, or none was compared: nothing was shown")
        return found


def as_json(arms: Sequence[ArmReport]) -> dict[str, Any]:
    return {"ok": not any(arm.faults for arm in arms), "arms": [asdict(arm) | {"faults": arm.faults} for arm in arms]}


_COLUMNS = (
    "speculation", "minutes", "requests", "compared", "divergent", "hits", "partial", "hit tokens", "prompt tokens",
    "aborted", "preempted", "kills", "freezes", "left", "engine MiB", "server MiB",
)  # fmt: skip


def as_table(arms: Sequence[ArmReport]) -> Table:
    table = Table(title="soak")
    for number, column in enumerate(_COLUMNS):
        table.add_column(column, justify="right" if number else "left")
    for arm in arms:
        table.add_row(*_row(arm))
    return table


def _row(arm: ArmReport) -> list[str]:
    counts = (
        arm.requests, arm.compared, len(arm.divergences), arm.hits, arm.partial_hits, arm.hit_tokens,
        arm.prompt_tokens, arm.aborts, arm.preempted, arm.server_kills, arm.server_freezes, sum(arm.left.values()),
    )  # fmt: skip
    memory = (_grown(arm.engine_mib, arm.engine_growth_mib), _grown(arm.server_mib, arm.server_growth_mib))
    return [arm.speculation, f"{arm.seconds / 60:.1f}", *(f"{count:,}" for count in counts), *memory]


def _grown(most: int, growth: float | None) -> str:
    return f"{most}" if growth is None else f"{most} ({growth:+.1f})"
