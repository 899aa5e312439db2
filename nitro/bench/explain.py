"""From recorded runs to an explanation: the parts of the gain, where a step's time goes, and the roofline beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import fmean
from typing import Any

from rich import box
from rich.table import Table

from nitro.bench.attribution import PARTS, Costs, Steps, explained, fit, mean, split
from nitro.bench.plan import Engine, Plan
from nitro.bench.recorder import SECTIONS
from nitro.bench.results import Found

STOCK_TIGHT, STOCK_AMPLE, NITRO_AMPLE, NITRO_TIGHT = "stock, tight", "stock, ample", "nitro, ample", "nitro, tight"
STOCK_FP8 = "stock fp8, tight"
WAY = (STOCK_TIGHT, STOCK_AMPLE, NITRO_AMPLE, NITRO_TIGHT)
"""The engines of the attribution, in order; FP8 is a rival beside them."""
_REST = "loop"
_LABELS = {
    "scheduler": "scheduler: schedule, book tokens",
    "nitro_scheduler": "Nitro's own work in the scheduler",
    "nitro_worker": "Nitro's own work in the worker",
    "preparation": "runner: preparation of a step",
    "forward": "forward pass (on a GPU: its launch)",
    "attention": "attention (on a CPU)",
    "sampler": "sampler",
    "runner": "runner: the rest",
    "waiting": "waiting for the device",
    "instrument": "this measurement itself",
    _REST: "engine loop and front-end",
}


@dataclass(frozen=True)
class Explained:
    """The attribution of all rounds.

    Attributes:
        arrows: for each step of the way, and for all of it, the mean seconds saved, by part.
        ranges: of all of it, by part, the least and the most of the rounds.
        costs: fitted, of each round.
        fits: share of the variance explained (R²), by engine, of each round.
        rounds: how many rounds are in it.
        wall_s: mean wall time of stock in the tight pool.
    """

    arrows: dict[str, dict[str, float]]
    ranges: dict[str, tuple[float, float]]
    costs: tuple[Costs, ...]
    fits: dict[str, tuple[float, ...]]
    rounds: int
    wall_s: float


def kind_of(engine: Engine) -> str:
    """Return which host costs an engine has."""
    return "stock" if engine.nitro is None else "nitro"


def explain(plan: Plan, found: Found) -> Explained | None:
    """Return the attribution over the rounds that have all four engines; None if there is none yet."""
    kinds = {engine.name: kind_of(engine) for engine in plan.engines}
    by = {name: {run["round"]: run for run in found[name]} for name in WAY}
    numbers = sorted(set.intersection(*(set(of) for of in by.values())))
    if not numbers:
        return None
    costs, fits, parts = [], {name: [] for name in WAY}, {name: [] for name in (*_arrows(), "all")}  # type: ignore[var-annotated]
    for number in numbers:
        steps = {name: Steps.of(kinds[name], by[name][number]) for name in WAY}
        fitted = fit(list(steps.values()))
        costs.append(fitted)
        for name in WAY:
            fits[name].append(explained(steps[name], fitted))
        for arrow, (before, after) in _arrows().items():
            parts[arrow].append(split(steps[before], steps[after], fitted))
        # Costs of a step change within the way, at counts of their own: the whole is the sum of its arrows.
        parts["all"].append({part: sum(parts[arrow][-1][part] for arrow in _arrows()) for part in PARTS})
    ranges = {part: (min(each), max(each)) for part in PARTS if (each := [of[part] for of in parts["all"]])}
    return Explained(
        {arrow: mean(of) for arrow, of in parts.items()},
        ranges,
        tuple(costs),
        {name: tuple(of) for name, of in fits.items()},
        len(numbers),
        fmean(by[STOCK_TIGHT][number]["seconds"] for number in numbers),
    )


def _arrows() -> dict[str, tuple[str, str]]:
    return {f"{before} → {after}": (before, after) for before, after in pairwise(WAY)}


def attribution_table(made: Explained) -> Table:
    """Return where the seconds come from that each step of the way saves."""
    table = Table(
        title="Seconds saved, by cause (negative: lost)",
        caption=f"Means of {made.rounds} round{'s' * (made.rounds != 1)}; columns sum up to the differences of wall "
        "times. docs/bench.md says what each cause means and where it misleads.",
        box=box.SIMPLE_HEAD,
    )
    table.add_column("")
    for arrow in made.arrows:
        table.add_column("all of it" if arrow == "all" else arrow.replace(" → ", "\n→ "), justify="right")
    table.add_column("% of stock's wall", justify="right")
    table.add_column("rounds", justify="right")
    for part, label in PARTS.items():
        values = [of[part] for of in made.arrows.values()]
        low, high = made.ranges[part]
        spread = f"{low:+.2f} to {high:+.2f}" if made.rounds > 1 else ""
        table.add_row(label, *(f"{value:+.2f}" for value in values), f"{100 * values[-1] / made.wall_s:+.1f}", spread)
    table.add_section()
    sums = [sum(of.values()) for of in made.arrows.values()]
    table.add_row(
        "the whole", *(f"{value:+.2f}" for value in sums), f"{100 * sums[-1] / made.wall_s:+.1f}", "", style="bold"
    )
    return table


def shares(run: Mapping[str, Any]) -> dict[str, float]:
    """Return the seconds of a recorded run by section; what no timer saw is ``loop``."""
    columns = run["recording"]["columns"]
    found = {section: float(sum(columns[f"{section}_s"])) for section in SECTIONS}
    return {**found, _REST: float(sum(columns["seconds"])) - sum(found.values())}


def device_times(run: Mapping[str, Any]) -> dict[str, float]:
    """Return what CUDA events say: ms of a forward pass, and attention's share of it in the steps that show it."""
    forward, attention = (run["recording"]["device"][key] for key in ("forward", "attention"))
    made = {}
    if forward["ms"]:
        made["forward_ms"] = sum(forward["ms"]) / len(forward["ms"])
    of = dict(zip(forward["steps"], forward["ms"], strict=True))
    both = [(ms, of[step]) for step, ms in zip(attention["steps"], attention["ms"], strict=True) if step in of]
    if both:
        made["attention_share"] = sum(ms for ms, _ in both) / sum(whole for _, whole in both)
        made["attention_steps"] = float(len(both))
    return made


def shares_table(plan: Plan, found: Found) -> Table:
    """Return the milliseconds of a step by what the host does in it, and what the device says, over all rounds."""
    table = Table(
        title="A step's time on the host, ms (share)",
        caption="Each row without what another row counts. On a GPU the host does not wait for what it launches.",
        box=box.SIMPLE_HEAD,
    )
    table.add_column("")
    engines = [engine.name for engine in plan.engines if found[engine.name]]
    cells: dict[str, list[str]] = {label: [] for label in (*_LABELS.values(), "a step")}
    device: dict[str, list[str]] = {"forward pass on the GPU": [], "attention's share of it, where it shows": []}
    for name in engines:
        table.add_column(name, justify="right")
        runs = found[name]
        steps = sum(len(run["recording"]["columns"]["seconds"]) for run in runs)
        sums = [shares(run) for run in runs]
        whole = sum(sum(each.values()) for each in sums)
        for section, label in _LABELS.items():
            seconds = sum(each[section] for each in sums)
            cells[label].append(f"{1e3 * seconds / steps:.3f} ({seconds / whole:.0%})")
        cells["a step"].append(f"{1e3 * whole / steps:.3f}")
        times = [device_times(run) for run in runs]
        forward = [each["forward_ms"] for each in times if "forward_ms" in each]
        attention = [each["attention_share"] for each in times if "attention_share" in each]
        device["forward pass on the GPU"].append(f"{sum(forward) / len(forward):.3f}" if forward else "")
        device["attention's share of it, where it shows"].append(
            f"{sum(attention) / len(attention):.0%}" if attention else ""
        )
    for label, row in cells.items():
        table.add_row(label, *row, style="bold" if label == "a step" else None)
    table.add_section()
    for label, row in device.items():
        if any(row):
            table.add_row(label, *row)
    return table


def roofline(plan: Plan, engine: Engine, run: Mapping[str, Any]) -> dict[str, float]:
    """Return the bytes that a run has to read at least, and how long that takes at the speed of a copy.

    Weights are read once a step, the keys and values of each decoding request once in each of its steps. A prompt's own
    are left out: many of its tokens share one reading.
    """
    columns = run["recording"]["columns"]
    weights = len(columns["seconds"]) * plan.model.read_parameters() * plan.itemsize
    kv = sum(columns["kv_tokens"]) * plan.model.kv_bytes(1 if engine.fp8 else plan.itemsize)
    seconds = (weights + kv) / run["copy_bytes_per_s"]
    return {"weight_bytes": weights, "kv_bytes": kv, "seconds": seconds, "share": seconds / run["seconds"]}


def roofline_table(plan: Plan, found: Found) -> Table:
    """Return the least time for the bytes that each engine reads, beside what it took; means over the rounds."""
    copies = [run["copy_bytes_per_s"] for runs in found.values() for run in runs]
    table = Table(
        title=f"Roofline at the copy bandwidth measured before the runs, {_span(copies, 1e-9, 'GB/s')}",
        box=box.SIMPLE_HEAD,
    )
    for name in ("", "weights read, TB", "KV read, TB", "at least, s", "took, s", "share", "tokens/s at the roof"):
        table.add_column(name, justify="right" if name else "left")
    for engine in plan.engines:
        runs = found[engine.name]
        if not runs:
            continue
        each = [roofline(plan, engine, run) for run in runs]
        weights, kv, least, share = (
            sum(of[key] for of in each) / len(each) for key in ("weight_bytes", "kv_bytes", "seconds", "share")
        )
        tokens = plan.loads[0].requests * plan.loads[0].answer
        took = sum(run["seconds"] for run in runs) / len(runs)
        cells = (f"{weights / 1e12:.2f}", f"{kv / 1e12:.2f}", f"{least:.1f}", f"{took:.1f}", f"{share:.0%}")
        table.add_row(engine.name, *cells, f"{tokens / least:,.0f}")
    return table


def costs_lines(plan: Plan, made: Explained) -> list[str]:
    """Return the fitted costs for people, each as the rounds' range."""
    kv = plan.model.kv_bytes(plan.itemsize)
    speeds = [kv / costs.kv_token for costs in made.costs if costs.kv_token > 0]
    lines = [
        f"{kind}: {_span([c.step[kind] for c in made.costs], 1e3, 'ms')} a step and "
        f"{_span([c.request[kind] for c in made.costs], 1e6, 'µs')} for each request in it"
        for kind in ("stock", "nitro")
    ]
    hidden = "costs nothing: it hides behind other work" if not speeds else ""
    lines.append(f"a token computed: {_span([c.token for c in made.costs], 1e6, 'µs')}")
    lines.append(
        "reading a token's KV: "
        + (hidden or f"{_span([c.kv_token for c in made.costs], 1e9, 'ns')}, as if at {_span(speeds, 1e-9, 'GB/s')}")
    )
    lines.append(f"an eviction: {_span([c.eviction for c in made.costs], 1e6, 'µs')}")
    lines.append(
        "explained variance of step times (R²): "
        + ", ".join(f"{name} {_span(values, 1, '')}".strip() for name, values in made.fits.items())
    )
    return lines


def _span(values: Sequence[float], scale: float, unit: str) -> str:
    low, high = scale * min(values), scale * max(values)
    return f"{low:.3g} {unit}" if f"{low:.3g}" == f"{high:.3g}" else f"{low:.3g} to {high:.3g} {unit}"


def to_dict(plan: Plan, made: Explained | None, found: Found) -> dict[str, Any]:
    """Return all of it as JSON-able values."""
    engines = [engine for engine in plan.engines if found[engine.name]]
    return {
        "attribution": None if made is None else asdict(made),
        "sections_s": {engine.name: [shares(run) for run in found[engine.name]] for engine in engines},
        "device": {engine.name: [device_times(run) for run in found[engine.name]] for engine in engines},
        "roofline": {engine.name: [roofline(plan, engine, run) for run in found[engine.name]] for engine in engines},
    }
