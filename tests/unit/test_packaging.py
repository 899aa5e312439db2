"""The package as users get it: metadata, entry points, what the wheel holds, and that importing it costs nothing."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from importlib.metadata import distribution, entry_points
from pathlib import Path

import numpy as np
import pytest

import nitro
from nitro import _native

ROOT = Path(__file__).resolve().parents[2]


def run(*command: str | Path, cwd: Path, **variables: str) -> str:
    """Run a command with nothing of this process's Python in its environment; return its stdout."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")} | variables
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}: {done.stdout[-2000:]}{done.stderr[-4000:]}"
    return done.stdout


def test_the_version_lives_in_one_place() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert nitro.__version__ == distribution("nitro-kv").version == declared
    assert f"## {declared}" in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.parametrize(
    ("group", "name", "value"),
    [
        ("vllm.general_plugins", "nitro", "nitro.plugin:register"),
        ("vllm.stat_logger_plugins", "nitro", "nitro.integration.vllm.stat_logger:NitroStatLogger"),
        ("console_scripts", "nitro", "nitro.cli:main"),
    ],
)
def test_entry_points_lead_somewhere(group: str, name: str, value: str) -> None:
    (found,) = (entry for entry in entry_points(group=group, name=name) if entry.module.startswith("nitro"))
    assert found.value == value
    assert callable(found.load())


def test_torch_and_vllm_are_not_required() -> None:
    """Pip must never replace the torch that vLLM was built for."""
    required = [line for line in distribution("nitro-kv").requires or [] if "extra ==" not in line]
    assert required, "the metadata lists no requirements at all"
    assert not [line for line in required if line.startswith(("torch", "vllm"))]


def test_the_extension_uses_no_streams() -> None:
    """A second libstdc++, which other packages may bring and export, numbers locales' facets anew: streams crash then.

    It did happen, beside a CUDA build of vLLM, in the first line that put a number into a stream.
    """
    binary = Path(_native.__file__).read_bytes()
    assert b"PyInit__native" in binary
    assert not re.findall(rb"_ZN[A-Za-z0-9]*(?:stream|locale|_ios|So|Si)[A-Za-z0-9_]*", binary)


def test_importing_nitro_loads_neither_torch_nor_vllm() -> None:
    code = "import sys, nitro, nitro.collector, nitro.ipc; print([m for m in ('torch', 'vllm') if m in sys.modules])"
    assert run(sys.executable, "-c", code, cwd=ROOT / "tests").strip() == "[]"


def test_kernels_are_packaged_under_nitro_only() -> None:
    found = run(sys.executable, "-c", "import nitro.kernels as k; print(k.__name__)", cwd=ROOT / "tests").strip()
    assert found == "nitro.kernels"
    assert not [f for f in distribution("nitro-kv").files or [] if f.parts[0] == "kernels"]


@pytest.mark.skipif(
    importlib.util.find_spec("scikit_build_core") is None or importlib.util.find_spec("pybind11") is None,
    reason="the build tools of the dev extra are not installed",
)
def test_sdist_to_wheel_to_a_working_install(tmp_path: Path) -> None:
    """The wheel is built from the unpacked sdist alone, and imported where nothing of the tree is installed."""
    build = "import sys, scikit_build_core.build as b; print(getattr(b, 'build_' + sys.argv[1])(sys.argv[2]))"
    sdist = run(sys.executable, "-c", build, "sdist", tmp_path, cwd=ROOT).splitlines()[-1]
    with tarfile.open(tmp_path / sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    source = tmp_path / sdist.removesuffix(".tar.gz")
    assert (source / "native/include/nitro/collector.hpp").exists()
    assert (source / "tests/unit/test_packaging.py").exists()
    assert not (source / ".venv").exists()

    wheel = run(sys.executable, "-c", build, "wheel", tmp_path, cwd=source).splitlines()[-1]
    with zipfile.ZipFile(tmp_path / wheel) as archive:
        names = archive.namelist()
    assert {"nitro/py.typed", "nitro/_native.pyi", "nitro/kernels/__init__.py"} <= set(names)
    assert [n for n in names if n.startswith("nitro/_native.") and n.endswith(".so")]
    assert [n for n in names if n.endswith("licenses/LICENSE")]
    assert {n.split("/")[0].split("-")[0] for n in names} == {"nitro", "nitro_kv"}, "nothing beside the package"
    assert not [n for n in names if n.endswith((".pyc", ".cpp", ".hpp", ".lib", ".a"))]
    tree = {str(path.relative_to(ROOT)) for path in (ROOT / "nitro").rglob("*.py")}
    assert tree <= set(names)

    venv.create(tmp_path / "venv", symlinks=True)
    site = next((tmp_path / "venv").glob("lib/python*/site-packages"))
    with zipfile.ZipFile(tmp_path / wheel) as archive:
        archive.extractall(site)
    for folder in Path(np.__file__).parent.parent.glob("numpy*"):  # the only dependency of what is imported here
        (site / folder.name).symlink_to(folder)
    code = (
        "import sys, types; sys.modules['nitro'] = package = types.ModuleType('nitro');"
        f"package.__path__ = [{str(site / 'nitro')!r}];"  # without nitro/__init__.py, which needs pydantic
        "from nitro.collector import Collector; import nitro._native, nitro.kernels;"
        "c = Collector(8, 4); c.check_integrity(); print(nitro._native.__file__, nitro.kernels.__file__)"
    )
    native, kernels = run(tmp_path / "venv/bin/python", "-c", code, cwd=tmp_path).split()
    assert Path(native).parent == site / "nitro"
    assert Path(kernels) == site / "nitro/kernels/__init__.py"
