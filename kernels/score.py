"""Scores of cached tokens, for a ragged batch of requests, all layers and all KV heads, on the paged caches.

Each function launches a constant number of kernels and never waits for the device; scores against a mean take one more
where a request is so long that several programs share it. They return float32 ``[L, H, total]``, ragged along the last
dimension as `nitro.kernels.paged.RaggedBatch` says. Higher stays. A slot whose key or value is not finite, or has a
square beyond float32, scores NaN and changes no other score. All sums are in float32 and in an order that depends on
the request alone. ``NAME_ref`` is the reference of ``NAME`` in PyTorch.
"""

from __future__ import annotations

from nitro.kernels._score import can_score
from nitro.kernels.score_combine import (
    Scope,
    logical_order,
    logical_order_ref,
    neighbour_mean,
    neighbour_mean_ref,
    rank_sum,
    rank_sum_ref,
    zscore_sum,
    zscore_sum_ref,
)
from nitro.kernels.score_gravity import gravity, gravity_ref
from nitro.kernels.score_lagkv import lagkv, lagkv_ref
from nitro.kernels.score_mean import (
    keydiff,
    keydiff_ref,
    keydiff_unrotated,
    keydiff_unrotated_ref,
    unrotate,
    vnorm_centred,
    vnorm_centred_ref,
)
from nitro.kernels.score_slots import (
    knorm,
    knorm_ref,
    random,
    random_ref,
    random_state,
    streaming,
    streaming_ref,
    vnorm,
    vnorm_ref,
)

__all__ = [
    "Scope",
    "can_score",
    "gravity",
    "gravity_ref",
    "keydiff",
    "keydiff_ref",
    "keydiff_unrotated",
    "keydiff_unrotated_ref",
    "knorm",
    "knorm_ref",
    "lagkv",
    "lagkv_ref",
    "logical_order",
    "logical_order_ref",
    "neighbour_mean",
    "neighbour_mean_ref",
    "random",
    "random_ref",
    "random_state",
    "rank_sum",
    "rank_sum_ref",
    "streaming",
    "streaming_ref",
    "unrotate",
    "vnorm",
    "vnorm_centred",
    "vnorm_centred_ref",
    "vnorm_ref",
    "zscore_sum",
    "zscore_sum_ref",
]
