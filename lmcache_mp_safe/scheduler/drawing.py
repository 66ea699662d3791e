"""Draws the phases of a hit from the table of moves, for docs/architecture.md.

python -m lmcache_mp_safe.scheduler.drawing
"""

from __future__ import annotations

from lmcache_mp_safe.scheduler.phases import MOVES, Phase


def draw() -> str:
    """A Markdown table: one row for every phase and every phase it may lead to, with the events that do."""
    lines = ["| from | to | on |", "|---|---|---|"]
    for source in Phase:
        for target in Phase:
            events = [
                event.__name__
                for (phase, event), targets in MOVES.items()
                if phase is source and target in targets and target is not source
            ]
            if events:
                lines.append(f"| {source.value} | {target.value} | {', '.join(events)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    import sys

    sys.stdout.write(draw() + "\n")
