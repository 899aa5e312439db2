"""Fetch ``/metrics`` of a server, and say what is wrong where that is not vLLM's with Nitro."""

from __future__ import annotations

import time
from collections.abc import Iterable
from urllib.parse import urlsplit

import httpx
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from nitro.errors import WatchError
from nitro.metrics import PREFIX

MOST_BYTES = 32 * 2**20  # vLLM's are some 60 kB an engine
_VLLM = "vllm:"


def metrics_url(address: str) -> str:
    """Return where the metrics of a server are, given its address as people write it.

    Args:
        address: ``localhost:8000``, ``http://host:8000``, also with ``/v1`` or ``/metrics`` behind it.

    Raises:
        WatchError: it is no address of an HTTP server.
    """
    asked = address if "://" in address else f"http://{address}"
    try:
        parts = urlsplit(asked)
        fine = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # a port that is no number, or too large
        fine = False
    if not fine:
        raise WatchError(f"{address!r} is no address of a server: give one like http://localhost:8000")
    path = parts.path.rstrip("/")
    for end in ("/metrics", "/v1"):
        path = path.removesuffix(end)
    return f"{parts.scheme}://{parts.netloc}{path}/metrics"


def fetch(url: str, timeout: float) -> str:
    """Return what a server has under an address.

    Args:
        url: of ``metrics_url``.
        timeout: seconds, for all of it.

    Raises:
        WatchError: it does not answer in time, not with status 200, or with too much.
    """
    end = time.monotonic() + timeout
    parts: list[bytes] = []
    try:
        with httpx.stream("GET", url, timeout=timeout, follow_redirects=True) as answer:
            if answer.status_code != 200:
                raise WatchError(
                    f"{url} answers with status {answer.status_code}: give the address of vLLM's server itself "
                    "(host and port, and the path of a proxy that passes /metrics on)"
                )
            size = 0
            for part in answer.iter_bytes():
                parts.append(part)
                size += len(part)
                if size > MOST_BYTES:
                    raise WatchError(f"{url} sends more than {MOST_BYTES:,} bytes: that is not vLLM's /metrics")
                if time.monotonic() > end:
                    raise httpx.ReadTimeout(f"not complete after {timeout:g} s")
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        why = str(error) or type(error).__name__
        raise WatchError(
            f"{url} does not answer ({why}): is the server up, and is that its port? vLLM's is 8000 if --port says "
            "nothing, and it listens once the weights are loaded"
        ) from None
    return b"".join(parts).decode(errors="replace")


def parse(text: str, url: str) -> list[Sample]:
    """Return the samples of vLLM and of Nitro.

    Raises:
        WatchError: the text is not Prometheus', not vLLM's, or there is no Nitro in it.
    """
    try:
        found = list(_samples(text))
    except ValueError:
        found = []
    if not any(sample.name.startswith(_VLLM) for sample in found):
        raise WatchError(
            f"{url} is not that of vLLM: it has no metric that begins with {_VLLM}. Give the address of vLLM's server; "
            "one that was started with --disable-log-stats has none"
        )
    if not any(sample.name.startswith(PREFIX) for sample in found):
        raise WatchError(
            f"{url} is that of a vLLM without Nitro, or with an older one: start it with --additional-config "
            """'{"nitro": {...}}'; if VLLM_PLUGINS is set there, it must name nitro"""
        )
    return found


def _samples(text: str) -> Iterable[Sample]:
    for family in text_string_to_metric_families(text):
        if family.name.startswith((_VLLM, PREFIX)):
            yield from family.samples
