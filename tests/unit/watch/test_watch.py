"""``nitro stats``: what it makes of a real /metrics, of two of them, and of whatever else answers."""

from __future__ import annotations

import json
import math
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

from nitro.cli import main
from nitro.errors import WatchError
from nitro.watch import cli, scrape
from nitro.watch.figures import Histogram, Pool, Snapshot, snapshot
from nitro.watch.view import bar, block_map, render, seconds, sparks

SERVED = (Path(__file__).resolve().parents[2] / "data/metrics.txt").read_text(encoding="utf-8")


@contextmanager
def server(*answers: tuple[int, bytes]) -> Iterator[str]:
    """Answers one after the other, the last one again and again."""
    left = list(answers)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = left.pop(0) if len(left) > 1 else left[0]
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        thread = threading.Thread(target=http.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield f"127.0.0.1:{http.server_address[1]}"
        finally:
            http.shutdown()
            thread.join()


def run(*arguments: str) -> Any:
    return CliRunner().invoke(main, ["stats", *arguments])


def taken(text: str = SERVED, at: float = 0.0) -> Snapshot:
    return snapshot(scrape.parse(text, "there"), at)


def plain(shown: Any) -> str:
    console = Console(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    with console.file:
        console.print(shown)
        return console.export_text()


def test_a_real_server() -> None:
    found = taken()
    assert (found.models, found.engines) == (("tiny",), 1)
    assert found.gauges["logical_tokens"] == 1401
    assert found.gauges["retention_ratio"] == 633 / 1401
    assert found.counters["evictions"] == 137
    assert found.counters["requests_refused"] == 3
    assert found.histograms["plan_seconds"].count == 412
    assert found.pool is not None
    assert (found.pool.blocks, found.pool.block_size, round(found.pool.used)) == (59, 32, 24)


def test_engines_are_added_up() -> None:
    second = re.sub(r'engine="0"', 'engine="1"', SERVED)
    second = "\n".join(line for line in second.splitlines() if line and not line.startswith("#"))
    second = second.replace("1.263157894736842", "1.5")
    one, two = taken(), taken(f"{SERVED}\n{second}\n")
    assert two.engines == 2
    assert two.counters["evictions"] == 2 * one.counters["evictions"]
    assert two.gauges["physical_tokens"] == 2 * one.gauges["physical_tokens"]
    assert two.gauges["retention_ratio"] == one.gauges["retention_ratio"]
    assert two.gauges["request_fragmentation_ratio_max"] == 1.5
    assert two.histograms["plan_seconds"].counts == tuple(2 * n for n in one.histograms["plan_seconds"].counts)
    assert two.pool is not None
    assert (two.pool.blocks, round(two.pool.used)) == (118, 48)


def test_rates_and_times_are_of_what_lies_between() -> None:
    before = taken(at=10.0)
    later = re.sub(r"^(nitro:evictions_total\S*) .*", r"\1 157.0", SERVED, flags=re.MULTILINE)
    later = re.sub(r'^(nitro:plan_seconds_bucket\S*le="\+Inf"\S*) .*', r"\1 414.0", later, flags=re.MULTILINE)
    now = taken(later, at=14.0)
    assert now.rates(before)["evictions"] == 5
    assert now.rates(before)["blocks_freed"] == 0
    assert now.rates(None) == {}
    assert now.histograms["plan_seconds"].since(before.histograms["plan_seconds"]).count == 2
    anew = re.sub(r"^(nitro:evictions_total\S*) .*", r"\1 2.0", SERVED, flags=re.MULTILINE)
    assert taken(anew, at=18.0).rates(now) == {}, "a server that was started anew has no rate yet"


def test_the_view_says_it_all() -> None:
    text = plain(render(taken(), None))
    for part in ("tiny", "45.2%", "1,401", "633", "3,672", "24 of 59 blocks", "1.213×", "412"):
        assert part in text
    assert "bridge" not in text
    busy = taken().counters | {"bridge_answers": 7}
    assert "bridge: 7 answers, dropped: none" in plain(render(replace(taken(), counters=busy), None))
    assert "it sleeps" in plain(render(taken(at=2.0), taken(at=1.0), "it sleeps"))


def test_a_server_where_nobody_runs() -> None:
    idle = re.sub(r"^(nitro:(?:logical|physical)_tokens\S*|nitro:allocated_slots\S*) .*", r"\1 0.0", SERVED, flags=re.M)
    idle = re.sub(r"^(nitro:\w*_ratio\w*\{\S*) .*", r"\1 NaN", idle, flags=re.M)
    found = taken(idle)
    assert "nobody runs" in plain(render(found, None))
    assert json.loads(json.dumps(found.to_dict()))["retention_ratio"] is None


@given(
    st.integers(1, 5000),
    st.floats(0, 1),
    st.floats(0, 3),
    st.floats(0, 1),
    st.integers(1, 80),
)
def test_the_map_has_its_width_whatever_is_in_it(
    blocks: int, usage: float, held: float, live: float, width: int
) -> None:
    pool = Pool(blocks, 16, usage * blocks)
    allocated = held * blocks * 16
    cells = block_map(pool, {"allocated_slots": allocated, "physical_tokens": allocated * live}, width)
    assert sum(len(text) for text, _ in cells) == width
    free = len(cells[-1][0])
    assert abs(free - (1 - usage) * width) <= 1


@given(st.floats(allow_nan=True, allow_infinity=False), st.integers(1, 80))
def test_a_bar_has_its_width(share: float, width: int) -> None:
    assert len(bar(share, width)) == width


@given(st.lists(st.integers(0, 50), min_size=2, max_size=8), st.floats(0, 1))
def test_a_quantile_lies_where_so_many_are_below(counts: list[int], share: float) -> None:
    bounds = (*(float(n + 1) for n in range(len(counts) - 1)), math.inf)
    found = Histogram(bounds, tuple(map(float, counts)), 1.0)
    at = found.quantile(share)
    if not sum(counts):
        assert math.isnan(at)
        return
    below = sum(count for bound, count in zip(bounds, counts, strict=True) if bound <= at)
    upto = sum(count for low, count in zip((0.0, *bounds), counts, strict=False) if low <= at)
    assert below <= share * sum(counts) + 1e-6
    assert upto >= share * sum(counts) - 1e-6
    assert len(sparks(found)) == len(counts)
    assert all((sign == " ") == (count == 0) for sign, count in zip(sparks(found), counts, strict=True))


def test_times_have_a_unit_that_fits() -> None:
    assert [seconds(value) for value in (12.0, 0.0123, 4.5e-5, math.nan)] == ["12 s", "12.3 ms", "45 µs", ""]


@pytest.mark.parametrize(
    ("given_", "where"),
    [
        ("localhost:8000", "http://localhost:8000/metrics"),
        ("http://h:1/", "http://h:1/metrics"),
        ("https://h/vllm/v1", "https://h/vllm/metrics"),
        ("h:1/metrics", "http://h:1/metrics"),
        ("http://h/v1/metrics/", "http://h/metrics"),
    ],
)
def test_addresses(given_: str, where: str) -> None:
    assert scrape.metrics_url(given_) == where


@pytest.mark.parametrize("address", ["ftp://h", "http://", "h:port", "h:99999", "", "http://[::1"])
def test_no_addresses(address: str) -> None:
    done = run(address, "--once")
    assert done.exit_code == 1
    assert "is no address of a server: give one like http://localhost:8000" in done.output


def test_once() -> None:
    with server((200, SERVED.encode())) as url:
        done = run(url, "--once")
        assert done.exit_code == 0, done.output
        assert "45.2%" in done.output
        told = json.loads(run(f"http://{url}/v1", "--once", "--json").output)
    assert (told["evictions"], told["rates"], told["pool"]["blocks"]) == (137, {}, 59)
    assert told["times"]["worker_seconds"]["count"] == 86


def test_json_goes_on_until_the_server_is_gone() -> None:
    with server((200, SERVED.encode()), (200, SERVED.encode()), (503, b"")) as url:
        done = run(url, "--json", "--interval", "0.2")
    assert done.exit_code == 1
    first, second, *rest = done.output.splitlines()
    assert json.loads(first)["rates"] == {}
    assert json.loads(second)["rates"]["evictions"] == 0
    assert "status 503" in "".join(rest)


def test_the_view_waits_for_a_server_that_went_away(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    answers: list[Any] = [WatchError("there does not answer"), taken(at=9.0), KeyboardInterrupt()]

    class Live:
        def __init__(self, first: Any, **_: Any) -> None:
            shown.append(plain(first))

        def __enter__(self) -> Live:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def update(self, view: Any, *, refresh: bool) -> None:
            assert refresh
            shown.append(plain(view))

    def look() -> Snapshot:
        answer = answers.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        found: Snapshot = answer
        return found

    monkeypatch.setattr(cli, "Live", Live)
    monkeypatch.setattr(cli.time, "sleep", lambda _: None)
    with pytest.raises(KeyboardInterrupt):
        cli._show(taken(at=5.0), look, 1.0)
    assert len(shown) == 3
    assert "no answer for" in shown[1]
    assert "there does not answer" in shown[1]
    assert "no answer" not in shown[2]


NO_NITRO = "\n".join(line for line in SERVED.splitlines() if "nitro:" not in line) + "\n"


@pytest.mark.parametrize(
    ("status", "body", "says"),
    [
        (404, b"", "answers with status 404"),
        (200, b"<html>hello</html>", "is not that of vLLM"),
        (200, b"", "is not that of vLLM"),
        (200, bytes(range(256)), "is not that of vLLM"),
        (200, b'vllm:x{broken="', "is not that of vLLM"),
        (200, b"python_info 1\n", "is not that of vLLM"),
        (200, NO_NITRO.encode(), "a vLLM without Nitro"),
    ],
)
def test_what_else_may_answer(status: int, body: bytes, says: str) -> None:
    with server((status, body)) as url:
        done = run(url, "--once")
    assert done.exit_code == 1
    assert says in done.output
    assert url in done.output
    assert "Traceback" not in done.output


def test_nobody_answers() -> None:
    with server((200, b"")) as url:
        pass
    done = run(url, "--once", "--timeout", "2")
    assert done.exit_code == 1
    assert "does not answer" in done.output
    assert "is the server up" in done.output


def test_an_answer_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scrape, "MOST_BYTES", 1000)
    with server((200, SERVED.encode())) as url:
        done = run(url, "--once")
    assert done.exit_code == 1
    assert "sends more than 1,000 bytes" in done.output


@pytest.mark.parametrize("option", [("--interval", "0"), ("--timeout", "0")])
def test_options_have_bounds(option: tuple[str, str]) -> None:
    assert run("h:1", *option).exit_code == 2
