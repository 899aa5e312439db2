"""The bridge: counts from workers to the scheduler, through rings in shared memory. It never blocks either side.

docs/bridge.md says how it works. This package knows neither vLLM nor torch.
"""

from nitro.ipc.layout import MESSAGE, Messages
from nitro.ipc.ring import Consumer, ConsumerCounters, Producer, ProducerCounters
from nitro.ipc.segments import collect_stale, new_engine_id

__all__ = [
    "MESSAGE",
    "Consumer",
    "ConsumerCounters",
    "Messages",
    "Producer",
    "ProducerCounters",
    "collect_stale",
    "new_engine_id",
]
