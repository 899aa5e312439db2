"""The grid: which cells there are, and in which order they run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from nitro.eval.settings import FULL, EvalSettings, PolicyChoice


@dataclass(frozen=True, slots=True)
class Cell:
    """All cases of a task under one policy and budget: what runs, and is kept, as a whole.

    Attributes:
        task: its name.
        length: tokens of a context; 0 where the task has none.
        policy: None: the full cache.
        budget: share of the tokens that stay; 1 for the full cache.
    """

    task: str
    length: int
    policy: PolicyChoice | None
    budget: float

    @property
    def label(self) -> str:
        """The policy as the user wrote it."""
        return FULL if self.policy is None else self.policy.label

    @property
    def slug(self) -> str:
        """The cell as a file's name."""
        policy = FULL if self.policy is None else f"{self.policy.slug}-{self.budget:g}"
        return f"{self.task}-{self.length}-{policy}"

    @property
    def title(self) -> str:
        """The cell for people."""
        where = f"{self.task} {self.length}" if self.length else self.task
        return f"{where}, {self.label}" + ("" if self.policy is None else f" at {self.budget:.3g}")


def cells(settings: EvalSettings) -> Iterator[Cell]:
    """Yield the cells, the full cache of each task first: others are compared with it."""
    for task in settings.tasks:
        for length in (0,) if task == "stories" else settings.lengths:
            yield Cell(task, length, None, 1.0)
            for policy in settings.choices():
                for budget in settings.budgets:
                    yield Cell(task, length, policy, budget)
