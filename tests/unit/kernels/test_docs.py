"""The example of docs/kernels.md does what it says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

from .conftest import interpreted

PAGE = Path(__file__).parents[3] / "docs" / "kernels.md"


@interpreted
def test_the_example_runs() -> None:
    (example,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    before, after = example.split("# What the data decides")
    found: dict[str, Any] = {}
    torch.manual_seed(0)
    exec(before, found)
    assert found["counts"].tolist() == [[[8, 8], [8, 8]], [[7, 7], [7, 7]]]
    kept = found["positions"][:, [3, 1]].transpose(1, 2).reshape(2, 2, 8)
    for row in kept.reshape(-1, 8).tolist():
        assert len(set(row)) == 8
        assert {0, 12, 13} <= set(row) <= set(range(14))
    exec("# " + after, found)
    counts = found["counts"]
    assert (counts >= 3).all()
    mask = found["mask"][..., :8].sum(-1)
    assert torch.equal(counts[0].long(), mask.long())
