"""Keeps the block size by which vLLM's scheduler ends its steps at the one of the KV cache.

In align mode a recurrent state is left where a step ends, so vLLM's scheduler ends prompt steps at multiples of
`cache_config.block_size`, and its pool names a full block by the block's end. The engine core sets that number from the
KV cache groups before it makes the scheduler. An engine core in a process of its own then runs the configuration's
`__post_init__` once more (`EngineCoreProc._perform_handshakes`), and vLLM's CPU platform puts its default of 128 tokens
back unless the user gave a block size. From then on a step may end inside of a block, the next one passes the block's
end, and the block is found under the prefix up to its end with a state from before it: a local hit there is wrong,
with any connector or none. Seen on vLLM 0.27.1 and 0.32.0.
"""

from __future__ import annotations

import logging
from typing import Any

from lmcache_mp_safe.errors import ConfigError
from lmcache_mp_safe.geometry.groups import GroupKind, ModelGeometry

logger = logging.getLogger("vllm.lmcache_mp_safe")


class ResolvedBlockSize:
    """The block size that the engine core resolved; to be made while vLLM makes its scheduler.

    Raises:
        ConfigError: steps would not end where recurrent blocks end.
    """

    def __init__(self, cache_config: Any, geometry: ModelGeometry) -> None:
        self._cache_config = cache_config
        self._tokens: int | None = None  # what to keep; nothing where no state depends on it
        states = {group.block_tokens for group in geometry.groups if group.kind is GroupKind.RECURRENT}
        if not states or cache_config.mamba_cache_mode != "align":
            return
        self._tokens = int(cache_config.block_size)
        if states != {self._tokens}:
            raise ConfigError(
                f"vLLM would end its steps at multiples of {self._tokens} tokens and keep recurrent states for blocks"
                f" of {max(states)}, so that its prefix cache served states of other prefixes; start vLLM with"
                f" --block-size {max(states)}"
            )

    def keep(self) -> None:
        """Put it back if it was changed: before a step is cut. Costs a comparison."""
        now = self._cache_config.block_size if self._tokens is not None else None
        if now == self._tokens:
            return
        self._cache_config.block_size = self._tokens
        logger.warning(
            "vLLM changed its block size from %d to %s tokens after it had made its scheduler, and would have cached"
            " wrong recurrent states; it is %d again. A server without this connector needs --block-size %d",
            self._tokens,
            now,
            self._tokens,
            self._tokens,
        )
