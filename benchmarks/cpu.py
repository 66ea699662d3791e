"""The arithmetic that the copy thread does for each object. The other cases without a GPU are in the package."""

from __future__ import annotations

import functools
from collections.abc import Iterator

from benchmarks.gpu_world import Pages, attention, hybrid
from lmcache_mp_safe.bench.measure import US, median_seconds
from lmcache_mp_safe.bench.runner import Row, WrongBytesError


class SpanTimes:
    key = "spans"
    description = "Host time to turn the block ids of one object into runs."

    def can_run(self) -> str | None:
        return None

    def run(self, quick: bool) -> Iterator[Row]:
        for geometry in (hybrid(1 << 10), attention()):
            pages = Pages(geometry, 1, "cpu")
            blocks = pages.sources[0]
            found = pages.spans(blocks)
            seconds = median_seconds(functools.partial(pages.spans, blocks), 50 if quick else 500)
            yield Row(f"{geometry.name}, {geometry.runs} runs", {"us": seconds * US, "spans": len(found)})
            if len(found) != geometry.runs or int(found.length.sum()) != geometry.payload_bytes:
                raise WrongBytesError(f"{len(found)} spans instead of {geometry.runs}")
