"""Compile all kernel variants for CUDA architectures and print what came of each, one JSON object a line.

A process of its own, without TRITON_INTERPRET: `python compile_variants.py ARCH...`. Its workers share one queue, so
that no core waits for another, and one set of imports.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from typing import Any

import triton

from nitro.kernels._triton.variants import Variant, all_variants

VARIANTS = all_variants()
_COPY = re.compile(r"cp\.async\.c[ag]\.shared\.global \[[^]]*\], \[[^]]*\], (\w+)")  # how many bytes


def outcome(variant: Variant, arch: int) -> dict[str, Any]:
    try:
        compiled = variant.compile(arch)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        usage = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    registers, stack, local = (int(re.search(rf"{name}:(\d+)", usage)[1]) for name in ("REG", "STACK", "LOCAL"))
    return {
        "shared": compiled.metadata.shared,
        "registers": registers,
        "spilled": stack + local,  # bytes: no kernel here has local arrays, so whatever is there has been spilled
        "accesses": sorted(set(re.findall(r"(?:ld|st)\.global[\w.]*", compiled.asm["ptx"]))),
        "copied": sorted({int(size, 0) for size in _COPY.findall(compiled.asm["ptx"])}),
    }


def line(job: tuple[int, int]) -> str:
    index, arch = job
    variant = VARIANTS[index]
    return json.dumps({"name": variant.name, "arch": arch} | outcome(variant, arch))


def main() -> None:
    # From the last on: those that score take longest, and what takes long should not come at the end.
    jobs = list(itertools.product(reversed(range(len(VARIANTS))), map(int, sys.argv[1:])))
    workers = len(os.sched_getaffinity(0))
    with multiprocessing.get_context("fork").Pool(workers) as pool:
        for text in pool.imap_unordered(line, jobs):
            print(text, flush=True)


if __name__ == "__main__":
    main()
