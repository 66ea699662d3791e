"""Which of the optional packages are here."""

from __future__ import annotations

from importlib.util import find_spec


def missing_packages(*names: str) -> str | None:
    """None, or which of them are not installed."""
    missing = [name for name in names if find_spec(name) is None]
    return f"not installed: {', '.join(missing)}" if missing else None
