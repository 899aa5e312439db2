"""Every kernel variant that the launchers may launch, so that all of them can be compiled ahead of time.

A kernel's variants follow from its launcher's choices (tile sizes, warps), so each launcher's module lists its own in a
function ``variants()``; ``MODULES`` says which modules have one.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

MODULES = (
    "nitro.kernels.select",
    "nitro.kernels._moves",
    "nitro.kernels.blocks",
    "nitro.kernels.newest",
    "nitro.kernels.pool",
    "nitro.kernels.shift",
    "nitro.kernels.score_slots",
    "nitro.kernels.score_mean",
    "nitro.kernels.score_gravity",
    "nitro.kernels.score_lagkv",
    "nitro.kernels.score_combine",
)


@dataclass(frozen=True, slots=True)
class Variant:
    """One specialisation of a jitted function.

    Attributes:
        name: unique among all variants.
        kernel: the jitted function.
        pointers: Triton types of its pointer parameters, e.g. ``{"scores": "*fp32"}``; taken as aligned to 16 bytes.
        constexprs: values of its constexpr parameters.
        num_warps: of a program.
        integers: types of its other parameters where they are not i32.
        divisible: integer parameters that launches give multiples of 16 (strides of rows).
        num_stages: of software pipelines.
        maxnreg: registers that a thread may take at most on an architecture; elsewhere the compiler decides.
    """

    name: str
    kernel: Any
    pointers: Mapping[str, str]
    constexprs: Mapping[str, Any]
    num_warps: int
    integers: Mapping[str, str] = field(default_factory=dict)
    divisible: tuple[str, ...] = ()
    num_stages: int = 3
    maxnreg: Mapping[int, int] = field(default_factory=dict)

    def compile(self, arch: int) -> Any:
        """Compile for a CUDA architecture, e.g. 89; needs neither a device nor its driver, nor TRITON_INTERPRET.

        Returns:
            Triton's CompiledKernel.
        """
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        names = self.kernel.arg_names
        signature = {
            name: "constexpr" if name in self.constexprs else self.pointers.get(name) or self.integers.get(name, "i32")
            for name in names
        }
        attrs = {
            (index,): [["tt.divisibility", 16]]
            for index, name in enumerate(names)
            if name in self.pointers or name in self.divisible
        }
        source = ASTSource(self.kernel, signature, {(names.index(n),): v for n, v in self.constexprs.items()}, attrs)
        options = {"num_warps": self.num_warps, "num_stages": self.num_stages, "maxnreg": self.maxnreg.get(arch)}
        return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


def all_variants() -> list[Variant]:
    """Return the variants of all launchers.

    Raises:
        ValueError: if two have one name.
    """
    found = [variant for module in MODULES for variant in importlib.import_module(module).variants()]
    if len({variant.name for variant in found}) != len(found):
        raise ValueError("two kernel variants have the same name")
    return found
