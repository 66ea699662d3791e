"""Facts in, findings out. Pure; one file for each part of what was looked at."""

from __future__ import annotations

from lmcache_mp_safe.doctor.checks import connector, copies, engine, host, server, software, stock
from lmcache_mp_safe.doctor.facts import Facts
from lmcache_mp_safe.doctor.findings import Finding

# Title of a section of the page, and what fills it.
SECTIONS = (
    ("software", software.check),
    ("vLLM", host.check),
    ("model", engine.check),
    ("connector", connector.check),
    ("stock connector", stock.check),
    ("server", server.check),
    ("copies", copies.check),
)


def diagnose(facts: Facts) -> dict[str, tuple[Finding, ...]]:
    """All findings by section, in the order of the page; sections without any are left out."""
    found = {title: tuple(check(facts)) for title, check in SECTIONS}
    return {title: findings for title, findings in found.items() if findings}
