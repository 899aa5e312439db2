"""A worker's report travels with the step's tokens, whatever kind of output vLLM makes of them."""

from __future__ import annotations

import pickle
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, AsyncModelRunnerOutput, ModelRunnerOutput

from nitro.integration.vllm import work
from nitro.types import WorkReport
from nitro.work_clock import WorkClock


class Later(AsyncModelRunnerOutput):
    """An output that vLLM waits for."""

    def get_output(self) -> ModelRunnerOutput:
        return output()


def output() -> ModelRunnerOutput:
    return ModelRunnerOutput(req_ids=["r1"], req_id_to_index={"r1": 0}, sampled_token_ids=[[5]])


@pytest.fixture
def clock() -> WorkClock:
    made = WorkClock(torch.device("cpu"))
    with made:
        pass
    return made


def report_of(made: Any) -> WorkReport | None:
    return getattr(pickle.loads(pickle.dumps(made)), work.REPORT, None)


def test_a_report_survives_what_vllm_does_between_processes(clock: WorkClock) -> None:
    report = report_of(work.told(output(), clock, None))
    assert report is not None
    assert len(report.host_ns) == 1
    assert report_of(work.told(output(), clock, None)) is None, "there is nothing new"


def test_an_output_that_is_waited_for_in_another_thread(clock: WorkClock) -> None:
    answers: Any = SimpleNamespace(replaced=2, silent=1)
    later, found = work.told(Later(), clock, answers), []
    assert isinstance(later, AsyncModelRunnerOutput)
    thread = threading.Thread(target=lambda: found.append(later.get_output()))
    thread.start()
    thread.join()
    assert found[0].sampled_token_ids == [[5]]
    report = report_of(found[0])
    assert report is not None
    assert (len(report.host_ns), report.replaced, report.silent) == (1, 2, 1)


def test_the_output_that_all_empty_steps_share_stays_as_it_is(clock: WorkClock) -> None:
    assert work.told(EMPTY_MODEL_RUNNER_OUTPUT, clock, None) is EMPTY_MODEL_RUNNER_OUTPUT
    assert not hasattr(EMPTY_MODEL_RUNNER_OUTPUT, work.REPORT)


def test_no_output_keeps_the_report_for_the_next(clock: WorkClock) -> None:
    assert work.told(None, clock, None) is None
    assert report_of(work.told(output(), clock, None)) is not None


def test_steps_without_work_are_not_timed() -> None:
    clock, done = WorkClock(torch.device("cpu")), []
    runner = SimpleNamespace(nitro_clock=clock, _nitro_apply=done.append, _nitro_answer=done.append)
    work.do(runner, SimpleNamespace())  # type: ignore[arg-type]
    assert (done, clock.take()) == ([None], None)
    work.do(runner, SimpleNamespace(nitro_plan="plan"))  # type: ignore[arg-type]
    work.do(runner, SimpleNamespace(nitro_asks="asks"))  # type: ignore[arg-type]
    assert done == [None, "plan", None, "asks"]
    report = clock.take()
    assert report is not None
    assert len(report.host_ns) == 2
