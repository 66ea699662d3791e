"""What vLLM's engine process does between steps, and an engine that lives inside of another process does not."""

from __future__ import annotations

import time
from typing import Any

_YIELD_S = 0.001  # EngineCoreProc._process_engine_step


def yield_when_idle(core: Any) -> None:
    """Give the other threads a millisecond after each step in which no model ran while requests wait.

    Without it an engine that waits for a connector keeps the interpreter busy, and every message and every copy of the
    connector's threads has to wait for its turn: what is measured, or raced, then is not what `vllm serve` does.

    Args:
        core: an `EngineCore`.
    """
    step = core.step_fn

    def step_fn() -> Any:
        outputs, executed = step()
        if not executed and core.scheduler.has_requests():
            time.sleep(_YIELD_S)
        return outputs, executed

    core.step_fn = step_fn
