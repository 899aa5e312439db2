"""vLLM's full-attention block manager, counting the slots that are held instead of the tokens that were computed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.request import Request

    from nitro.collector import Collector


class NitroFullAttentionManager(FullAttentionManager):
    """A FullAttentionManager that subtracts evicted tokens wherever blocks are counted.

    vLLM builds its managers itself; ``adopt`` turns one into this class afterwards.
    """

    nitro: Collector

    @classmethod
    def adopt(cls, manager: FullAttentionManager, collector: Collector, admission_blocks: int | None) -> None:
        """Turn a stock manager into Nitro's.

        Args:
            manager: the manager of the only KV cache group.
            collector: the ledger of evicted requests.
            admission_blocks: the most blocks a request holds during its prefill, for vLLM's admission check; None
                leaves vLLM's own estimate (the whole prompt).
        """
        manager.__class__ = cls
        manager.nitro = collector
        if admission_blocks is not None:
            manager.max_admission_blocks_per_request = admission_blocks

    def get_num_blocks_to_allocate(self, request_id: str, num_tokens: int, *args: Any, **kwargs: Any) -> int:
        """Count the blocks a request still needs for ``num_tokens`` logical tokens."""
        evicted = self.nitro.evicted(request_id)
        return super().get_num_blocks_to_allocate(request_id, num_tokens - evicted, *args, **kwargs)

    def allocate_new_blocks(
        self, request_id: str, num_tokens: int, num_tokens_main_model: int, *args: Any, **kwargs: Any
    ) -> list[KVCacheBlock]:
        """Allocate blocks up to ``num_tokens`` logical tokens; the ledger learns of those of evicted requests."""
        evicted = self.nitro.evicted(request_id)
        blocks = super().allocate_new_blocks(
            request_id, num_tokens - evicted, num_tokens_main_model - evicted, *args, **kwargs
        )
        if evicted and blocks:
            self.nitro.adopt(request_id, [block.block_id for block in blocks])
        return blocks

    def cache_blocks(self, request: Request, num_tokens: int, *args: Any, **kwargs: Any) -> None:
        """Publish full blocks for prefix caching, unless the request lost tokens: its blocks match no prefix."""
        if not self.nitro.evicted(request.request_id):
            super().cache_blocks(request, num_tokens, *args, **kwargs)

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        """Forget a finished or preempted request, and return its blocks."""
        self.nitro.release(request_id)
        return super().pop_blocks_for_free(request_id)
