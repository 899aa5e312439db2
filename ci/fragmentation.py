#!/usr/bin/env python3
"""Fragmentation of `block`, `pack` and `fill` on the same run of a real model, and a picture of a block map.

    python ci/fragmentation.py MODEL [--requests 8] [--budget 160] [--slack 32] [--picture FILE] [--json FILE]

MODEL is a folder, such as the one that `nitro demo` keeps in ~/.cache/nitro/models. Each policy serves the demo's
questions on vLLM with Nitro, in one process, which records what each layer and KV head keeps; the three ways of giving
memory back are then accounted for from the same records (nitro/fragmentation.py).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from nitro.demo import block_map, texts
from nitro.fragmentation import MODES, Fragmentation, measure
from nitro.testing.matrix import BLOCK, POLICIES, Scenario, engine
from nitro.testing.recording import Recording
from nitro.types import KeepRecord


def prompts_of(model: Path, count: int) -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(model)
    return [list(tokenizer(prompt.text).input_ids) for prompt in texts.prompts(count)]


def serve(llm: Any, policy: str, prompts: list[list[int]], tokens: int) -> list[tuple[list[KeepRecord], int, int]]:
    """Return each request's evictions, the length of its prompt, and the tokens that were computed."""
    from vllm import SamplingParams

    llm.collective_rpc("nitro_set_policy", args=(policy,))
    llm.collective_rpc("nitro_record", args=(True,))
    sampling = SamplingParams(temperature=0.7, top_k=40, max_tokens=tokens, ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)
    recording = Recording.combine(llm.collective_rpc("nitro_take_recording"))
    found = []
    for output in outputs:
        records, runs = recording.of(output.request_id)
        if len(runs) != 1:
            raise SystemExit(f"request {output.request_id} was preempted: give the pool more blocks")
        prompt = len(output.prompt_token_ids)
        found.append((list(records[0]), prompt, prompt + len(output.outputs[0].token_ids) - 1))
    return found


def figures(lives: list[tuple[list[KeepRecord], int, int]]) -> dict[str, Any]:
    evictions = sum(len(records) for records, _, _ in lives)
    layers, heads, _ = lives[0][0][0].kept.shape
    row: dict[str, Any] = {"evictions": evictions}
    for mode in MODES:
        each = [measure(records, prompt, end, mode, BLOCK) for records, prompt, end in lives]
        total = sum(each, Fragmentation())
        row[mode] = {
            "overall": total.ratio,
            "least": min(one.ratio for one in each),
            "most": max(one.ratio for one in each),
            "moved_per_eviction": total.moved / evictions / (layers * heads),
        }
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128, help="generated for each request")
    parser.add_argument("--budget", type=int, default=160)
    parser.add_argument("--slack", type=int, default=32)
    parser.add_argument("--policy", action="append", choices=POLICIES, help="default: all")
    parser.add_argument("--picture", type=Path, help="the first request's block map under the last policy")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    prompts = prompts_of(arguments.model, arguments.requests)
    longest = max(map(len, prompts)) + arguments.tokens
    scenario = Scenario(
        "fragmentation",
        tuple(map(len, prompts)),
        arguments.tokens,
        chunk=512,
        blocks=arguments.requests * -(-longest // BLOCK) + 1,
        max_model_len=longest,
        settings={"budget": arguments.budget, "slack": arguments.slack},
    )
    rows, lives = {}, []
    with engine(arguments.model, scenario, "in-process", kv_cache_memory_bytes=2**30) as llm:
        for policy in arguments.policy or POLICIES:
            lives = serve(llm, policy, prompts, arguments.tokens)
            rows[policy] = figures(lives)
    bound = 1 + BLOCK / arguments.budget
    print(
        "\n| policy | evictions | block: overall | a request | pack, fill: overall | a request | moved: pack | fill |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for policy, row in rows.items():
        block, pack, fill = (row[mode] for mode in MODES)
        print(
            f"| {policy} | {row['evictions']} | {block['overall']:.2f} | {block['least']:.2f} to {block['most']:.2f} "
            f"| {fill['overall']:.3f} | {fill['least']:.3f} to {fill['most']:.3f} "
            f"| {pack['moved_per_eviction']:.0f} | {fill['moved_per_eviction']:.0f} |"
        )
    stitched = max(row[mode]["most"] for row in rows.values() for mode in ("pack", "fill"))
    print(f"\nallocated / live slots over the decode steps; stitched at most {stitched:.3f}, bound {bound:.3f}")
    if arguments.picture:
        first = lives[0][0][:1]
        layer = len(first[0].kept) // 2
        title = f"{policy}, budget {arguments.budget}: layer {layer}, KV head 0 of one request at its first eviction"
        block_map.draw(first, BLOCK, layer, 0, title, arguments.picture)
    if arguments.json:
        arguments.json.write_text(json.dumps({"bound": bound, "policies": rows}, indent=1))
    if stitched > bound:
        raise SystemExit(f"stitched blocks hold {stitched:.3f} slots for each live one, above {bound:.3f}")


if __name__ == "__main__":
    main()
