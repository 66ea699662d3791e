"""Keeps the block size at which vLLM's scheduler ends steps at that of the recurrent states.

In align mode a recurrent state is left where a step ends, and a full block is found by the prefix up to its end: so
prompt steps have to end where recurrent blocks end. vLLM's scheduler ends them at multiples of
`cache_config.block_size`. Where that is smaller, a step may end inside of a block and the next one pass the block's
end: the block is then found with a state from before its end, and a hit there is wrong, with any connector or none.
Two ways lead there:

* The engine core's own process runs the configuration's `__post_init__` again once its scheduler is made
  (`EngineCoreProc._perform_handshakes`), and vLLM's CPU platform then puts its default of 128 tokens back unless the
  user gave a block size. Seen on vLLM 0.32.0; 0.27.1 has the same lines.
* The engine core sets it to the smallest block of all groups, so a drafter's group with short blocks shortens it
  (vLLM issue 53142; read, not run).
"""

from __future__ import annotations

import logging
import math
from typing import Any

from lmcache_mp_safe.geometry.groups import GroupKind, ModelGeometry

logger = logging.getLogger("vllm.lmcache_mp_safe")


class StepBlockSize:
    """The block size of vLLM's scheduler, in tokens; left alone where no recurrent state depends on it."""

    def __init__(self, cache_config: Any, geometry: ModelGeometry) -> None:
        self._cache_config = cache_config
        states = [group.block_tokens for group in geometry.groups if group.kind is GroupKind.RECURRENT]
        depends = bool(states) and cache_config.mamba_cache_mode == "align"
        self._tokens = math.lcm(*states) if depends else None

    def keep(self) -> None:
        """Mend it if it is another one: before a step is cut. Costs a comparison."""
        if self._tokens is None or (found := self._cache_config.block_size) == self._tokens:
            return
        self._cache_config.block_size = self._tokens
        logger.warning(
            "vLLM would have ended prompt steps at multiples of %d tokens, inside of its recurrent blocks of %d, and"
            " cached wrong states; they end at multiples of %d now. A server without this connector still does it",
            found,
            self._tokens,
            self._tokens,
        )
