"""``vllm serve`` with the one JSON setting, driven by the real ``openai`` client."""

from __future__ import annotations

import json
import math
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI

from .served import environment, metric, metrics, prompt, serve_command, serving

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

BUDGET = 72
SETTINGS = {"nitro": {"policy": "keydiff", "budget": BUDGET, "window": 16, "slack": 24}}


@pytest.fixture(scope="module")
def server(tiny: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    log = tmp_path_factory.mktemp("serve") / "log"
    with serving(tiny("llama-gqa"), SETTINGS, log, "--skip-tokenizer-init") as url:
        yield url, log


def test_the_log_and_the_metrics_prove_that_nitro_is_active(server: tuple[str, Path]) -> None:
    url, log = server
    lines = [line for line in log.read_text().splitlines() if "is active on vLLM" in line]
    assert len(lines) == 1
    assert f"budget={BUDGET}" in lines[0]
    assert metric(url, "nitro:evictions_total") == 0


def test_many_clients_at_once(server: tuple[str, Path]) -> None:
    url, _ = server
    client = OpenAI(base_url=f"{url}/v1", api_key="none")

    def ask(seed: int) -> list[int]:
        answer = client.completions.create(
            model="tiny",
            prompt=prompt(seed),
            max_tokens=100,
            temperature=0,
            extra_body={"ignore_eos": True, "return_token_ids": True},
        )
        choice = answer.choices[0]
        assert choice.finish_reason == "length"
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 100
        tokens: list[int] = choice.token_ids  # type: ignore[attr-defined]
        return tokens

    with ThreadPoolExecutor(12) as pool:
        first = list(pool.map(ask, range(12)))
    assert all(len(tokens) == 100 for tokens in first)
    assert len({tuple(tokens) for tokens in first}) == 12
    assert ask(3) == first[3], "greedy answers do not depend on who else is served"
    # 220 tokens each: an eviction at 120 - 72 = 48 tokens, then one every 24 tokens.
    evictions = metric(url, "nitro:evictions_total")
    assert evictions >= 13 * 4
    assert metric(url, "nitro:tokens_evicted_total") >= 13 * (48 + 3 * 24)
    assert metric(url, "nitro:blocks_freed_total") > 0


HELD = (
    *("allocated_slots", "physical_tokens", "fragmentation_ratio", "request_fragmentation_ratio_max"),
    *("logical_tokens", "retention_ratio", "active_requests", "evicted_requests"),
)


def test_what_running_requests_hold(server: tuple[str, Path]) -> None:
    url, _ = server
    client = OpenAI(base_url=f"{url}/v1", api_key="none")

    def ask(seed: int) -> object:
        return client.completions.create(
            model="tiny", prompt=prompt(seed), max_tokens=390, temperature=0, extra_body={"ignore_eos": True}
        )

    seen: list[tuple[float, ...]] = []
    with ThreadPoolExecutor(8) as pool:
        waves = 0
        while len({use for use in seen if use[0] and not math.isnan(use[3])}) < 3 and waves < 20:
            waves += 1
            asked = [pool.submit(ask, 100 * waves + number) for number in range(8)]
            while not all(answer.done() for answer in asked):
                found = metrics(url)
                seen.append(tuple(found[f"nitro:{name}"] for name in HELD))
                time.sleep(0.05)
            assert [answer.result() for answer in asked]
    busy = [use for use in seen if use[0]]
    assert len(set(busy)) >= 3, "it is counted about once a second while they run"
    for allocated, live, ratio, worst, logical, retention, active, evicted in busy:
        assert live <= logical <= 8 * 512
        assert retention == live / logical
        assert 0 <= evicted <= active <= 8
        assert (retention < 1) == (evicted > 0)
        assert allocated % 32 == 0
        assert 0 < live <= allocated <= 59 * 32
        assert ratio == allocated / live
        assert math.isnan(worst) or 1 <= worst <= 1 + 32 / BUDGET
    assert any(not math.isnan(use[3]) for use in busy)
    for _ in range(20):  # the last report may come after the last answer
        if metric(url, "nitro:allocated_slots") == 0:
            break
        time.sleep(0.2)
    found = metrics(url)
    for name in ("allocated_slots", "physical_tokens", "logical_tokens", "active_requests", "evicted_requests"):
        assert found[f"nitro:{name}"] == 0
    for name in ("fragmentation_ratio", "request_fragmentation_ratio_max", "retention_ratio"):
        assert math.isnan(found[f"nitro:{name}"])


def test_what_nitro_takes_crosses_two_processes(server: tuple[str, Path]) -> None:
    url, _ = server
    assert ask_with(url, "{}", 40).status_code == 200
    time.sleep(0.5)  # the last report may come after the last answer
    found = metrics(url)
    steps = found["vllm:iteration_tokens_total_count"]
    assert steps <= found["nitro:plan_seconds_count"] <= steps + 50, "one for each step, empty ones too"
    assert 0 < found["nitro:plan_seconds_sum"] < 0.05 * found["nitro:plan_seconds_count"]
    # Several requests may be evicted in one step.
    assert 0 < found["nitro:worker_seconds_count"] <= found["nitro:evictions_total"]
    assert 0 < found["nitro:worker_seconds_sum"] < found["nitro:worker_seconds_count"]
    assert found["nitro:device_seconds_count"] == 0, "there is no GPU"


def test_streaming_and_an_abort_in_the_middle(server: tuple[str, Path]) -> None:
    url, _ = server
    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    stream = client.completions.create(
        model="tiny", prompt=prompt(77), max_tokens=300, temperature=0, stream=True, extra_body={"ignore_eos": True}
    )
    for count, _ in enumerate(stream):
        if count == 40:
            break
    stream.close()
    for _ in range(60):
        if metric(url, "vllm:num_requests_running") == 0:
            break
        time.sleep(0.5)
    assert metric(url, "vllm:num_requests_running") == 0
    assert metric(url, "vllm:kv_cache_usage_perc") == 0


def ask_with(url: str, own: object, seed: int = 0, **extra: Any) -> httpx.Response:
    """Ask for 60 tokens after a prompt of 120, with a request's own settings under ``vllm_xargs``."""
    body: dict[str, Any] = {"model": "tiny", "max_tokens": 60, "temperature": 0, "ignore_eos": True, **extra}
    return httpx.post(
        f"{url}/v1/completions", json={**body, "prompt": prompt(seed), "vllm_xargs": {"nitro": own}}, timeout=60
    )


def test_a_request_with_a_budget_of_its_own(server: tuple[str, Path]) -> None:
    url, _ = server
    client = OpenAI(base_url=f"{url}/v1", api_key="none")

    def evicted(own: dict[str, object] | None) -> float:
        before = metric(url, "nitro:tokens_evicted_total")
        xargs = {} if own is None else {"vllm_xargs": {"nitro": json.dumps(own)}}
        answer = client.completions.create(
            model="tiny", prompt=prompt(5), max_tokens=60, temperature=0, extra_body={"ignore_eos": True, **xargs}
        )
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 60
        # None of these evicts in its last step, the statistics of which may come after the answer.
        return metric(url, "nitro:tokens_evicted_total") - before

    # 179 tokens are computed: an eviction after the 120 of the prompt, then one whenever `slack` more have come.
    assert evicted(None) == 120 - BUDGET + 59 // 24 * 24
    assert evicted({"budget": 40}) == 120 - 40 + 59 // 24 * 24
    assert evicted({"budget": 60, "slack": 50}) == 120 - 60 + 50
    assert evicted({"enabled": False}) == 0
    assert evicted({"evict_prompt": False, "budget": 20, "slack": 9}) == (59 - 20) // 9 * 9


@pytest.mark.parametrize(
    ("own", "says"),
    [
        ('{"budget": 12}', "budget=12 is below sinks + window = 20: raise budget to at least 20"),
        ('{"budgt": 64}', "unknown key 'budgt' (value 64), did you mean 'budget'?"),
        ('{"window": 4}', "window=4 cannot be set by a request"),
        ('{"budget": 64', "is not JSON"),
        (64, "must be an object"),
        (["budget", 64], "must be an object"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_wrong_request_is_refused_and_others_do_not_notice(
    server: tuple[str, Path], own: object, says: str, stream: bool
) -> None:
    url, log = server
    start, before = log.stat().st_size, metric(url, "nitro:requests_refused_total")
    with ThreadPoolExecutor(4) as pool:
        others = [pool.submit(ask_with, url, "{}", seed) for seed in range(3)]
        refused = pool.submit(ask_with, url, own, stream=stream).result()
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert error["type"] == "BadRequestError"
    assert error["param"] == "nitro"
    assert says in error["message"]
    assert [other.result().status_code for other in others] == [200] * 3
    assert metric(url, "nitro:requests_refused_total") == before + 1
    assert "Traceback" not in log.read_text()[start:]


def test_nested_objects_do_not_pass_vllms_own_check(server: tuple[str, Path]) -> None:
    # The reason for strings. Should this fail one day, the documentation may say that objects work, too.
    assert ask_with(server[0], {"budget": 64}).status_code == 400


def test_wrong_settings_stop_the_server_before_weights_are_loaded(tiny: Callable[[str], Path]) -> None:
    command = serve_command(tiny("llama-gqa"), 1, {"nitro": {"budgt": 5}})
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=200, check=False)
    assert done.returncode != 0
    output = done.stdout + done.stderr
    assert "SettingsError" in output
    assert "unknown key 'budgt' (value 5), did you mean 'budget'?" in output
    assert "Loading weights" not in output
