"""The process of one engine: ``python -m nitro.bench.engine SPEC FD``.

It starts vLLM as the file SPEC says, and then serves one load for each line of JSON on its standard input, until that
ends. What it measures goes to the file descriptor FD, in lines of JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from nitro.bench.machine import installed
from nitro.bench.measure import Measured
from nitro.bench.plan import Load


def serve(spec: dict[str, Any], lines: Any, report: Any) -> None:
    """Be one engine.

    Args:
        spec: ``arguments`` of ``vllm.LLM``, ``blocks`` of its pool, ``vocab``, and whether to ``record`` its steps.
        lines: one JSON object a line: ``load`` and ``seed``.
        report: called with what there is to say: ``ready_s``, then ``progress`` and ``result`` of each load.
    """
    started = time.perf_counter()
    from vllm import LLM

    llm = LLM(**spec["arguments"])
    measured = Measured(llm, report)
    if spec["record"]:
        llm.collective_rpc("bench_install")
    report({"ready_s": time.perf_counter() - started, "versions": installed()})
    for line in lines:
        job = json.loads(line)
        llm.reset_prefix_cache()  # of the load before, so that every load begins alike
        if spec["record"]:
            llm.collective_rpc("bench_begin")
        found = measured.run(Load(**job["load"]), job["seed"], blocks=spec["blocks"], vocab=spec["vocab"])
        if spec["record"]:
            (found["recording"],) = llm.collective_rpc("bench_take")
        report({"result": found})


def main() -> None:
    """Run as a process."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    spec = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    with os.fdopen(int(sys.argv[2]), "w", encoding="utf-8", buffering=1) as events:
        serve(spec, sys.stdin, lambda event: print(json.dumps(event), file=events))


if __name__ == "__main__":
    main()
