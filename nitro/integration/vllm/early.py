"""Answer at once where vLLM asks for a slot that a request already has, or to publish a block that is not full.

vLLM's scheduler calls ``allocate_slots`` and ``cache_blocks`` for each running request in each step, which takes most
of a step's host time with thousands of small requests; a request needs a new block once in ``block_size`` steps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.request import RequestStatus

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.request import Request

    from nitro.integration.vllm.manager import NitroFullAttentionManager


class NitroKVCacheManager(KVCacheManager):
    """A KVCacheManager that decides without asking its coordinator where there is nothing to do.

    ``adopt`` turns vLLM's own into this class.
    """

    nitro_manager: NitroFullAttentionManager

    @classmethod
    def adopt(cls, manager: KVCacheManager, full: NitroFullAttentionManager) -> bool:
        """Turn a stock manager into this one; does nothing, and returns False, where the short cut might differ.

        Args:
            manager: of the scheduler.
            full: the manager of its only KV cache group.
        """
        if type(manager) is not KVCacheManager or full.block_pool.hash_block_size != full.block_size:
            return False
        manager.__class__ = cls
        manager.nitro_manager = full
        return True

    def allocate_slots(
        self, request: Request, num_new_tokens: int, *args: Any, num_lookahead_tokens: int = 0, **kwargs: Any
    ) -> KVCacheBlocks | None:
        """Return no new blocks if the request has the slots and no block becomes full; ask vLLM otherwise."""
        full, name = self.nitro_manager, request.request_id
        if num_lookahead_tokens:
            kwargs["num_lookahead_tokens"] = num_lookahead_tokens
        elif num_new_tokens > 0 and not args and not kwargs:  # as vLLM asks for slots of running requests
            tokens = request.num_computed_tokens + num_new_tokens
            if tokens <= full.nitro_enough.get(name, 0):
                return self.empty_kv_cache_blocks
            if request.status == RequestStatus.RUNNING and (blocks := full.req_to_blocks.get(name)) is not None:
                size, evicted = full.block_size, full.nitro.evicted(name)
                held = len(blocks) * size + evicted
                unpublished = held + 1
                if self.enable_caching and not evicted:
                    unpublished = (full.num_cached_block.get(name, 0) + 1) * size
                full.nitro_enough[name] = min(held, unpublished - 1)
                tokens = min(tokens, self.max_model_len)
                # Tokens that are not known yet are never published.
                if tokens <= held and min(tokens, request.num_tokens) < unpublished:
                    return self.empty_kv_cache_blocks
        return super().allocate_slots(request, num_new_tokens, *args, **kwargs)

    def cache_blocks(self, request: Request, num_computed_tokens: int, *args: Any, **kwargs: Any) -> None:
        """Do nothing if no block has become full, or the request lost tokens; ask vLLM otherwise."""
        full, name = self.nitro_manager, request.request_id
        published = full.num_cached_block.get(name, 0)
        if num_computed_tokens >= (published + 1) * full.block_size and not full.nitro.evicted(name):
            super().cache_blocks(request, num_computed_tokens, *args, **kwargs)
