"""vLLM's full-attention block manager, counting the slots that are held instead of the tokens that were computed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.request import Request

    from nitro.collector import Collector
    from nitro.integration.vllm.admission import Admission


class NitroFullAttentionManager(FullAttentionManager):
    """A FullAttentionManager that subtracts evicted tokens wherever blocks are counted.

    vLLM builds its managers itself; ``adopt`` turns one into this class afterwards.

    Attributes:
        nitro_enough: by request, up to how many logical tokens it needs no block and publishes none; at most that: what
            is not there, or was before it was given a block, is found out again.
    """

    nitro: Collector
    nitro_peak: Callable[[str, int], int]
    nitro_admission: Admission
    nitro_new: tuple[list[str], list[int], list[int]]
    nitro_enough: dict[str, int]

    @classmethod
    def adopt(
        cls,
        manager: FullAttentionManager,
        collector: Collector,
        peak: Callable[[str, int], int],
        admission: Admission,
    ) -> None:
        """Turn a stock manager into Nitro's.

        Args:
            manager: the manager of the only KV cache group.
            collector: the ledger of evicted requests.
            peak: returns the most slots that a request (by id) holds while so many tokens of it are prefilled.
            admission: knows what has to stay free when a request is admitted.
        """
        manager.__class__ = cls
        manager.nitro = collector
        manager.nitro_peak = peak
        manager.nitro_admission = admission
        manager.nitro_new = [], [], []
        manager.nitro_enough = {}

    def get_num_blocks_to_allocate(self, request_id: str, num_tokens: int, *args: Any, **kwargs: Any) -> int:
        """Count the blocks a request still needs for ``num_tokens`` logical tokens.

        vLLM admits a request when its whole prompt would fit (``apply_admission_cap``). What the request will hold at
        once is enough; vLLM has a bound for that itself, but one for all requests, and under a name that changes.
        A request that is to be admitted needs what the running ones are about to take, on top of its own: otherwise
        one of them would be preempted for it.
        """
        reserve = 0 if self.req_to_blocks.get(request_id) else self.nitro_admission.reserve()
        slots = num_tokens - self.nitro.evicted(request_id)
        if kwargs.get("apply_admission_cap"):
            # One block more than the slots need, since survivors of a shared prefix move to fresh blocks.
            slots = min(slots, self.nitro_peak(request_id, num_tokens) + self.block_size)
        return reserve + super().get_num_blocks_to_allocate(request_id, slots, *args, **kwargs)

    def allocate_new_blocks(
        self, request_id: str, num_tokens: int, num_tokens_main_model: int, *args: Any, **kwargs: Any
    ) -> list[KVCacheBlock]:
        """Allocate blocks up to ``num_tokens`` logical tokens; those of evicted requests are booked with the step."""
        evicted = self.nitro.evicted(request_id)
        blocks = super().allocate_new_blocks(
            request_id, num_tokens - evicted, num_tokens_main_model - evicted, *args, **kwargs
        )
        if evicted and blocks:
            names, counts, ids = self.nitro_new
            names.append(request_id)
            counts.append(len(blocks))
            ids += [block.block_id for block in blocks]
        return blocks

    def nitro_book(self) -> None:
        """Tell the ledger of the blocks that evicted requests were given in this step; to be called once it is made.

        One that was given a block and preempted within the step is not in the ledger any more, which passes it over.
        """
        if self.nitro_new[0]:
            self.nitro.adopt_all(*self.nitro_new)
            self.nitro_new = [], [], []

    def cache_blocks(self, request: Request, num_tokens: int, *args: Any, **kwargs: Any) -> None:
        """Publish full blocks for prefix caching, unless the request lost tokens: its blocks match no prefix."""
        if not self.nitro.evicted(request.request_id):
            super().cache_blocks(request, num_tokens, *args, **kwargs)

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        """Forget a finished or preempted request, and return its blocks."""
        self.nitro_enough.pop(request_id, None)
        self.nitro.release(request_id)
        self.nitro_admission.forecast.drop(request_id)
        return super().pop_blocks_for_free(request_id)
