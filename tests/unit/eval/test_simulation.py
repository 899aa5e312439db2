"""The simulated tournament: against a model under masks, against brute force, and that its file can be gone on with."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sim_answer import answer_rows
from sim_attention import attention_paid, place_of
from sim_candidates import SCORES, Candidate, best, leverage, neighbour_max, nitro_candidate, simulated_candidate
from sim_counts import (
    counts_of,
    floor_of,
    global_candidate,
    global_scores,
    keep_global,
    order,
    surprisal_candidate,
    table_candidate,
    table_of,
)
from sim_prefill import Prefilled, prefill
from sim_report import agreement, cells_of, difference, pooled, standings, tables, versus
from sim_store import SimStore, read
from sim_tournament import Models, checked, play
from torch import Tensor

from nitro import policies
from nitro.errors import SettingsError
from nitro.eval.case import Case
from nitro.eval.settings import SINKS, WINDOW
from nitro.testing.masked import masked_logits
from nitro.testing.models import load_model, make_tiny_model
from nitro.testing.visibility import Visibility
from nitro.types import KeepRecord

LENGTH, HEADS, KV_HEADS, LAYERS = 96, 4, 2, 3
FORCED = SINKS + WINDOW


@pytest.fixture(scope="module", params=["llama", "qwen2"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = make_tiny_model(tmp_path_factory.mktemp("models") / request.param, request.param, num_kv_heads=KV_HEADS)
    return load_model(path)


@pytest.fixture(scope="module")
def tokens() -> list[int]:
    return torch.randint(0, 511, (LENGTH + 20,), generator=torch.Generator().manual_seed(3)).tolist()


@pytest.fixture(scope="module")
def context(model: Any, tokens: list[int]) -> Prefilled:
    return prefill(model, tokens[:LENGTH], "case-0")


def brute_force(model: Any, tokens: list[int], kept: Tensor) -> Tensor:
    """Log-probabilities of what follows each token behind the context, in one pass under a mask of everything."""
    count = kept.sum(dim=-1)
    width = int(count.max())
    rows = torch.full((*count.shape, width), -1, dtype=torch.int64)
    for place in torch.cartesian_prod(*map(torch.arange, count.shape)).tolist():
        held = kept[tuple(place)].nonzero()[:, 0]
        rows[tuple(place)] = torch.cat([held, held[-1:].expand(width - len(held))])  # naming one twice changes nothing
    record = KeepRecord("case", 0, LENGTH, rows.to(torch.int32).numpy())
    seen = Visibility([[record]], len(tokens), HEADS, KV_HEADS)
    return masked_logits(model, tokens, seen, LENGTH - 1).log_softmax(dim=-1)


@pytest.mark.parametrize("question", [0, 1, 7])
def test_answers_are_those_of_a_model_under_masks(
    model: Any, context: Prefilled, tokens: list[int], question: int
) -> None:
    """For equal and unequal counts at once; the context's own prediction is from before the eviction."""
    kept = torch.stack(
        [
            torch.ones(context.x.keys.shape[:3], dtype=torch.bool),
            nitro_candidate("kvdiff").prepare(context)(40),
            nitro_candidate("random").prepare(context)(60),
            global_candidate().prepare(context)(44),
        ]
    )
    asked, answer = tokens[LENGTH : LENGTH + question], tokens[LENGTH + question :]
    rows = answer_rows(model, context, kept, asked, answer)
    for mask, row in zip(kept, rows, strict=True):
        want = brute_force(model, tokens, mask)[question : question + len(answer)]
        target = torch.tensor(answer)
        assert row["nll"] == pytest.approx(-float(want.gather(1, target[:, None]).mean()), abs=2e-4)
        assert row["exact"] == bool((want.argmax(dim=-1) == target).all())
        assert row["tokens"] == len(answer)
    assert len({round(row["nll"], 3) for row in rows}) == len(rows)


def test_an_answer_that_the_model_gives_is_exact(model: Any, context: Prefilled, tokens: list[int]) -> None:
    kept = nitro_candidate("vdiff").prepare(context)(50)
    asked, answer = tokens[LENGTH : LENGTH + 3], []
    for _ in range(3):
        answer.append(int(brute_force(model, [*tokens[:LENGTH], *asked, *answer], kept)[-1].argmax()))
    assert answer_rows(model, context, kept[None], asked, answer)[0]["exact"]
    wrong = [*answer[:-1], (answer[-1] + 1) % 500]
    assert not answer_rows(model, context, kept[None], asked, wrong)[0]["exact"]


def test_what_is_known_of_a_context(model: Any, context: Prefilled, tokens: list[int]) -> None:
    full = torch.ones(context.x.keys.shape[:3], dtype=torch.bool)
    whole = masked_logits(model, tokens[:LENGTH], Visibility([], LENGTH, HEADS, KV_HEADS)).log_softmax(dim=-1)
    want = -whole[:-1].gather(1, torch.tensor(tokens[1:LENGTH])[:, None])[:, 0]
    torch.testing.assert_close(context.surprisal[1:], want, atol=1e-4, rtol=1e-4)
    assert context.surprisal[0] == 0
    torch.testing.assert_close(context.last, whole[-1], atol=1e-4, rtol=1e-4)
    # RoPE undone: the first layer's keys of equal tokens are equal wherever they stand.
    again = prefill(model, [*tokens[:40], *tokens[:40]], "twice")
    keys = again.x.unrotated_keys()[0]
    torch.testing.assert_close(keys[:, :40], keys[:, 40:], atol=1e-4, rtol=1e-4)
    assert full.shape == (LAYERS, KV_HEADS, LENGTH)


@pytest.mark.parametrize("name", SCORES)
def test_simulated_scores_keep_the_best(context: Prefilled, name: str) -> None:
    scores = SCORES[name](context.x)
    assert scores.shape == context.x.keys.shape[:3]
    kept = simulated_candidate(name).prepare(context)(45)
    assert bool((kept.sum(dim=-1) == 45).all())
    assert bool(kept[..., :SINKS].all())
    assert bool(kept[..., -WINDOW:].all())
    free = slice(SINKS, LENGTH - WINDOW)
    inside, scored = kept[..., free], scores[..., free]
    lowest = scored.masked_fill(~inside, torch.inf).amin(dim=-1)
    assert bool((lowest >= scored.masked_fill(inside, -torch.inf).amax(dim=-1)).all())


def test_leverage_does_not_depend_on_how_channels_are_mixed() -> None:
    draw = torch.Generator().manual_seed(0)
    rows = torch.randn(1, 1, 200, 4, generator=draw) * torch.tensor([1.0, 1.0, 1.0, 1.1])
    rotation = torch.linalg.qr(torch.randn(4, 4, generator=draw)).Q
    torch.testing.assert_close(leverage(rows @ rotation), leverage(rows), atol=1e-3, rtol=1e-3)
    far = rows.clone()
    far[0, 0, 17] += 9.0
    assert int(leverage(far)[0, 0].argmax()) == 17


def test_the_largest_among_neighbours() -> None:
    got = neighbour_max(torch.tensor([[[0.0, 3.0, 1.0, -1.0, -2.0]]]), 1)
    assert got.flatten().tolist() == [3.0, 3.0, 3.0, 1.0, -1.0]


@settings(max_examples=40)
@given(seed=st.integers(0, 2**31), count=st.integers(FORCED, LENGTH))
def test_all_heads_compete_for_the_same_places(seed: int, count: int) -> None:
    x = _input(seed)
    scores = torch.randn(x.keys.shape[:3], generator=torch.Generator().manual_seed(seed))
    kept = keep_global(scores, x, count)
    counts = kept.sum(dim=-1)
    assert int(counts.sum()) == count * counts.numel()
    assert int(counts.min()) >= floor_of(count, x)
    assert bool(kept[..., :SINKS].all() & kept[..., -WINDOW:].all())
    # By brute force: a slot that is in no floor stays if it is among the best of those.
    floor = order(scores, x) < floor_of(count, x)
    rest = sorted(scores[~floor].tolist(), reverse=True)
    open_places = count * counts.numel() - int(floor.sum())
    assert sorted(scores[kept & ~floor].tolist(), reverse=True) == rest[:open_places]


@settings(max_examples=60)
@given(
    weights=st.lists(st.floats(0, 100, width=32), min_size=6, max_size=6).filter(lambda w: max(w) > 0),
    count=st.integers(FORCED, LENGTH),
)
def test_counts_follow_weights_within_their_bounds(weights: list[float], count: int) -> None:
    x = _input(0)
    found = counts_of(torch.tensor(weights).view(LAYERS, KV_HEADS), count, x)
    assert int(found.sum()) == count * found.numel()
    assert int(found.min()) >= floor_of(count, x)
    assert int(found.max()) <= LENGTH
    of = sorted(zip(weights, found.flatten().tolist(), strict=True))
    assert all(less <= more + 1 for (_, less), (_, more) in pairwise(of))


def test_counts_in_proportion_where_no_bound_is_met() -> None:
    x = _input(0)
    found = counts_of(torch.tensor([[1.0, 1.0], [1.0, 1.5], [1.5, 1.0]]), 63, x)
    assert found.tolist() == [[54, 54], [54, 81], [81, 54]]


def test_tables_repeat_what_they_were_made_of(context: Prefilled) -> None:
    table = table_of([context], 0.5)
    kept = keep_global(global_scores(context.x), context.x, 48)
    assert table.mean() == pytest.approx(1.0)
    candidate = table_candidate("table", {0.5: table, 0.1: torch.ones_like(table)}, policies.get("kvdiff").score)
    got = candidate.prepare(context)(48)
    assert torch.equal(got.sum(dim=-1), kept.sum(dim=-1))
    # Another share has another table; equal weights are the policy itself.
    near = candidate.prepare(context)(40)
    assert not torch.equal(near.sum(dim=-1), torch.full((LAYERS, KV_HEADS), 40))
    even = table_candidate("even", {0.5: torch.ones_like(table)}, policies.get("kvdiff").score).prepare(context)(48)
    assert torch.equal(even, nitro_candidate("kvdiff").prepare(context)(48))


def test_surprising_tokens_stay_in_all_heads(context: Prefilled) -> None:
    surprise = torch.zeros(LENGTH)
    surprise[50] = 10.0  # and, by the mean over two neighbours on either side, 48 to 52
    kept = surprisal_candidate("A3", policies.get("vdiff").score).prepare(replace(context, surprisal=surprise))(46)
    assert bool(kept[..., 48:53].all())
    assert bool((kept.sum(dim=-1) == 46).all())
    assert not torch.equal(kept[0, 0], kept[1, 1])


def test_attention_to_the_answer(model: Any, context: Prefilled, tokens: list[int]) -> None:
    place = place_of(tokens[30:33], tokens[:LENGTH])
    assert place == slice(30, 33)
    with pytest.raises(ValueError, match="does not stand"):
        place_of((511, 511), tokens[:LENGTH])
    asked, answer = tokens[LENGTH : LENGTH + 4], tokens[LENGTH + 4 : LENGTH + 6]
    whole = attention_paid(model, context, asked, answer, slice(0, LENGTH))
    part = attention_paid(model, context, asked, answer, place)
    assert part.shape == (LAYERS, KV_HEADS)
    assert bool((part > 0).all() & (part < whole).all() & (whole < 1).all())
    from transformers import AutoModelForCausalLM

    eager = AutoModelForCausalLM.from_config(model.config, attn_implementation="eager")
    eager.load_state_dict(model.state_dict())
    with torch.inference_mode():
        weights = eager(torch.tensor([tokens[: LENGTH + 5]]), output_attentions=True).attentions
    want = torch.stack([one[0, :, -2:, place].sum(-1).mean(-1).view(KV_HEADS, -1).mean(-1) for one in weights])
    torch.testing.assert_close(part, want, atol=1e-5, rtol=1e-4)


def _cases(tokens: list[int], count: int) -> list[Case]:
    return [
        Case(f"task-96-{i}", tuple(tokens[i : i + LENGTH]), tuple(tokens[i : i + 3]), tuple(tokens[i + 5 : i + 7]), 0.1)
        for i in range(count)
    ]


def test_a_tournament_goes_on_where_it_was(model: Any, tokens: list[int], tmp_path: Path) -> None:
    path, both, where = tmp_path / "out.jsonl", Models(model, model), {"task": "task", "length": LENGTH}
    first = [(nitro_candidate("streaming"), [0.5])]
    more = [(nitro_candidate("streaming"), [0.5, 0.75]), (nitro_candidate("kvdiff"), [0.75])]
    store = SimStore(path, {"seed": 0})
    cases = _cases(tokens, 3)
    assert list(play(both, cases[:2], where, first, store)) == [2, 2]
    with path.open("a") as out:
        out.write('{"cut o')
    again = SimStore(path, {"seed": 0})
    assert again.rows == store.rows
    assert list(play(both, cases, where, more, again)) == [2, 2, 4]
    assert list(play(both, cases, where, more, again)) == []
    fresh = SimStore(tmp_path / "fresh.jsonl", {"seed": 0})
    list(play(both, cases, where, more, fresh))
    assert fresh.rows.keys() == again.rows.keys()
    for key, row in fresh.rows.items():
        assert row["nll"] == pytest.approx(again.rows[key]["nll"], abs=1e-5)
    manifest, rows = read(path)
    assert manifest == {"seed": 0}
    assert len(rows) == 12
    with pytest.raises(SettingsError, match=r"other settings \(contexts, seed\)"):
        SimStore(path, {"seed": 1, "contexts": 3})
    path.write_text("nothing\n")
    with pytest.raises(SettingsError, match="is damaged"):
        read(path)
    with pytest.raises(SettingsError, match="cannot be read"):
        read(tmp_path / "none.jsonl")


def test_a_candidate_that_keeps_too_much_is_noticed(context: Prefilled) -> None:
    scores = torch.zeros(context.x.keys.shape[:3])
    kept = best(scores, context.x)(50)
    one = Candidate("one", "nitro", lambda _: best(scores, context.x))
    assert checked(kept, 50, one) is kept
    with pytest.raises(AssertionError, match="keeps 300 slots"):
        checked(kept, 49, one)
    moved = kept.clone()
    moved[0, 0, int(kept[0, 0].byte().argmin())] = True
    moved[0, 1, SINKS] = False  # the best of equal scores is the first
    with pytest.raises(AssertionError, match="unequal counts"):
        checked(moved, 50, one)


def _row(case: int, candidate: str, kind: str, budget: float, exact: bool, nll: float) -> dict[str, Any]:
    where = {"task": "needle-text", "length": 512, "case": f"needle-text-512-{case}", "depth": case / 12}
    return {**where, "candidate": candidate, "kind": kind, "budget": budget, "exact": exact, "nll": nll, "tokens": 8}


def test_tables_have_the_figures_of_nitro_eval() -> None:
    rows = [_row(i, "full", "full", 1.0, True, 0.1) for i in range(12)]
    for i in reversed(range(12)):
        rows.append(_row(i, "kvdiff", "nitro", 0.25, i < 9, 0.2))
        rows.append(_row(i, "kvpress KeyDiff", "kvpress", 0.25, i % 2 == 0, 0.5))
    cells = cells_of(rows)
    assert [row["depth"] for row in cells["needle-text", 512, "kvdiff", 0.25]] == [i / 12 for i in range(12)]
    (table,) = tables(rows)
    assert "| full cache | 1.00 [0.76, 1.00] · 0.10 |" in table
    assert "| kvdiff | 0.75 [0.47, 0.91] · 0.20 |" in table
    assert table.index("Nitro's policies") < table.index("kvdiff") < table.index("kvpress KeyDiff")
    places = [("needle-text", 512)]
    found = pooled(cells, places, "kvdiff", 0.25)
    assert found is not None
    assert found[0].value == 0.75
    assert pooled(cells, places, "kvdiff", 0.5) is None
    # Nine hits against six on the same cases: five won, two lost.
    differs = difference(cells, places, "kvdiff", "kvpress KeyDiff", 0.25)
    assert differs.value == pytest.approx(3 / 12)
    assert differs.low < 0 < differs.high
    (against,) = versus(rows, "kvpress KeyDiff")
    assert "| kvdiff | +0.25 [" in against
    assert against.count("\n") == 2
    assert not list(versus(rows, "vdiff"))
    (standing,) = standings(rows)
    assert json.dumps(standing).index("kvdiff (nitro)") < json.dumps(standing).index("kvpress KeyDiff (kvpress)")


def test_text_that_goes_on_has_no_hits_to_stand_by() -> None:
    rows = [_row(i, "full", "full", 1.0, False, 3.0) | {"task": "perplexity"} for i in range(4)]
    rows += [_row(i, "kvdiff", "nitro", 0.25, False, 3.5) | {"task": "perplexity"} for i in range(4)]
    assert not list(standings(rows))
    assert not list(versus(rows, "kvdiff"))
    (table,) = tables(rows)
    assert "| kvdiff | +0.500 [" in table


def test_agreement_with_nitro_eval_is_counted_case_by_case() -> None:
    rows = [_row(i, "kvdiff", "nitro", 0.25, i < 9, 0.2) for i in range(12)] + [
        _row(0, "D", "unequal", 0.25, True, 0.1)
    ]
    served = [{**row, "policy": row["candidate"], "exact": i < 8, "nll": 0.2 + i / 1000} for i, row in enumerate(rows)]
    found = agreement(rows[:-1], served)
    assert list(found) == ["needle-text 512, kvdiff at 0.25"]
    assert found["needle-text 512, kvdiff at 0.25"] == (12, 11, pytest.approx(0.011))
    with pytest.raises(SettingsError, match="no case is in both"):
        agreement(rows[-1:], served[:3])


def _input(seed: int) -> Any:
    from nitro.policies.base import ScoreInput

    keys = torch.randn(LAYERS, KV_HEADS, LENGTH, 8, generator=torch.Generator().manual_seed(seed))
    return ScoreInput(
        keys=keys,
        values=keys,
        positions=torch.arange(LENGTH, dtype=torch.int32).expand(LAYERS, KV_HEADS, LENGTH),
        layers=torch.arange(LAYERS),
        heads=torch.arange(KV_HEADS),
        request_key=0,
        logical_len=LENGTH,
        sinks=SINKS,
        window=WINDOW,
        seed=0,
    )
