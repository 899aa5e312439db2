"""The attribution on steps whose truth is known: costs are found again, and parts sum up whatever the truth is."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nitro.bench.attribution import PARTS, Costs, Steps, explained, fit, mean, split
from nitro.bench.fit import nonnegative, robust
from nitro.errors import IntegrityError

TRUTH = Costs({"stock": 4e-3, "nitro": 3e-3}, {"stock": 15e-6, "nitro": 9e-6}, 2.5e-6, 1e-10, 4e-8, 2e-4)
Time = Callable[[Steps, np.random.Generator], np.ndarray]


def exact(steps: Steps, _: np.random.Generator) -> np.ndarray:
    return TRUTH.predict(steps)


def noisy(steps: Steps, rng: np.random.Generator) -> np.ndarray:
    """Twentieths of noise, and one step in fifty that waits for something else."""
    seconds = TRUTH.predict(steps) * rng.normal(1.0, 0.05, len(steps))
    return seconds + np.where(rng.random(len(steps)) < 0.02, 0.2, 0.0)


def overlapping(steps: Steps, rng: np.random.Generator) -> np.ndarray:
    """The host and the device work at the same time: not the model's form."""
    device = TRUTH.token * steps.columns["tokens"] + TRUTH.kv_token * steps.columns["kv_tokens"] + 1e-3
    return np.maximum(device, TRUTH.step[steps.kind] + TRUTH.request[steps.kind] * steps.columns["requests"])


def a_run(kind: str, time: Time, *, most: int, held: int | None, preempt: bool, seed: int = 0) -> Steps:
    """Requests that join in chunks of a prompt and then decode, at most ``most`` at once, holding at most ``held``."""
    rng = np.random.default_rng(seed)
    rows, ages, waiting = [], [], 200
    while waiting or ages:
        prompts = min(waiting, 4, most - len(ages))
        again = 300 * int(preempt and prompts and rng.random() < 0.3)
        ages = [age + 1 for age in ages if age < 300]
        lengths = [100 + age if held is None else min(100 + age, held) for age in ages]
        pairs, pairs_again = prompts * 5000 + again * 150, again * 150
        tokens = len(ages) + 100 * prompts + again
        evictions = 0 if held is None else sum(100 + age > held and (100 + age) % 30 == 0 for age in ages)
        rows.append((len(ages) + prompts, tokens, again, pairs, pairs_again, sum(lengths), evictions))
        ages += [0] * prompts
        waiting -= prompts
    names = ("requests", "tokens", "again", "pairs", "pairs_again", "kv_tokens", "evictions")
    columns = dict(zip(names, np.array(rows, np.float64).T, strict=True))
    blank = Steps(kind, 0.0, columns | {"seconds": np.zeros(len(rows))})
    seconds = time(blank, rng)
    return Steps(kind, float(seconds.sum()) + 0.5, columns | {"seconds": seconds})


def four(time: Time) -> list[Steps]:
    return [
        a_run("stock", time, most=40, held=None, preempt=True, seed=1),
        a_run("stock", time, most=200, held=None, preempt=False, seed=2),
        a_run("nitro", time, most=200, held=150, preempt=False, seed=3),
        a_run("nitro", time, most=120, held=150, preempt=False, seed=4),
    ]


def costs_of(costs: Costs) -> list[float]:
    return [*costs.step.values(), *costs.request.values(), costs.token, costs.pair, costs.kv_token, costs.eviction]


def test_exact_steps_give_their_costs_back() -> None:
    assert costs_of(fit(four(exact))) == pytest.approx(costs_of(TRUTH), rel=1e-6)


def test_noise_and_stalls_move_costs_little_and_the_parts_less() -> None:
    runs = four(noisy)
    costs = fit(runs)
    assert costs.kv_token == pytest.approx(TRUTH.kv_token, rel=0.25)
    assert costs.token == pytest.approx(TRUTH.token, rel=0.25)
    stock, nitro = runs[0], runs[3]
    found, true = split(stock, nitro, costs), split(stock, nitro, TRUTH)
    whole = stock.wall_s - nitro.wall_s
    for name in PARTS:
        assert found[name] == pytest.approx(true[name], abs=0.08 * whole), name
    # The stalls are the residue's, not some cost's: one in fifty steps, of 0.2 s.
    assert costs.rest_s(stock) == pytest.approx(TRUTH.rest_s(stock), abs=0.1 * stock.total("seconds"))
    assert costs.rest_s(stock) > 0.5 * TRUTH.rest_s(stock) > 0


def test_known_parts() -> None:
    """One thing at a time differs between two runs, and its part has all of the difference."""
    base = {name: np.array([value]) for name, value in TWO.items()}
    costs = Costs({"stock": 1.0, "nitro": 0.5}, {"stock": 0.1, "nitro": 0.05}, 0.01, 1e-4, 1e-3, 0.03)

    def steps(kind: str = "stock", outside: float = 0.0, rest: float = 0.0, **changes: float) -> Steps:
        columns = base | {name: np.array([value]) for name, value in changes.items()}
        made = Steps(kind, 0.0, columns | {"seconds": np.zeros(1)})
        seconds = costs.predict(made) + rest
        return Steps(kind, float(seconds.sum()) + outside, columns | {"seconds": seconds})

    plain = steps()
    cases = {
        "recomputation": (steps(tokens=150.0, again=50.0, pairs=900.0, pairs_again=400.0), 50 * 0.01 + 400 * 1e-4),
        "kv": (steps(kv_tokens=700.0), 200 * 1e-3),
        "evictions": (steps(evictions=2.0), 0.06),
        "tokens": (steps(tokens=150.0), 0.5),
        "rest": (steps(rest=0.25), 0.25),
        "outside": (steps(outside=0.125), 0.125),
    }
    for name, (before, expected) in cases.items():
        found = split(before, plain, costs)
        assert found == {part: pytest.approx(expected if part == name else 0.0, abs=1e-12) for part in PARTS}, name
    found = split(plain, steps("nitro"), costs)
    assert found == {part: pytest.approx(1.0 if part == "host" else 0.0, abs=1e-12) for part in PARTS}
    doubled = Steps("stock", 2 * plain.wall_s, {name: np.repeat(each, 2) for name, each in plain.columns.items()})
    assert split(doubled, plain, costs)["batches"] == pytest.approx(1.0)


TWO = {"requests": 10.0, "tokens": 100.0, "again": 0.0, "pairs": 500.0, "pairs_again": 0.0, "kv_tokens": 500.0}
TWO |= {"evictions": 0.0}


@pytest.mark.parametrize("time", [exact, noisy, overlapping])
def test_parts_sum_to_the_whole_and_arrows_to_the_way(time: Time) -> None:
    runs = four(time)
    costs = fit(runs)
    for before, after in pairwise(runs):
        assert sum(split(before, after, costs).values()) == pytest.approx(before.wall_s - after.wall_s, abs=1e-9)
    arrows = [split(before, after, costs) for before, after in pairwise(runs)]
    direct = split(runs[0], runs[-1], costs)
    # Steps change their cost in the second arrow, at other counts than on the direct way: only these two may differ.
    for name in PARTS.keys() - {"batches", "host"}:
        assert sum(arrow[name] for arrow in arrows) == pytest.approx(direct[name], abs=1e-9), name
    assert sum(a["batches"] + a["host"] for a in arrows) == pytest.approx(direct["batches"] + direct["host"], abs=1e-9)


def test_hidden_work_costs_nothing() -> None:
    """Where the host is the wall, keys and values are read meanwhile, and fewer of them would save nothing."""
    runs = four(overlapping)
    costs = fit(runs)
    assert costs.kv_token < 0.1 * TRUTH.kv_token
    assert costs.request["stock"] == pytest.approx(TRUTH.request["stock"], rel=0.1)
    assert explained(runs[1], costs) > 0.95


def test_means_sum_to_the_mean() -> None:
    runs = four(noisy)
    parts = [split(runs[0], runs[3], fit(runs)), split(runs[0], runs[2], fit(runs))]
    expected = runs[0].wall_s - (runs[2].wall_s + runs[3].wall_s) / 2
    assert sum(mean(parts).values()) == pytest.approx(expected)


def test_no_steps_are_refused() -> None:
    with pytest.raises(IntegrityError, match="no recorded steps"):
        fit([])


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32 - 1), columns=st.integers(1, 6), spare=st.integers(0, 20))
def test_least_squares_obey_the_optimality_conditions(seed: int, columns: int, spare: int) -> None:
    rng = np.random.default_rng(seed)
    matrix, target = rng.normal(size=(columns + spare, columns)), rng.normal(size=columns + spare)
    matrix *= 10.0 ** rng.integers(-6, 7, columns)
    x = nonnegative(matrix, target)
    gradient = (matrix / np.linalg.norm(matrix, axis=0)).T @ (target - matrix @ x)
    assert (x >= 0).all()
    assert gradient.max() < 1e-7  # nothing would get better by growing
    assert np.abs(gradient[x > 0]).max(initial=0.0) < 1e-7  # nor by shrinking


def test_columns_of_zeros_cost_nothing_and_outliers_little() -> None:
    rng = np.random.default_rng(0)
    matrix = np.stack([np.ones(200), np.arange(200.0), np.zeros(200)], axis=1)
    target = matrix @ [1.0, 0.5, 0.0] + rng.normal(0, 0.01, 200)
    target[::20] += 50.0
    assert robust(matrix, target) == pytest.approx([1.0, 0.5, 0.0], rel=0.05)
    assert nonnegative(matrix, target)[0] > 2.0
