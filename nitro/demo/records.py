"""What a run of one engine leaves behind; crosses the process boundary as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nitro.types import Counters

STOCK, NITRO = "stock", "nitro"


@dataclass(frozen=True, slots=True)
class Step:
    """One engine step, sampled right after it was scheduled.

    Attributes:
        time_s: when it was scheduled, since the first step.
        running: requests in the running queue.
        waiting: requests in the waiting queue.
        blocks: blocks owned by requests; those held only by the prefix cache are free and do not count.
        preempted: requests preempted while the step was scheduled.
        tokens: tokens that the step computes.
        allocated: slots in the block tables of the running requests; what several share counts for each.
        live: slots of these that hold a token, this step's included.
    """

    time_s: float
    running: int
    waiting: int
    blocks: int
    preempted: int
    tokens: int
    allocated: int
    live: int


@dataclass(frozen=True, slots=True)
class Answer:
    """One finished request.

    Attributes:
        prompt_token_ids: the prompt with the chat template.
        token_ids: what was generated.
        text: the same, decoded.
        last_blocks: blocks that the request held in its last step.
    """

    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    last_blocks: int


@dataclass(frozen=True, slots=True)
class Run:
    """One engine's run.

    Attributes:
        name: ``"stock"`` or ``"nitro"``.
        scheduler: class of vLLM's scheduler that was in charge.
        block_size: tokens per block.
        pool_blocks: blocks that requests can own (the pool's null block is not one of them).
        load_s: time to load the model and start the engine.
        wall_s: time from the first step's schedule to the end of the last step.
        steps: every engine step.
        answers: in the order of the prompts.
        counters: Nitro's counters; None where Nitro was not in charge.
        versions: versions of the packages in that process.
    """

    name: str
    scheduler: str
    block_size: int
    pool_blocks: int
    load_s: float
    wall_s: float
    steps: tuple[Step, ...]
    answers: tuple[Answer, ...]
    counters: Counters | None
    versions: dict[str, str]

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-able values; the steps as columns, which is what plots want and a tenth of the size."""
        columns = {name: [getattr(step, name) for step in self.steps] for name in Step.__dataclass_fields__}
        return asdict(self) | {"steps": columns}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Run:
        """Return the run that ``to_dict`` described."""
        columns = data["steps"]
        steps = tuple(Step(**dict(zip(columns, row, strict=True))) for row in zip(*columns.values(), strict=True))
        answers = tuple(
            Answer(tuple(a["prompt_token_ids"]), tuple(a["token_ids"]), a["text"], a["last_blocks"])
            for a in data["answers"]
        )
        counters = None if data["counters"] is None else Counters(**data["counters"])
        return cls(**data | {"steps": steps, "answers": answers, "counters": counters})

    def save(self, path: Path) -> None:
        """Write the run as JSON."""
        path.write_text(json.dumps(self.to_dict()), encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Run:
        """Read a run written by ``save``."""
        return cls.from_dict(json.loads(path.read_text(encoding="utf-8")))
