"""Gates on speed: what is measured, what each card must reach, and what a figure is worth against that.

Neither torch nor vLLM is imported: what decides is tested without a GPU (tests/unit/perf).
"""

from __future__ import annotations

import json
import re
import statistics
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

FOLDER = Path(__file__).resolve().parents[1] / "perf"


@dataclass(frozen=True, slots=True)
class Metric:
    """Something that is measured.

    Attributes:
        about: in words.
        better: which way.
        noise: by how much two medians on one quiet machine may differ, as a share; more is a regression.
        unit: of the figure; none of ratios.
    """

    about: str
    better: Literal["higher", "lower"]
    noise: float
    unit: str = ""


def _kernel(name: str) -> tuple[str, Metric]:
    return f"kernel.{name}", Metric(f"{name}: of the copy measured in the same run", "higher", 0.05)


METRICS: dict[str, Metric] = {
    "essay.footprint": Metric("peak blocks over those of stock in a pool without limit", "lower", 0.01),
    "essay.throughput": Metric("tokens/s over those of stock in the same pool", "higher", 0.08),
    "essay.tokens_per_s": Metric("output tokens of Nitro in the pool of an L4", "higher", 0.08, "tokens/s"),
    "ample.8": Metric("tokens/s over stock's, 8 requests, ample memory", "higher", 0.05),
    "ample.256": Metric("tokens/s over stock's, 256 requests, ample memory", "higher", 0.05),
    "ample.2048": Metric("tokens/s over stock's, 2,048 requests, ample memory", "higher", 0.05),
    "host.scheduler_us": Metric("Nitro's part of schedule(), 2,048 requests, mean of a step", "lower", 0.15, "µs"),
    "host.worker_us": Metric("a plan of 30 evictions on a worker, V2 runner, no launches, median", "lower", 0.15, "µs"),
    "host.step_us": Metric("both together", "lower", 0.15, "µs"),
    **dict(
        map(
            _kernel,
            (
                "score knorm",
                "score vnorm",
                "score keydiff",
                "score vnorm_centred",
                "moves of pack",
                "moves of fill",
                "stitch pack",
                "stitch fill",
            ),
        )
    ),
}


class GateError(ValueError):
    """A file of targets or results is wrong: the message names the file, the key and what is allowed."""


@dataclass(frozen=True, slots=True)
class Target:
    """What a metric must reach, and what we want it to.

    Attributes:
        at_least: the gate, of what is better higher.
        at_most: the gate, of what is better lower.
        goal: beyond the gate; reported, and gates nothing.
        why: where the gate is from.
    """

    at_least: float | None = None
    at_most: float | None = None
    goal: float | None = None
    why: str = ""

    @property
    def gate(self) -> float | None:
        """Return the figure of the gate; None where there is only a goal."""
        return self.at_least if self.at_least is not None else self.at_most


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a figure is worth: ``passed`` is None where no gate is set for it."""

    metric: str
    value: float
    target: Target | None
    baseline: float | None
    passed: bool | None

    @property
    def goal_reached(self) -> bool | None:
        """Return whether the figure is as good as the goal; None without one."""
        if self.target is None or self.target.goal is None:
            return None
        return not _worse(METRICS[self.metric], self.value, self.target.goal)

    def __str__(self) -> str:
        bound = ""
        if self.target is not None and self.target.gate is not None:
            which = "at least" if self.target.at_least is not None else "at most"
            bound = f", must be {which} {self.target.gate:g}" + (f" ({self.target.why})" if self.target.why else "")
        unit = METRICS[self.metric].unit
        return f"{self.metric} = {self.value:.4g}{f' {unit}' if unit else ''}{bound}"


def _worse(metric: Metric, value: float, than: float) -> bool:
    return value < than if metric.better == "higher" else value > than


def judge(name: str, value: float, targets: Mapping[str, Target], baseline: Results | None = None) -> Verdict:
    """Return what a figure is worth. One that is not a number passes nothing.

    Raises:
        GateError: there is no such metric.
    """
    if name not in METRICS:
        raise GateError(f"metric {name!r} is not known: use one of {', '.join(METRICS)}")
    target = targets.get(name)
    known = baseline.medians().get(name) if baseline is not None else None
    passed = None
    if target is not None and target.gate is not None:
        passed = value == value and not _worse(METRICS[name], value, target.gate)
    return Verdict(name, value, target, known, passed)


def slug(device: str) -> str:
    """Return the name that a card's files have, from what torch calls it: "NVIDIA L4" is "l4"."""
    plain = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
    return plain.removeprefix("nvidia-")


def load_targets(card: str, folder: Path = FOLDER / "targets") -> dict[str, Target]:
    """Return what holds on every card (default.toml), overridden and completed by the card's own file, if any.

    Raises:
        GateError: a file names an unknown metric or key, gates the wrong way, or has a goal short of its gate.
    """
    found: dict[str, Target] = {}
    for file in (folder / "default.toml", folder / f"{card}.toml"):
        if file.exists():
            found.update(_targets(file))
    return found


def _targets(file: Path) -> Iterator[tuple[str, Target]]:
    for name, values in tomllib.loads(file.read_text()).items():
        metric = METRICS.get(name)
        if metric is None:
            raise GateError(f"{file}: metric {name!r} is not known: use one of {', '.join(METRICS)}")
        if unknown := values.keys() - asdict(Target()).keys():
            raise GateError(f"{file}: {name} has {sorted(unknown)}: use at_least, at_most, goal and why")
        target = Target(**values)
        wrong = "at_most" if metric.better == "higher" else "at_least"
        if getattr(target, wrong) is not None:
            raise GateError(f"{file}: {name} is better {metric.better}, so {wrong} gates nothing: use the other one")
        if target.goal is not None and target.gate is not None and _worse(metric, target.goal, target.gate):
            raise GateError(f"{file}: {name} has a goal of {target.goal}, short of its gate of {target.gate}")
        yield name, target


@dataclass(slots=True)
class Results:
    """Figures of one card, several of a metric where it was measured several times."""

    card: str
    about: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, list[float]] = field(default_factory=dict)

    def add(self, found: Mapping[str, list[float]]) -> None:
        """Add figures to those that are there.

        Raises:
            GateError: there is no such metric.
        """
        for name, values in found.items():
            if name not in METRICS:
                raise GateError(f"metric {name!r} is not known: use one of {', '.join(METRICS)}")
            self.metrics.setdefault(name, []).extend(values)

    def medians(self) -> dict[str, float]:
        """Return the median of each metric."""
        return {name: statistics.median(values) for name, values in self.metrics.items()}

    def save(self, file: Path) -> None:
        """Write them as JSON."""
        file.write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def load(cls, file: Path) -> Results:
        """Read what ``save`` wrote.

        Raises:
            GateError: the file is missing or something else.
        """
        try:
            found = json.loads(file.read_text())
            made = cls(found["card"], found["about"])
            made.add({name: [float(value) for value in values] for name, values in found["metrics"].items()})
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise GateError(f"{file} holds no results ({error!r}): write it with ci/measure_perf.py") from error
        return made


def load_baseline(card: str, folder: Path = FOLDER / "baselines") -> Results | None:
    """Return what was measured on such a card before, if it was."""
    file = folder / f"{card}.json"
    return Results.load(file) if file.exists() else None
