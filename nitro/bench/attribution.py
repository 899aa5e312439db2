"""Where the time that Nitro saves comes from: a model of a step's time, fitted on recorded steps; a sum that adds up.

The time of step i of an engine of kind m (stock or Nitro) is modelled as

    t_i  =  S_m  +  R_m · requests_i  +  T · tokens_i  +  P · pairs_i  +  K · kv_tokens_i  +  E · evictions_i  +  rest_i

with costs ≥ 0. S and R hold what the host does for a step and for each request in it, and what the device does once a
step (reading the weights); they may differ between stock and Nitro. T, P and K belong to the device's work, the same
code in both; E is Nitro's alone. All of them are *effective*: what one more of the kind costs in wall time here. Work
that hides behind other work costs nothing, however much of it there is.

Between two runs, the difference of the sums over all steps falls into parts (`PARTS`), each of them a difference of
counts times a cost, or of costs times a count; ``rest`` is what the model leaves, so that the parts sum up to the
difference of the wall times, whatever the fit is like. docs/bench.md says what they mean, and where they mislead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nitro.bench.fit import Floats, robust
from nitro.errors import IntegrityError

PARTS = {
    "recomputation": "recomputed tokens avoided",
    "batches": "larger batches: fewer steps",
    "kv": "fewer KV bytes read",
    "host": "host: cost of a step and of a request",
    "evictions": "Nitro's evictions",
    "tokens": "other tokens computed",
    "rest": "residue: not explained by the model",
    "outside": "before the first and after the last step",
}
_SHARED = ("tokens", "pairs", "kv_tokens", "evictions")
_COUNTS = ("requests", "tokens", "again", "pairs", "pairs_again", "kv_tokens", "evictions")


@dataclass(frozen=True)
class Steps:
    """One run's steps.

    Attributes:
        kind: of the engine; engines of a kind have the same host costs.
        wall_s: the run's time as its user sees it.
        columns: ``seconds``, and ``requests``, ``tokens``, ``again``, ``pairs``, ``pairs_again``, ``kv_tokens`` and
            ``evictions`` as `nitro.bench.recorder` counts them, each ``[steps]``.
    """

    kind: str
    wall_s: float
    columns: Mapping[str, Floats]

    @classmethod
    def of(cls, kind: str, run: Mapping[str, Any]) -> Steps:
        """Return the steps of a run that was recorded (`nitro.bench.recorder`)."""
        recorded = run["recording"]["columns"]
        columns = {name: np.asarray(recorded[name], np.float64) for name in ("seconds", *_COUNTS)}
        return cls(kind, float(run["seconds"]), columns)

    def __len__(self) -> int:
        return len(self.columns["seconds"])

    def total(self, name: str) -> float:
        """Return a column's sum."""
        return float(self.columns[name].sum())

    @property
    def outside_s(self) -> float:
        """Time of the run in which no step was under way."""
        return self.wall_s - self.total("seconds")


@dataclass(frozen=True)
class Costs:
    """The fitted costs, in seconds.

    Attributes:
        step: S of each kind.
        request: R of each kind.
        token: T.
        pair: P.
        kv_token: K.
        eviction: E.
    """

    step: Mapping[str, float]
    request: Mapping[str, float]
    token: float
    pair: float
    kv_token: float
    eviction: float

    def predict(self, steps: Steps) -> Floats:
        """Return what the model says about each step, ``[steps]``."""
        columns = steps.columns
        each = (self.token, self.pair, self.kv_token, self.eviction)
        shared = sum(cost * columns[name] for cost, name in zip(each, _SHARED, strict=True))
        return self.step[steps.kind] + self.request[steps.kind] * columns["requests"] + shared

    def rest_s(self, steps: Steps) -> float:
        """Return the time of a run that the model does not explain; negative if it says too much."""
        return steps.total("seconds") - float(self.predict(steps).sum())


def fit(runs: Sequence[Steps]) -> Costs:
    """Return the costs that explain the steps of all these runs at once best.

    The runs should differ: costs of things that always come together cannot be told apart.

    Raises:
        IntegrityError: a run has no steps.
    """
    if not runs or not all(map(len, runs)):
        raise IntegrityError("there are no recorded steps to explain")
    kinds = list(dict.fromkeys(run.kind for run in runs))
    rows = []
    for run in runs:
        own = np.array([run.kind == kind for kind in kinds], np.float64)
        each = [np.outer(np.ones(len(run)), own), np.outer(run.columns["requests"], own)]
        rows.append(np.hstack([*each, *(run.columns[name][:, None] for name in _SHARED)]))
    found = robust(np.vstack(rows), np.concatenate([run.columns["seconds"] for run in runs])).tolist()
    count = len(kinds)
    step, request = dict(zip(kinds, found, strict=False)), dict(zip(kinds, found[count:], strict=False))
    return Costs(step, request, *found[2 * count :])


def split(before: Steps, after: Steps, costs: Costs) -> dict[str, float]:
    """Return the seconds that ``after`` saves against ``before``, by `PARTS`; they sum up to that of the wall times.

    The order is fixed: counts change at the costs of ``before``, then costs change at the counts of ``after``.
    """

    def less(name: str) -> float:
        return before.total(name) - after.total(name)

    again = costs.token * less("again") + costs.pair * less("pairs_again")
    steps_before, steps_after = costs.step[before.kind], costs.step[after.kind]
    requests_before, requests_after = costs.request[before.kind], costs.request[after.kind]
    return {
        "recomputation": again,
        "batches": steps_before * (len(before) - len(after)),
        "kv": costs.kv_token * less("kv_tokens"),
        "host": (steps_before - steps_after) * len(after)
        + requests_before * before.total("requests")
        - requests_after * after.total("requests"),
        "evictions": costs.eviction * less("evictions"),
        "tokens": costs.token * less("tokens") + costs.pair * less("pairs") - again,
        "rest": costs.rest_s(before) - costs.rest_s(after),
        "outside": before.outside_s - after.outside_s,
    }


def mean(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the parts' means over rounds, which still sum up to the mean difference."""
    return {name: sum(each[name] for each in parts) / len(parts) for name in PARTS}


def explained(steps: Steps, costs: Costs) -> float:
    """Return the share of the variance of a run's step times that the model explains (R²)."""
    seconds = steps.columns["seconds"]
    spread = float(((seconds - seconds.mean()) ** 2).sum())
    return 1.0 - float(((seconds - costs.predict(steps)) ** 2).sum()) / spread if spread else 1.0
