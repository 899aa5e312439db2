"""A server for tests: ``vllm serve`` with Nitro on a tiny model, and its metrics."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

BLOCKS, BLOCK = 60, 32


def serve_command(model: Path, port: int, settings: object, *more: str) -> list[str]:
    return [
        *(str(Path(sys.executable).with_name("vllm")), "serve", str(model)),
        *("--host", "127.0.0.1", "--port", str(port), "--served-model-name", "tiny"),
        *("--dtype", "float32", "--enforce-eager", "--block-size", str(BLOCK)),
        *("--max-model-len", "512", "--max-num-seqs", "16", "--max-num-batched-tokens", "256"),
        *("--num-gpu-blocks-override", str(BLOCKS), "--kv-cache-memory-bytes", str(64 * 2**20)),
        *("--additional-config", json.dumps(settings)),
        *more,
    ]


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "VLLM_LOGGING_LEVEL": "INFO", "VLLM_ENABLE_V1_MULTIPROCESSING": "1", **more}


@contextmanager
def serving(model: Path, settings: object, log: Path, *more: str) -> Iterator[str]:
    """Yield the address of a server that is ready."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = serve_command(model, port, settings, *more)
    with (
        log.open("w") as out,
        subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment()) as process,
    ):
        url = f"http://127.0.0.1:{port}"
        try:
            for _ in range(300):
                assert process.poll() is None, log.read_text()[-4000:]
                try:
                    if httpx.get(f"{url}/health", timeout=2).status_code == 200:
                        break
                except httpx.HTTPError:
                    pass
                time.sleep(1)
            else:
                raise AssertionError(log.read_text()[-4000:])
            yield url
        finally:
            process.terminate()
            process.wait(60)


def metrics(url: str) -> Mapping[str, float]:
    """Return the only engine's metrics, as a Prometheus server reads them."""
    text = httpx.get(f"{url}/metrics", timeout=10).text
    families = text_string_to_metric_families(text)
    return {s.name: s.value for family in families for s in family.samples if s.labels.get("engine") == "0"}


def metric(url: str, name: str) -> float:
    found = metrics(url)
    assert name in found, f"{name} is not among: {sorted(key for key in found if key.startswith('nitro'))}"
    return found[name]


def wait_until(url: str, name: str, value: float) -> None:
    """Wait until a metric has a value: the last report may come after the last answer."""
    for _ in range(100):
        if metric(url, name) == value:
            return
        time.sleep(0.2)
    raise AssertionError(f"{name} is {metric(url, name)}, not {value}")


def prompt(seed: int, length: int = 120) -> list[int]:
    return [(seed * 7919 + i * i * 31 + i) % 500 for i in range(length)]
