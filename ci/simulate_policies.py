#!/usr/bin/env python3
"""A tournament of policies in simulation: what a model answers when each layer and KV head has lost other tokens.

    python ci/simulate_policies.py --out FILE.jsonl [--candidates nitro,simulated,kvpress,shared,unequal | NAMES]
        [--tasks needle-text,...] [--lengths 512] [--budgets 0.5,...] [--contexts 30] [--dtype bfloat16]
    python ci/simulate_policies.py --out FILE.jsonl --report [MORE.jsonl ...]
    python ci/simulate_policies.py --out FILE.jsonl --compare FOLDER  # case by case with what `nitro eval` wrote
    bash ci/kvpress.sh --run ci/simulate_policies.py ...        # in the environment that has kvpress

Contexts, questions, answers and figures are those of `nitro eval`. A context is prefilled once by transformers, scored
by all candidates, evicted before the question is read, and question and answer are teacher-forced against what is left
in each (layer, KV head). FILE has a JSON line for each case, candidate and budget; what is there is not computed again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
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
from sim_store import SimStore, key_of, read  # noqa: E402
from sim_tournament import Entry, Models, play  # noqa: E402

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
    "kvdiff:radius=0:recency=0",
    "kvdiff:radius=0",
    "kvdiff:recency=0",
    "kvdiff:radius=0:recency=0.5",
)
INNER = ("avg2(kvdiff)", "avg4(κ)", "r(κ)+r(avg4 δ)")
"""Simulated scores that also choose what stays of a head where something else has set its count."""
CANDIDATES = "kinds (nitro, simulated, kvpress, shared, unequal) or names, separated by ;, each maybe with @0.5/0.25"
CALIBRATION = ROOT / "docs" / "architecture.md"
CALIBRATION_LENGTH = 512


def known_candidates(tables: sim_calibration.Tables | None) -> dict[str, Candidate]:
    """Return all candidates by their names; those with tables only where there are tables."""
    found = [sim_candidates.nitro_candidate(label) for label in NITRO]
    found += [sim_candidates.simulated_candidate(name) for name in sim_candidates.SCORES]
    try:
        found += [sim_presses.press_candidate(name) for name in sim_presses.press_names()]
    except ImportError:
        print("kvpress is not here: its presses are left out (bash ci/kvpress.sh --run ci/simulate_policies.py)")
    inner = {"vdiff": policies.get("vdiff").score, "kvdiff": policies.get("kvdiff", radius=0, recency=0.0).score}
    inner |= {name: sim_candidates.SCORES[name] for name in INNER}
    found += [sim_counts.surprisal_candidate(f"surprisal, {name}", score) for name, score in inner.items()]
    found += [sim_counts.global_candidate(radius) for radius in (0, 4)]
    if tables is not None:
        for name, score in inner.items():
            found.append(sim_counts.table_candidate(f"table of D, {name}", tables.of_scores, score))
            found.append(sim_counts.table_candidate(f"table of attention, {name}", tables.of_attention, score))
    return {candidate.name: candidate for candidate in found}


def chosen(known: dict[str, Candidate], wanted: str, budgets: tuple[float, ...]) -> list[Entry]:
    """Return the candidates of a list of kinds and names, each with its budgets, as `--candidates` is written."""
    found: dict[str, Entry] = {}
    for part in filter(None, (one.strip() for one in wanted.split(";"))):
        what, at, own = part.partition("@")
        of = {name: one for name, one in known.items() if what in (name, one.kind)}
        if not of:
            raise SettingsError(f"unknown candidate {what!r}: give kinds or names of {'; '.join(known)}")
        shares = tuple(map(float, own.split("/"))) if at else budgets
        found |= {name: (one, shares) for name, one in of.items()}
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
    entries = chosen(names, options.candidates, made.budgets)
    writer = Writer(tokenizer, texts.sentences(None))
    for length in made.lengths:
        for task in made.tasks:
            cases = tasks.cases(task, length, made, writer)[options.skip :: options.every]
            if task == "perplexity":
                cases = [shortened(case, options.continuation) for case in cases]
            started, total = time.monotonic(), 0
            for rows in play(both, cases, {"task": task, "length": length}, entries, store, options.seed):
                total += rows
            print(f"{task} {length}: {total} rows in {time.monotonic() - started:.0f} s", flush=True)


def report(options: argparse.Namespace) -> None:
    """Print the tables."""
    rows = {}
    for path in (options.out, *options.report):
        manifest, more = read(path)
        if manifest != read(options.out)[0]:
            raise SettingsError(f"{path} was made with other settings than {options.out}: report on it by itself")
        rows |= {key_of(row): row for row in more}
    found = list(rows.values())
    for part in (*sim_report.standings(found), *sim_report.tables(found)):
        print(part + "\n")
    for part in sim_report.versus(found, options.against):
        print(part + "\n")


def compare(options: argparse.Namespace) -> None:
    """Say in how many cases the simulation agrees with `nitro eval`, cell by cell."""
    path = options.compare / "results.jsonl"
    try:
        served = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError) as error:
        raise SettingsError(f"{path} cannot be read: {error}: give the --out of `nitro eval`") from error
    _, rows = read(options.out)
    for cell, one in sim_report.agreement(rows, served).items():
        print(f"{cell}: {one.same} of {one.cases} exact alike, NLL apart by at most {one.apart:.4f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="JSON lines; what it has is not computed again")
    parser.add_argument(
        "--report", type=Path, nargs="*", help="print the tables of --out, and of these files with it; compute nothing"
    )
    parser.add_argument("--against", default="keydiff", help="candidate that --report compares the others with")
    parser.add_argument("--compare", type=Path, help="the --out of `nitro eval` with the same contexts and seed")
    parser.add_argument("--model", type=Path, help="folder of transformers (default: the demo's SmolLM2-135M)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--tasks", default="needle-text,needle-word,needle-keys,dictionary,perplexity")
    parser.add_argument("--lengths", default="512")
    parser.add_argument("--budgets", default="0.5,0.25,0.165,0.125")
    parser.add_argument("--contexts", type=int, default=30)
    parser.add_argument("--every", type=int, default=1, help="play only every n-th context, to choose finalists")
    parser.add_argument("--skip", type=int, default=0, help="begin with the n-th context, counted from 0")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--continuation", type=int, default=64, help="tokens that perplexity scores, at most 256")
    parser.add_argument("--candidates", default="nitro;simulated;kvpress;shared;unequal", help=CANDIDATES)
    parser.add_argument("--calibration", type=Path, default=CALIBRATION, help="text that the tables are made from")
    options = parser.parse_args()
    try:
        if options.report is not None:
            report(options)
        elif options.compare is not None:
            compare(options)
        else:
            run(options)
    except NitroError as error:
        raise SystemExit(f"simulate_policies: {error}") from error


if __name__ == "__main__":
    main()
