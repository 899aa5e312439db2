#!/usr/bin/env python3
"""What folding evicted tokens into survivors does to a small model's answers: a simulation in plain PyTorch.

    python ci/simulate_pooling.py --out FILE.jsonl [--lengths 512] [--budgets 0.25] [--variants none,mean,...]

Contexts, questions, answers and figures are those of `nitro eval`; a context is prefilled once, evicted per layer and
KV head with Nitro's own policies, and the same survivors are read plain and with each way of pooling. A JSON line for
each case, policy, budget and variant; lines that FILE has already are not computed again. Tables: --report.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "lib"))

import pooling_variants as variants  # noqa: E402
from pooling_model import Reader, stacked  # noqa: E402

from nitro import policies  # noqa: E402
from nitro.demo import models  # noqa: E402
from nitro.eval import texts  # noqa: E402
from nitro.eval.case import Case, Writer  # noqa: E402
from nitro.eval.results import mean, wilson  # noqa: E402
from nitro.eval.settings import SINKS, WINDOW, EvalSettings  # noqa: E402
from nitro.eval.tasks import cases  # noqa: E402
from nitro.kernels.select import select_topk_ref  # noqa: E402
from nitro.policies.base import ScoreInput  # noqa: E402

TAPS = 32
Pool = Callable[[variants.Context, Tensor], variants.Survivors]
merge = partial(partial, variants.merge)
fit = partial(partial, variants.fit)
VARIANTS: dict[str, Pool] = {
    "none": variants.stripped,
    "mean": merge(),
    "mean-cached": merge(undone=False),
    "mean-0.5": merge(least=0.5),
    "mean-0.7": merge(least=0.7),
    "mean-0.8": merge(least=0.8),
    "mean-0.9": merge(least=0.9),
    "mean-cached-0.8": merge(undone=False, least=0.8),
    "mean-cached-0.9": merge(undone=False, least=0.9),
    "blend": merge(power=1.0),
    "blend-8": merge(power=8.0),
    "blend-16": merge(power=16.0),
    "own-8": merge(own=8.0),
    "own-8-0.8": merge(own=8.0, least=0.8),
    "own-8-cached-0.8": merge(own=8.0, least=0.8, undone=False),
    "sum": merge(mass="sum"),
    "sum-0.8": merge(mass="sum", least=0.8),
    "share": merge(mass="share"),
    "share-0.8": merge(mass="share", least=0.8),
    "bias": merge(mass="bias"),
    "bias-0.8": merge(mass="bias", least=0.8),
    "bias-0.9": merge(mass="bias", least=0.9),
    "keys": merge(merge_keys=True),
    "keys-0.8": merge(merge_keys=True, least=0.8),
    "keys-bias": merge(merge_keys=True, mass="bias"),
    "shift": variants.shift,
    "fit-0.001": fit(ridge=0.001),
    "fit-0.01": fit(ridge=0.01),
    "fit-0.1": fit(ridge=0.1),
    "fit-1": fit(ridge=1.0),
    "fit-10": fit(ridge=10.0),
    "fit-0.1-16": fit(ridge=0.1, taps=16),
    "fit-0.1-seen": fit(ridge=0.1, ahead=False),
    "fit-1-seen": fit(ridge=1.0, ahead=False),
    "fit-1-mean-0.8": fit(ridge=1.0, start=merge(least=0.8)),
    "fit-0.1-mean-0.9": fit(ridge=0.1, start=merge(least=0.9)),
}
"""What follows a dash is the least cosine, or the ridge and the taps."""
ROUNDS: dict[str, dict[str, float] | None] = {
    "rounds-none": None,
    "rounds-mean": {"own": 1.0, "least": -1.0},
    "rounds-mean-0.8": {"own": 1.0, "least": 0.8},
    "rounds-own-8-0.8": {"own": 8.0, "least": 0.8},
    "rounds-own-8-0.8-most-16": {"own": 8.0, "least": 0.8, "most": 16},
}
"""The same survivors' number, but evicted every 32 tokens, as while serving: what was pooled is pooled again."""


def score_by(
    policy: str, x: variants.Context, keys: Tensor, values: Tensor, positions: Tensor, logical_len: int
) -> Tensor:
    """Return a policy's scores ``[L, H, N]`` of some of a context's tokens."""
    layers, heads = keys.shape[:2]
    return policies.get(policy).score(
        ScoreInput(
            keys=keys,
            values=values,
            positions=positions,
            layers=torch.arange(layers),
            heads=torch.arange(heads),
            request_key=0,
            logical_len=logical_len,
            sinks=SINKS,
            window=WINDOW,
            seed=0,
            rotations=(x.rotation,) * layers,
        )
    )


def pooled_by(policy: str, x: variants.Context, keep: int, names: list[str]) -> list[tuple[variants.Survivors, float]]:
    """Return what each variant leaves of a context, and how far its values are spread."""
    length, score = x.keys.shape[2], partial(score_by, policy, x)
    every = torch.arange(length, dtype=torch.int32).expand(x.keys.shape[:3])
    kept = select_topk_ref(score(x.keys, x.values, every, length), keep, SINKS, WINDOW)
    found = []
    for name in names:
        if name in ROUNDS:
            pooled, stays = variants.in_rounds(x, score, keep, window=WINDOW, merging=ROUNDS[name])
        else:
            pooled, stays = VARIANTS[name](x, kept), kept
        found.append((pooled, variants.spread(pooled.values, variants.rows(x.values, stays))))
    return found


def simulate(reader: Reader, task: str, length: int, case: Case, wanted: list[tuple[str, float, str]]) -> Iterator[Any]:
    """Yield a line for each (policy, budget, variant) of a case, and first one for the full cache."""
    context, last = reader.prefill(case.context)
    whole = stacked([variants.stripped(context, torch.arange(len(case.context)).expand(context.keys.shape[:3]))])
    passed: list[Any] = []
    (answer,) = reader.read(case, last, whole, passed)
    line = {"task": task, "length": length, "case": case.name}
    yield line | {"policy": "full", "budget": 1.0, "variant": "none", **answer._asdict()}
    groups: dict[tuple[str, float], list[str]] = defaultdict(list)
    for policy, budget, variant in wanted:
        groups[policy, budget].append(variant)
    for (policy, budget), names in groups.items():
        found = pooled_by(policy, context, round(budget * len(case.context)), names)
        pooled = stacked([one for one, _ in found])
        answers = reader.read(case, last, pooled)
        errors = reader.output_errors(passed, whole, pooled)
        for name, (_, spread), answered, error in zip(names, found, answers, errors.tolist(), strict=True):
            figures = {**answered._asdict(), "spread": spread, "errors": [round(one, 5) for one in error]}
            yield line | {"policy": policy, "budget": budget, "variant": name, **figures}


def report(lines: list[dict[str, Any]]) -> Iterator[str]:
    """Yield tables: each variant against no pooling (otherwise the first), on the same cases."""
    full = {one["case"]: one for one in lines if one["policy"] == "full"}
    cells: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = defaultdict(lambda: defaultdict(dict))
    for one in lines:
        if one["policy"] != "full":
            key = one["task"], one["length"], one["policy"], one["budget"]
            cells[key][one["variant"]][one["case"]] = one
    for (task, length, policy, budget), by in cells.items():
        base = by["none" if "none" in by else next(iter(by))]
        of = [full[case] for case in base]
        exact_full = sum(one["exact"] for one in of) / len(of)
        yield (
            f"\n**{task}, {length:,} tokens, {policy} at {budget:.1%}: {len(base)} cases.** Full cache: exact "
            f"{exact_full:.2f}, NLL {mean([one['nll'] for one in of]).value:.3f}\n"
        )
        yield "| pooling | exact [95 %] | NLL | over none [95 %] | output error | over none, median layer | spread |"
        yield "|---|---|---|---|---|---|---|"
        for name, found in by.items():
            rows = list(found.values())
            share = wilson(sum(one["exact"] for one in rows), len(rows))
            over = mean([one["nll"] - base[case]["nll"] for case, one in found.items()])
            error = torch.tensor([one["errors"] for one in rows])
            ratio = (error.mean(0) / torch.tensor([base[case]["errors"] for case in found]).mean(0)).median()
            yield (
                f"| {name} | {share.value:.2f} [{share.low:.2f}, {share.high:.2f}] "
                f"| {mean([one['nll'] for one in rows]).value:.3f} "
                f"| {over.value:+.3f} [{over.low:+.3f}, {over.high:+.3f}] | {error.mean():.3f} | {ratio:.2f} "
                f"| {sum(one.get('spread', math.nan) for one in rows) / len(rows):.2f} |"
            )


def listed(kind: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    return lambda text: [kind(part) for part in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", type=Path, help="a Llama's folder; default: SmolLM2-135M-Instruct, fetched")
    parser.add_argument("--tasks", type=listed(str), default=["needle-text", "dictionary", "perplexity"])
    parser.add_argument("--lengths", type=listed(int), default=[512])
    parser.add_argument("--contexts", type=int, default=30)
    parser.add_argument("--policies", type=listed(str), default=["kvdiff", "vdiff", "keydiff"])
    parser.add_argument("--budgets", type=listed(float), default=[0.5, 0.25, 0.165])
    parser.add_argument("--variants", type=listed(str), default=list(VARIANTS))
    parser.add_argument("--report", action="store_true", help="print tables of what FILE has, and run nothing")
    arguments = parser.parse_args()
    found = []
    if arguments.out.exists():
        found = [json.loads(line) for line in arguments.out.read_text(encoding="utf-8").splitlines()]
    if arguments.report:
        print(*report(found), sep="\n")
        return
    unknown = set(arguments.variants) - set(VARIANTS) - set(ROUNDS)
    if unknown:
        parser.error(f"--variants: {', '.join(sorted(unknown))} are not among {', '.join([*VARIANTS, *ROUNDS])}")
    settings = EvalSettings(
        tasks=tuple(arguments.tasks),
        lengths=tuple(arguments.lengths),
        budgets=tuple(arguments.budgets),
        policies=tuple(arguments.policies),
        contexts=arguments.contexts,
    )
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = arguments.model or models.ensure_model(print)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    reader = Reader(model, TAPS, SINKS)
    writer = Writer(AutoTokenizer.from_pretrained(folder), texts.sentences(None))
    there = {(one["case"], one["policy"], one["budget"], one["variant"]) for one in found}
    with arguments.out.open("a", encoding="utf-8") as out:
        for length in settings.lengths:
            for task in settings.tasks:
                for case in cases(task, length, settings, writer):
                    wanted = [
                        (policy, budget, variant)
                        for policy in arguments.policies
                        for budget in settings.budgets
                        for variant in arguments.variants
                        if (case.name, policy, budget, variant) not in there
                    ]
                    if not wanted:
                        continue
                    for line in simulate(reader, task, length, case, wanted):
                        if (case.name, line["policy"], line["budget"], line["variant"]) not in there:
                            print(json.dumps(line), file=out, flush=True)


if __name__ == "__main__":
    main()
