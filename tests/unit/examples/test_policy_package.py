"""The example of a policy outside of Nitro: pip installs it, and vLLM serves a model with it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[3] / "examples/policy-package"
SERVE = """
import json, sys
import nitro
from nitro.testing import models
from vllm import LLM, SamplingParams

model = models.make_tiny_model(sys.argv[1], "llama", num_kv_heads=2, vocab=512, max_len=1024)
kept = {}
for weight in (0.0, 1000.0):
    settings = nitro.vllm_config(policy="recent-knorm", policy_options={"weight": weight}, budget=64, window=8, slack=8)
    llm = LLM(
        str(model), skip_tokenizer_init=True, dtype="float32", enforce_eager=True, block_size=32, max_model_len=512,
        num_gpu_blocks_override=40, kv_cache_memory_bytes=64 * 2**20, additional_config=settings,
    )
    llm.collective_rpc("nitro_record", args=(True,))
    sampling = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True, detokenize=False)
    output = llm.generate([{"prompt_token_ids": [n * n % 500 for n in range(200)]}], sampling, use_tqdm=False)
    (recording,) = llm.collective_rpc("nitro_take_recording")
    first = recording["records"][0]
    import numpy
    where = numpy.frombuffer(first["kept"], "<i4").reshape(first["shape"])
    kept[weight] = where.tolist()
    assert len(output[0].outputs[0].token_ids) == 40
    evictions = llm.llm_engine.engine_core.engine_core.scheduler.nitro.counters.evictions
    llm.llm_engine.engine_core.shutdown()
    from vllm.distributed import cleanup_dist_env_and_memory
    del llm
    cleanup_dist_env_and_memory()
print("RESULT" + json.dumps({"evictions": evictions, "kept": [kept[0.0], kept[1000.0]]}))
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Environment variables of processes that have the package installed, in a folder of its own."""
    folder = tmp_path_factory.mktemp("site")
    copy = tmp_path_factory.mktemp("source") / "package"  # a build leaves files beside what it builds
    subprocess.run(["cp", "-r", str(EXAMPLE), str(copy)], check=True)
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    done = subprocess.run(
        [*command, "--target", str(folder), str(copy)], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return {
        **os.environ,
        "PYTHONPATH": str(folder),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "HF_HUB_OFFLINE": "1",
    }


def python(site: dict[str, str], program: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-P", "-c", program, *arguments],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env=site,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def test_it_is_found_and_its_options_are_checked(site: dict[str, str]) -> None:
    program = """
from nitro import policies
from nitro.config import Settings
from nitro.errors import SettingsError
assert "recent-knorm" in policies.available()
print(policies.get("recent-knorm"))
for options in ({"weight": -1}, {"wait": 1}):
    try:
        Settings.parse({"policy": "recent-knorm", "policy_options": options, "budget": 64})
    except SettingsError as error:
        print(error)
"""
    lines = python(site, program)
    assert "RecentKNorm(weight=1.0)" in lines
    assert "weight=-1 is not in [0, 1e6]" in lines
    assert "unknown option 'wait'" in lines
    assert "did you mean 'weight'" in lines


def test_it_is_not_there_without_being_installed() -> None:
    from nitro import policies

    assert "recent-knorm" not in policies.available()


@pytest.mark.engine
@pytest.mark.timeout(900)
def test_vllm_serves_with_it(site: dict[str, str], tmp_path: Path) -> None:
    output = python(site, SERVE, str(tmp_path / "tiny"))
    found = json.loads(next(line for line in output.splitlines() if line.startswith("RESULT")).removeprefix("RESULT"))
    assert found["evictions"] >= 4
    short, recent = found["kept"]
    newest = list(range(200 - 60, 200))
    assert all(head == [0, 1, 2, 3, *newest] for layer in recent for head in layer), "age decides"
    assert all(head != [0, 1, 2, 3, *newest] for layer in short for head in layer), "norms decide"


def test_it_is_documented() -> None:
    text = (EXAMPLE / "README.md").read_text(encoding="utf-8")
    command = next(line for line in text.splitlines() if "--additional-config" in line)
    settings = json.loads(command.partition("--additional-config '")[2].removesuffix("'"))["nitro"]
    assert settings["policy"] in (EXAMPLE / "pyproject.toml").read_text(encoding="utf-8")
    assert set(settings["policy_options"]) == {"weight"}
