"""Answer at once where vLLM asks for a slot that a request already has.

vLLM's scheduler calls ``allocate_slots`` for each running request in each step, which takes most of a step's host time
with thousands of small requests; a request needs a new block once in ``block_size`` steps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.request import RequestStatus

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.request import Request

    from nitro.integration.vllm.manager import NitroFullAttentionManager

_KNOWN = {"num_lookahead_tokens"}  # arguments with which vLLM asks for slots of running requests


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

    def allocate_slots(self, request: Request, num_new_tokens: int, *args: Any, **kwargs: Any) -> KVCacheBlocks | None:
        """Return no new blocks if the request has the slots and no block becomes full; ask vLLM otherwise."""
        if (
            num_new_tokens > 0
            and not args
            and kwargs.keys() <= _KNOWN
            and not kwargs.get("num_lookahead_tokens")
            and request.status == RequestStatus.RUNNING
        ):
            full = self.nitro_manager
            request_id = request.request_id
            blocks = full.req_to_blocks.get(request_id)
            tokens = min(request.num_computed_tokens + num_new_tokens, self.max_model_len)
            evicted = full.nitro.evicted(request_id)
            if blocks is not None and tokens - evicted <= len(blocks) * full.block_size:
                publishes = self.enable_caching and not evicted
                final = min(tokens, request.num_tokens) // full.block_size
                if not publishes or full.num_cached_block.get(request_id, 0) >= final:
                    return self.empty_kv_cache_blocks
        return super().allocate_slots(request, num_new_tokens, *args, **kwargs)
