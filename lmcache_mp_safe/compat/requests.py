"""vLLM's request and block pool behind the few questions that the scheduler half asks them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vllm.v1.core.kv_cache_utils import BlockHashListWithBlockSize, generate_block_hash_extra_keys

from lmcache_mp_safe.config import MAX_OFFLOAD_TOKENS
from lmcache_mp_safe.errors import UnnameableError
from lmcache_mp_safe.ids import RequestId

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.request import Request


class HostRequest:
    """One vLLM request, as far as a cache cares.

    The properties read the live request, so they must be asked within the hook whose moment they should describe.
    """

    def __init__(self, request: Request, hash_block_tokens: int) -> None:
        self._request = request
        self._hash_block_tokens = hash_block_tokens
        self.request_id = RequestId(request.request_id)

    def is_same(self, request: Request) -> bool:
        """Whether this is that very request, not another one under a reused id."""
        return self._request is request

    @property
    def num_tokens(self) -> int:
        """Tokens whose ids are known: prompt plus accepted output, no drafts and no placeholders."""
        return int(self._request.num_tokens)

    @property
    def num_prompt_tokens(self) -> int:
        return int(self._request.num_prompt_tokens)

    @property
    def num_computed_tokens(self) -> int:
        return int(self._request.num_computed_tokens)

    @property
    def salt(self) -> str:
        """The user's; empty if it is no text, and then `extra_keys` gives no name either."""
        salt = self._request.cache_salt
        return salt if isinstance(salt, str) else ""

    @property
    def skips_reading(self) -> bool:
        """Whether vLLM wants this request computed without reading any prefix cache (prompt logprobs, some pooling)."""
        return bool(self._request.skip_reading_prefix_cache)

    @property
    def is_resumable(self) -> bool:
        """Whether its tokens may be rewritten while it lives (streaming input)."""
        return bool(getattr(self._request, "resumable", False))

    @property
    def user_configs(self) -> dict[str, Any]:
        """The `lmcache.*` entries of the request's `kv_transfer_params`."""
        params = getattr(self._request, "kv_transfer_params", None)
        if not isinstance(params, dict):
            return {}
        return {key: value for key, value in params.items() if isinstance(key, str) and key.startswith("lmcache.")}

    @property
    def wants_cached_token_stats(self) -> bool:
        """Whether it asks, as with the stock connector, how much of its prompt was cached."""
        params = getattr(self._request, "kv_transfer_params", None)
        return isinstance(params, dict) and "cached_token_stats" in params

    def tokens(self, start: int, end: int) -> Sequence[int]:
        """Token ids [start, end)."""
        tokens: Sequence[int] = self._request.all_token_ids[start:end]
        return tokens

    def extra_keys(self, start: int, end: int) -> Any:
        """What besides the token ids decides the KV of tokens [start, end).

        vLLM's own extra keys (multimodal hashes, LoRA, prompt embeddings, salt) and the LoRA's path, because vLLM keys
        an adapter by its name, which means something only within one process. The first tokens also carry what keeps
        users apart; every later name follows from theirs.

        Raises:
            UnnameableError: vLLM's own hashes leave out something that decides the KV, or the salt is no text.
        """
        if getattr(self._request, "prompt_is_token_ids", None) is not None:
            raise UnnameableError("which positions of a prompt are embeddings is in no hash of vLLM's")
        keys = self.vllm_extra_keys(start, end)
        lora = self._request.lora_request
        return keys, None if lora is None else lora.lora_path, self._user_keys() if start == 0 else None

    def _user_keys(self) -> tuple[str, dict[str, Any]]:
        """Salt and request configs: two users who differ in one of them share nothing."""
        if not isinstance(self._request.cache_salt, str | None):
            raise UnnameableError(f"a cache_salt must be text, not {type(self._request.cache_salt).__name__}")
        configs = {key: value for key, value in self.user_configs.items() if key != MAX_OFFLOAD_TOKENS}
        return self.salt, configs

    def vllm_extra_keys(self, start: int, end: int) -> tuple[Any, ...] | None:
        """What vLLM hashes besides the token ids [start, end)."""
        keys: tuple[Any, ...] | None = generate_block_hash_extra_keys(self._request, start, end, 0)[0]
        return keys

    @property
    def lora(self) -> tuple[int | None, str | None]:
        """Id and name of the adapter, if there is one."""
        lora = self._request.lora_request
        return (None, None) if lora is None else (lora.adapter_id, lora.name)

    def block_hashes(self, columns: range, block_tokens: int) -> Sequence[Any] | None:
        """vLLM's hashes of the prefixes that end with these columns; None while the tokens of one are unknown."""
        hashes: Any = self._request.block_hashes
        if block_tokens != self._hash_block_tokens:
            hashes = BlockHashListWithBlockSize(hashes, self._hash_block_tokens, block_tokens)
        return [hashes[column] for column in columns] if columns.stop <= len(hashes) else None


def cached_token_stats(local: int, external: int) -> dict[str, dict[str, int]]:
    """`kv_transfer_params` of an answer, by the stock connector's names.

    Args:
        local: prompt tokens that vLLM's own cache served.
        external: tokens from the start of the prompt that the server's objects covered; 0 without a load.
    """
    stats = {
        "num_vllm_cached_tokens": local,
        "num_lmcache_cached_tokens": external,
        "num_lmcache_extra_cached_tokens": max(0, external - local),
    }
    return {"cached_token_stats": stats}


class HostBlockPool:
    """vLLM's block pool: what its own prefix cache would serve, and reference counts on that."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool

    @property
    def hash_block_tokens(self) -> int:
        return int(self._pool.hash_block_size)

    @property
    def total_blocks(self) -> int:
        return int(self._pool.num_gpu_blocks)

    def find_all(self, block_hashes: Sequence[Any], group: int) -> list[KVCacheBlock] | None:
        """The blocks that vLLM itself would serve for these prefix hashes in this group; None if one is missing."""
        blocks: list[KVCacheBlock] = []
        look_up, groups = self._pool.get_cached_block, [group]
        for block_hash in block_hashes:
            found = look_up(block_hash, groups)
            if not found:
                return None
            blocks += found
        return blocks

    def pin(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Keep the blocks from being handed out; one more reference on each."""
        self._pool.touch(blocks)

    def unpin(self, blocks: Sequence[KVCacheBlock]) -> None:
        # Reversed as vLLM frees a request: the tail of a prefix is evicted before its head.
        self._pool.free_blocks(list(reversed(blocks)))
