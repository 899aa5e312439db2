"""A plan that needs no GPU."""

from __future__ import annotations

import pytest

from nitro.bench import explain, shapes
from nitro.bench.plan import Engine, Load, Plan
from nitro.device import Device

CPU = Device("cpu", "a test's CPU", {"dtype": "float32", "block_size": 32, "enforce_eager": True})
NITRO = {"policy": "keydiff", "budget": 48, "slack": 16}


@pytest.fixture
def plan() -> Plan:
    """Four engines of the attribution, two rounds."""
    engines = tuple(Engine(name, 20, NITRO if name.startswith("nitro") else None) for name in explain.WAY)
    return Plan(shapes.find("tiny"), engines, (Load(2, 8, 8),), CPU, 2, record=True)
