"""What clients of a server do, with the ``openai`` client, in a pool that is far too small for them.

Beside ``test_serve.py``, which asks whether Nitro is on and what a request may say about it. Also with a threshold, so
that workers answer the scheduler across processes. What that leaves depends on the step in which an answer comes:
requests whose tokens are compared with those of others have a budget of their own there.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import BadRequestError, OpenAI

from .served import BLOCK, BLOCKS, metric, metrics, prompt, serving, wait_until

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1200)]

# Not with `random`, which draws by the request's id: no two requests would be answered alike.
SETTINGS = {
    "budget": {"policy": "keydiff", "budget": 72, "window": 16, "slack": 24},
    "threshold": {"policy": "gravity", "threshold": 0.9, "min_keep": 40, "max_keep": 160, "window": 16, "slack": 24},
}


def write_tokenizer(model: Path) -> None:
    """Give a tiny model a tokenizer of one word a token: w0, w1, ..."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.WordLevel({f"w{n}": n for n in range(512)}, unk_token="w0"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=made, unk_token="w0").save_pretrained(model)


@pytest.fixture(scope="module", params=list(SETTINGS))
def url(
    request: pytest.FixtureRequest, tiny: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    from nitro.testing import models

    folder = tmp_path_factory.mktemp("clients")
    model = models.make_tiny_model(folder / "tiny", "llama", num_kv_heads=2, vocab=512, max_len=1024)
    write_tokenizer(model)
    with serving(model, {"nitro": SETTINGS[request.param]}, folder / "log") as address:
        yield address
        # Whatever the tests have done, nothing is left behind, and nothing went wrong.
        for name in ("vllm:num_requests_running", "vllm:kv_cache_usage_perc", "nitro:allocated_slots"):
            wait_until(address, name, 0)
        assert "Traceback" not in (folder / "log").read_text()


@pytest.fixture
def client(url: str) -> OpenAI:
    return OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=300)


REPEATABLE = {"vllm_xargs": {"nitro": '{"budget": 72}'}}


def ask(client: OpenAI, number: int, *, tokens: int = 100, length: int = 120, **arguments: Any) -> Any:
    body = {"ignore_eos": True, "return_token_ids": True, **arguments.pop("body", {})}
    return client.completions.create(
        **{"model": "tiny", "prompt": prompt(number, length), "max_tokens": tokens, "temperature": 0, **arguments},
        extra_body=body,
    )


def test_a_stream_has_the_tokens_of_the_whole_answer(client: OpenAI) -> None:
    whole = ask(client, 1, tokens=200, body=REPEATABLE).choices[0]
    text, ids = "", []
    for chunk in ask(client, 1, tokens=200, stream=True, body=REPEATABLE):
        text += chunk.choices[0].text
        ids += chunk.choices[0].token_ids or []
    assert ids == whole.token_ids
    assert text == whole.text
    assert len(ids) == 200


def test_a_burst_beyond_the_pool(client: OpenAI) -> None:
    """40 requests of 220 tokens take 280 blocks of 59; each is answered, and no other way than if it were alone."""
    seeds = range(100, 140)
    assert len(seeds) * -(-220 // BLOCK) > 4 * BLOCKS

    def own(seed: int) -> dict[str, Any]:
        """Every other request is under the server's rule."""
        return REPEATABLE if seed % 2 else {}

    with ThreadPoolExecutor(len(seeds)) as pool:
        answers = list(pool.map(lambda seed: ask(client, seed, body=own(seed)).choices[0].token_ids, seeds))
    assert all(len(tokens) == 100 for tokens in answers)
    assert len({tuple(tokens) for tokens in answers}) == len(seeds)
    for seed in (101, 117, 139):
        assert ask(client, seed, body=own(seed)).choices[0].token_ids == answers[seed - 100]


def test_clients_that_hang_up(client: OpenAI, url: str) -> None:
    chance = random.Random(0)

    def hang_up(seed: int) -> int:
        stream = ask(client, seed, tokens=300, stream=True)
        last = chance.randrange(1, 150)
        for count, _ in enumerate(stream):
            if count == last:
                break
        stream.close()
        return last

    with ThreadPoolExecutor(12) as pool:
        gone = [pool.submit(hang_up, 200 + number) for number in range(24)]
        stay = [pool.submit(ask, client, 300 + number) for number in range(4)]
        assert all(future.result().choices[0].finish_reason == "length" for future in stay)
        assert all(future.result() for future in gone)
    wait_until(url, "vllm:num_requests_running", 0)
    wait_until(url, "vllm:kv_cache_usage_perc", 0)


def test_prompts_over_several_chunks(client: OpenAI, url: str) -> None:
    """A step takes 256 tokens; so a prompt of 450 is evicted before all of it has been seen."""
    before = metric(url, "nitro:tokens_evicted_total")
    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda seed: ask(client, seed, length=450, tokens=50), range(400, 406)))
    assert all(answer.usage.prompt_tokens == 450 for answer in answers)
    assert all(len(answer.choices[0].token_ids) == 50 for answer in answers)
    assert metric(url, "nitro:tokens_evicted_total") - before > 6 * 250


def test_a_prefix_is_hit_after_its_request_was_evicted(client: OpenAI, url: str) -> None:
    first = ask(client, 500, length=200, tokens=150, body=REPEATABLE)
    hits, evictions = metric(url, "vllm:prefix_cache_hits_total"), metric(url, "nitro:evictions_total")
    again = ask(client, 500, length=200, tokens=150, body=REPEATABLE)
    assert metric(url, "nitro:evictions_total") > evictions
    assert metric(url, "vllm:prefix_cache_hits_total") - hits >= BLOCK, "of blocks that held the whole prompt once"
    assert again.choices[0].token_ids == first.choices[0].token_ids


def test_log_probabilities(client: OpenAI) -> None:
    choice = ask(client, 600, logprobs=3).choices[0]
    found = choice.logprobs
    assert len(found.token_logprobs) == len(choice.token_ids) == 100
    assert all(value <= 0 for value in found.token_logprobs)
    for value, top in zip(found.token_logprobs, found.top_logprobs, strict=True):
        assert len(top) >= 3
        assert value == max(top.values()), "greedy: the token is the likeliest one"


def test_several_answers_to_one_prompt(client: OpenAI) -> None:
    answer = ask(client, 700, n=4, temperature=1.0, seed=5)
    assert [choice.index for choice in sorted(answer.choices, key=lambda c: c.index)] == [0, 1, 2, 3]
    assert len({tuple(choice.token_ids) for choice in answer.choices}) == 4
    assert all(len(choice.token_ids) == 100 for choice in answer.choices)


def test_a_stop_string_ends_an_answer_after_evictions(client: OpenAI) -> None:
    whole = ask(client, 800, tokens=150, body=REPEATABLE).choices[0]
    ids, words = whole.token_ids, whole.text
    at = next(n for n in range(100, 150) if ids[n] not in ids[:n])
    stop = f"w{ids[at]}"
    stopped = ask(client, 800, tokens=150, stop=[stop], body=REPEATABLE).choices[0]
    assert stopped.finish_reason == "stop"
    assert stopped.stop_reason == stop
    assert stopped.text == words[: words.index(stop)]


def test_bad_arguments_leave_the_engine_unharmed(client: OpenAI, url: str) -> None:
    for own in ('{"budget": 1}', "[]", '{"enabled": 3}', '{"policy": "knorm"}'):
        with pytest.raises(BadRequestError):
            ask(client, 900, body={"vllm_xargs": {"nitro": own}})
    before = metrics(url)["nitro:requests_refused_total"]
    with pytest.raises(BadRequestError, match="nitro"):
        ask(client, 900, stream=True, body={"vllm_xargs": {"nitro": '{"budgt": 64}'}})
    assert metrics(url)["nitro:requests_refused_total"] == before + 1
    for tokens in (0, -1, 10**6):
        answer = httpx.post(f"{url}/v1/completions", json={"model": "tiny", "prompt": "w1", "max_tokens": tokens})
        assert answer.status_code in (200, 400)
    assert len(ask(client, 900).choices[0].token_ids) == 100
