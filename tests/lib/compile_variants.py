"""Compile all kernel variants for one CUDA architecture and print what came of each, one JSON object a line.

A process of its own, without TRITON_INTERPRET: `python compile_variants.py ARCH`.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from typing import Any

import triton

from nitro.kernels._triton.variants import Variant, all_variants


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
    }


def main() -> None:
    arch = int(sys.argv[1])
    for variant in all_variants():
        print(json.dumps({"name": variant.name, "arch": arch} | outcome(variant, arch)), flush=True)


if __name__ == "__main__":
    main()
