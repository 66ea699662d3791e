"""A deliberate mistake, to see that the soak notices: states that arrive are spoiled behind the connector's back."""

from __future__ import annotations

from typing import Any

from lmcache_mp_safe.contract import SKIP, JobOutcome, JobReport, LoadJob, StoreJob
from lmcache_mp_safe.geometry.groups import GroupKind
from lmcache_mp_safe.testing.engine import Engine


def load_wrong_states(engine: Engine) -> None:
    """From now on every recurrent state that was loaded, checked and found right is then overwritten with zeros."""
    worker: Any = engine.worker_connector.worker_half
    groups = engine.connector.scheduler_half.objects.geometry.groups
    recurrent = [number for number, group in enumerate(groups) if group.kind is GroupKind.RECURRENT]
    end = worker._end

    def spoiling(job: StoreJob | LoadJob, report: JobReport) -> None:
        if isinstance(job, LoadJob) and report.outcome is JobOutcome.DONE:
            for copy in job.objects:
                for group in recurrent:
                    _clear(worker, group, copy.blocks[group])
        end(job, report)

    worker._end = spoiling


def _clear(worker: Any, group: int, blocks: tuple[int, ...]) -> None:
    for layer in worker._pages.groups[group]:
        for segment in layer.segments:
            for block in blocks:
                if block != SKIP:
                    start = segment.offset + block * segment.stride
                    worker._backend.buffers[segment.buffer][start : start + segment.length] = 0
