"""A worker's part in a step, timed, and how the scheduler hears of it: beside the step's tokens, in vLLM's own message.

A plan goes to the workers as an attribute of ``SchedulerOutput``; a report comes back as one of ``ModelRunnerOutput``.
vLLM hands both on as they are in one process, and pickles them between processes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput

from nitro.types import StepAsks, StepPlan, WorkReport

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

    from nitro.integration.vllm.answers import Answers
    from nitro.work_clock import WorkClock

PLAN = "nitro_plan"
ASKS = "nitro_asks"
REPORT = "nitro_report"


class _Told(AsyncModelRunnerOutput):
    """An output that vLLM will wait for later, and the report that goes with it."""

    def __init__(self, output: AsyncModelRunnerOutput, report: WorkReport) -> None:
        self._output, self._report = output, report

    def get_output(self) -> ModelRunnerOutput:
        """Wait as vLLM's own class does; possibly in another thread, which is why the report is ready before."""
        return _with(self._output.get_output(), self._report)


def do(runner: Any, output: SchedulerOutput) -> None:
    """Let a model runner (V1 or V2) apply a step's plan and answer its questions; time that, if there are any."""
    plan: StepPlan | None = getattr(output, PLAN, None)
    asks: StepAsks | None = getattr(output, ASKS, None)
    if plan is None and asks is None:
        runner._nitro_answer(None)
        return
    with runner.nitro_clock:
        if plan is not None:
            runner._nitro_apply(plan)
        runner._nitro_answer(asks)


def told(output: Any, clock: WorkClock, answers: Answers | None) -> Any:
    """Return what a model runner has made of a step, with a report if there is anything to report."""
    report = clock.take() if isinstance(output, ModelRunnerOutput | AsyncModelRunnerOutput) else None
    if report is None:
        return output
    if answers is not None:
        report = report._replace(replaced=answers.replaced, silent=answers.silent)
    return _Told(output, report) if isinstance(output, AsyncModelRunnerOutput) else _with(output, report)


def _with(output: ModelRunnerOutput, report: WorkReport) -> ModelRunnerOutput:
    if output.req_ids:  # else it may be vLLM's one empty output, which all steps without tokens share
        setattr(output, REPORT, report)
    return output
