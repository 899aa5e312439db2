#!/usr/bin/env python3
"""A tournament of policies in simulation: what a model answers when each layer and KV head has lost other tokens.

    python ci/simulate_policies.py --out FILE.jsonl [--candidates nitro,simulated,kvpress,shared,unequal | NAMES]
        [--tasks needle-text,...] [--lengths 512] [--budgets 0.5,...] [--contexts 30] [--dtype bfloat16]
    python ci/simulate_policies.py --out FILE.jsonl --report
    bash ci/kvpress.sh --run ci/simulate_policies.py ...        # in the environment that has kvpress

Contexts, questions, answers and figures are those of `nitro eval`. A context is prefilled once by transformers, scored
by all candidates, evicted before the question is read, and question and answer are teacher-forced against what is left
in each (layer, KV head). FILE has a JSON line for each case, candidate and budget; what is there is not computed again.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "lib"))

import sim_calibration  # noqa: E402
import sim_candidates  # noqa: E402
import sim_counts  # noqa: E402
import sim_presses  # noqa: E402
import sim_report  # noqa: E402
import torch  # noqa: E402
from sim_candidates import Candidate  # noqa: E402
from sim_store import SimStore, read  # noqa: E402
from sim_tournament import Models, play  # noqa: E402

from nitro import policies  # noqa: E402
from nitro.demo import models  # noqa: E402
from nitro.errors import NitroError, SettingsError  # noqa: E402
from nitro.eval import tasks, texts  # noqa: E402
from nitro.eval.case import Case, Writer  # noqa: E402
from nitro.eval.settings import EvalSettings  # noqa: E402

NITRO = (
    "random",
    "streaming",
    "knorm",
    "vnorm",
    "keydiff",
    "gravity",
    "vdiff",
    "vdiff:radius=1",
    "vdiff:radius=2",
    "vdiff:radius=8",
    "kvdiff",
    "kvdiff:recency=0.25",
    "kvdiff:recency=0.5",
)
CALIBRATION = ROOT / "docs" / "architecture.md"
CALIBRATION_LENGTH = 512


def known_candidates(tables: sim_calibration.Tables | None) -> dict[str, Candidate]:
    """Return all candidates by their names; those with tables only where there are tables."""
    kvdiff, vdiff = policies.get("kvdiff").score, policies.get("vdiff").score
    smooth = sim_candidates.SCORES["avg2(kvdiff)"]
    found = [sim_candidates.nitro_candidate(label) for label in NITRO]
    found += [sim_candidates.simulated_candidate(name) for name in sim_candidates.SCORES]
    try:
        found += [sim_presses.press_candidate(name) for name in sim_presses.press_names()]
    except ImportError:
        print("kvpress is not here: its presses are left out (bash ci/kvpress.sh --run ci/simulate_policies.py)")
    found += [
        sim_counts.surprisal_candidate("A3: surprisal+vdiff", vdiff),
        sim_counts.surprisal_candidate("surprisal+avg2(kvdiff)", smooth),
        sim_counts.global_candidate(),
    ]
    if tables is not None:
        found += [
            sim_counts.table_candidate("table of D, kvdiff", tables.of_scores, kvdiff),
            sim_counts.table_candidate("table of D, avg2(kvdiff)", tables.of_scores, smooth),
            sim_counts.table_candidate("table of attention, kvdiff", tables.of_attention, kvdiff),
            sim_counts.table_candidate("table of attention, avg2(kvdiff)", tables.of_attention, smooth),
        ]
    return {candidate.name: candidate for candidate in found}


def chosen(known: dict[str, Candidate], wanted: str) -> list[Candidate]:
    """Return the candidates of a list of kinds and names, which are separated by semicolons."""
    found: dict[str, Candidate] = {}
    for part in filter(None, (one.strip() for one in wanted.split(";"))):
        of = {name: one for name, one in known.items() if part in (name, one.kind)}
        if not of:
            raise SettingsError(f"unknown candidate {part!r}: give kinds or names of {'; '.join(known)}")
        found |= of
    return list(found.values())


def shortened(case: Case, continuation: int) -> Case:
    """Return a case of ``perplexity`` with the first tokens of its continuation only."""
    return Case(case.name, case.context, case.question, case.answer[:continuation], case.depth)


def load(path: Path, dtype: str) -> Models:
    """Return the model in its dtype, and in float32."""
    from transformers import AutoModelForCausalLM

    with models.quiet_transformers():
        scorer = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        reader = scorer if dtype == "float32" else AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
    sim_presses.give_rotary_embedding(scorer)
    return Models(reader, scorer)


def run(options: argparse.Namespace) -> None:
    """Play the tournament."""
    from transformers import AutoTokenizer

    path = options.model or models.ensure_model(print)
    made = EvalSettings(
        tasks=tuple(options.tasks.split(",")),
        lengths=tuple(map(int, options.lengths.split(","))),
        budgets=tuple(map(float, options.budgets.split(","))),
        contexts=options.contexts,
        seed=options.seed,
    )
    manifest: dict[str, Any] = {
        "model": path.name,
        "dtype": options.dtype,
        "contexts": options.contexts,
        "seed": options.seed,
        "continuation": options.continuation,
        "calibration": hashlib.sha256(options.calibration.read_bytes()).hexdigest()[:12],
    }
    store = SimStore(options.out, manifest)
    tokenizer = AutoTokenizer.from_pretrained(path)
    both = load(path, options.dtype)
    names = known_candidates(None)
    tables = None
    if "unequal" in options.candidates or "table" in options.candidates:
        writer = Writer(tokenizer, texts.sentences(options.calibration))
        tables = sim_calibration.calibrate(both.reader, writer, made.budgets, CALIBRATION_LENGTH, options.seed)
        names = known_candidates(tables)
    candidates = chosen(names, options.candidates)
    writer = Writer(tokenizer, texts.sentences(None))
    for length in made.lengths:
        for task in made.tasks:
            cases = tasks.cases(task, length, made, writer)[options.every // 2 :: options.every]
            if task == "perplexity":
                cases = [shortened(case, options.continuation) for case in cases]
            started, total = time.monotonic(), 0
            for rows in play(
                both, cases, {"task": task, "length": length}, candidates, made.budgets, store, options.seed
            ):
                total += rows
            print(f"{task} {length}: {total} rows in {time.monotonic() - started:.0f} s", flush=True)


def report(options: argparse.Namespace) -> None:
    """Print the tables."""
    _, rows = read(options.out)
    for part in (*sim_report.standings(rows), *sim_report.tables(rows)):
        print(part + "\n")
    print("| context | kept | best of ours | best of kvpress | exact, difference [95 %] | NLL, difference [95 %] |")
    print("| --- | --- | --- | --- | --- | --- |")
    for ours in ("nitro", "nitro+simulated", "unequal"):
        for line in sim_report.rivals(rows, ours, "kvpress"):
            print(line)
    for line in sim_report.rivals(rows, "unequal", "nitro+simulated"):
        print(line)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="JSON lines; what it has is not computed again")
    parser.add_argument("--report", action="store_true", help="print the tables of FILE, and compute nothing")
    parser.add_argument("--model", type=Path, help="folder of transformers (default: the demo's SmolLM2-135M)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--tasks", default="needle-text,needle-word,needle-keys,dictionary,perplexity")
    parser.add_argument("--lengths", default="512")
    parser.add_argument("--budgets", default="0.5,0.25,0.165,0.125")
    parser.add_argument("--contexts", type=int, default=30)
    parser.add_argument("--every", type=int, default=1, help="play only every n-th context, to choose finalists")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--continuation", type=int, default=64, help="tokens that perplexity scores, at most 256")
    parser.add_argument("--candidates", default="nitro;simulated;kvpress;shared;unequal", help="kinds or names, by ;")
    parser.add_argument("--calibration", type=Path, default=CALIBRATION, help="text that the tables are made from")
    options = parser.parse_args()
    try:
        report(options) if options.report else run(options)
    except NitroError as error:
        raise SystemExit(f"simulate_policies: {error}") from error


if __name__ == "__main__":
    main()
