"""What has to stay free when vLLM admits a request, so that none that runs is preempted for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.utils.math_utils import cdiv
from vllm.v1.request import RequestStatus

from nitro.forecast import Forecast

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
    from vllm.v1.request import Request

    from nitro.collector import Collector
    from nitro.planner import BudgetRule


class Admission:
    """How many free blocks the running requests are about to take.

    vLLM admits a request as soon as its prompt fits. Then those whose prompts are still computed, and those that
    grow until their next eviction, find the pool empty, and one of them loses all that was computed for it.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        manager: FullAttentionManager,
        collector: Collector,
        peak: Callable[[str, int], int],
        growing: Iterable[str],
    ) -> None:
        """Begin with no request.

        Args:
            scheduler: vLLM's.
            manager: has the requests' block lists.
            collector: the ledger of evicted requests.
            peak: returns the most slots that a request (by id) holds while so many tokens of it are prefilled.
            growing: at any time the running requests that may get several tokens in a step.
        """
        self.forecast = Forecast(manager.block_size)
        self._scheduler = scheduler
        self._manager = manager
        self._collector = collector
        self._peak = peak
        self._growing = growing
        self._sessions: set[str] = set()  # streamed inputs that were foreseen
        self._counted = 0  # running requests whose prompts are counted in ...
        self._reserve: int | None = None  # of this step, once somebody has asked

    def begin_step(self) -> None:
        """Begin a step, in which requests are cut back first; then those that run get slots, then others get in."""
        self.forecast.begin_step()
        self._drop_parked()
        self._counted = len(self._scheduler.running)
        self._reserve = None

    def _drop_parked(self) -> None:
        """Expect nothing of streamed inputs that wait for their next part, with all their blocks."""
        requests = self._scheduler.requests
        for name in tuple(self._sessions):
            request = requests.get(name)
            if request is None or request.status != RequestStatus.RUNNING:
                self._sessions.discard(name)
                self.forecast.drop(name)

    def expect(self, request: Request, rule: BudgetRule, physical: int) -> None:
        """Foresee a request that gets one token in each step from now on, if it is to be cut back soon.

        One that has less than it may keep is no affair of the forecast: its way to the first cut may be long, it may
        end before, and stock vLLM sets nothing aside for it either.

        Args:
            request: vLLM's.
            rule: its own.
            physical: slots that it holds.
        """
        computed, prompt = request.num_computed_tokens, request.num_prompt_tokens
        # The last token is never computed.
        left = min(prompt + request.max_tokens, self._scheduler.max_model_len) - 1 - computed
        gap, kept = rule.next_cut(computed, physical, prompt, left)
        if rule.budget is None:
            again = max(rule.next_cut(computed + gap, kept, prompt, left - gap)[0], 1)
        elif gap <= rule.slack:
            again = rule.slack
        else:
            return
        if gap > 0:
            self.forecast.expect(request.request_id, physical, gap, kept, again, left)
            if request.resumable:
                self._sessions.add(request.request_id)

    def reserve(self) -> int:
        """Return how many blocks have to stay free; to be asked when those that run have got this step's slots."""
        running = self._scheduler.running
        if self._reserve is None:
            requests = self._scheduler.requests
            growing = [requests[name] for name in self._growing if name in requests]
            self._reserve = self.forecast.most + sum(
                self._missing(request) for request in growing if request.status == RequestStatus.RUNNING
            )
        # Those that got in before in this step may not have got their whole prompt.
        for request in running[self._counted :]:
            self._reserve += self._missing(request)
        self._counted = max(self._counted, len(running))
        return self._reserve

    def _missing(self, request: Request) -> int:
        """Return how many blocks a request still lacks for the most that its prompt will hold at once."""
        name, tokens = request.request_id, request.num_tokens
        slots = min(tokens - self._collector.evicted(name), self._peak(name, tokens))
        return max(cdiv(slots, self._manager.block_size) - len(self._manager.req_to_blocks[name]), 0)
