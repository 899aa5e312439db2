"""What all tests share: Hypothesis' profiles, and what happens to GPU tests on a machine that has none."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings

# No deadlines: test machines are shared. In CI the examples are always the same, so that a red run can be repeated.
settings.register_profile("local", deadline=None)
settings.register_profile(
    "ci", deadline=None, derandomize=True, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("long", deadline=None, max_examples=2000, stateful_step_count=200)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "local"))


@pytest.hookimpl(trylast=True)  # after -m has deselected: torch is imported only if a GPU test is left
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items:
        return
    import torch

    if torch.cuda.is_available():
        return
    if os.environ.get("NITRO_REQUIRE_GPU") == "1":
        raise pytest.UsageError(f"NITRO_REQUIRE_GPU=1, but torch {torch.__version__} sees no CUDA device")
    for item in gpu_items:
        item.add_marker(pytest.mark.skip(reason=f"torch {torch.__version__} sees no CUDA device"))
