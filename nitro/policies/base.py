"""The contract between Nitro and a policy: what a policy is given, and what it must return."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from nitro.errors import SettingsError

if TYPE_CHECKING:
    from nitro.policies.ragged import RaggedInput
    from nitro.policies.rotary import Rotation


@dataclass(frozen=True, slots=True, eq=False)
class ScoreInput:
    """The cached tokens of one request on one worker.

    L is the number of layers, H of KV heads, N of slots (in logical order), D the head dimension.

    Attributes:
        keys: ``[L, H, N, D]``, any floating dtype and strides, as cached (after RoPE); what an FP8 cache
            stands for, in float32.
        values: ``[L, H, N, D]``.
        positions: int32 ``[L, H, N]``, logical position of each slot, ascending along N.
        layers: int64 ``[L]``, index of each layer in the whole model, not among this worker's layers.
        heads: int64 ``[H]``, index of each KV head in the whole model, not among this worker's heads.
        request_key: unsigned 64-bit hash of the user-visible request id; the same on every worker and in every run.
        logical_len: tokens computed so far, counting evicted ones.
        sinks: the first slots, which stay whatever their score.
        window: the last slots, which stay whatever their score.
        seed: ``0 <= seed < 2**63``.
        rotations: how RoPE rotated the keys, one a layer; None where that is not known or nothing was rotated. Empty:
            of no layer.

    Raises:
        ValueError: if shapes or ranges contradict the above.
    """

    keys: Tensor
    values: Tensor
    positions: Tensor
    layers: Tensor
    heads: Tensor
    request_key: int
    logical_len: int
    sinks: int
    window: int
    seed: int
    rotations: tuple[Rotation | None, ...] = ()

    def __post_init__(self) -> None:
        shapes = f"got {list(self.keys.shape)} and {list(self.values.shape)}"
        if self.keys.ndim != 4 or self.values.shape[:3] != self.keys.shape[:3] or self.values.ndim != 4:
            raise ValueError(f"keys and values must be [L, H, N, D]; {shapes}")
        if not self.keys.numel() or not self.values.numel():
            raise ValueError(f"keys and values must not be empty; {shapes}")
        for name, tensor, shape in (
            ("positions", self.positions, self.keys.shape[:3]),
            ("layers", self.layers, self.keys.shape[:1]),
            ("heads", self.heads, self.keys.shape[1:2]),
        ):
            if tensor.shape != shape:
                raise ValueError(f"{name} must be {list(shape)} to match the keys; got {list(tensor.shape)}")
        for name, value, low, high in (
            ("request_key", self.request_key, 0, 2**64),
            ("seed", self.seed, 0, 2**63),
            ("sinks", self.sinks, 0, 2**31),
            ("window", self.window, 1, 2**31),
            ("logical_len", self.logical_len, self.keys.shape[2], 2**31),
        ):
            if not low <= value < high:
                raise ValueError(f"{name}={value} must be at least {low} and below {high}")
        if len(self.rotations) not in (0, self.keys.shape[0]):
            raise ValueError(f"there are {len(self.rotations)} rotations for {self.keys.shape[0]} layers")

    def unrotated_keys(self) -> Tensor:
        """Return the keys with RoPE undone where that is possible: float32 ``[L, H, N, D]``."""
        if not any(self.rotations):
            return as_float32(self.keys)
        found = [
            as_float32(keys) if rotation is None else rotation.undo(keys, where)
            for keys, where, rotation in zip(self.keys, self.positions, self.rotations, strict=True)
        ]
        return torch.stack(found)


class Policy(ABC):
    """Scores cached tokens; the tokens with the highest scores stay.

    A policy is a frozen dataclass whose fields are its options, and ``name`` is what users write. It must be

    - deterministic: equal input gives equal scores, in every process;
    - independent per (layer, KV head): a score depends on nothing of the other layers and heads in the batch, since
      tensor and pipeline parallelism decide which of them one worker sees;
    - free of side effects: it changes neither its input nor itself.

    Sinks and window are forced by the selection, so a policy need not treat them specially.

    Attributes:
        name: what users write.
        capturable: whether a CUDA graph may hold ``score_ragged``: it only launches kernels, and looks at none of the
            lists that it is given, which tell of another step when the graph runs.
    """

    __slots__ = ()

    name: ClassVar[str]
    capturable: ClassVar[bool] = False
    undoes_rope: ClassVar[bool] = False
    """Whether the scores are of keys with RoPE undone; if that is impossible, the user is warned."""

    def __init_subclass__(cls, **kwargs: object) -> None:
        """Do not let a policy with a formula of its own inherit another one's kernels, or what is said of those."""
        super().__init_subclass__(**kwargs)
        if "score" in cls.__dict__ and "score_ragged" not in cls.__dict__:
            cls.score_ragged = Policy.score_ragged  # type: ignore[method-assign]
        if not {"score", "score_ragged"}.isdisjoint(cls.__dict__) and "capturable" not in cls.__dict__:
            cls.capturable = False
        if "score" in cls.__dict__ and "highest" not in cls.__dict__:
            cls.highest = Policy.highest  # type: ignore[method-assign]

    @property
    def highest(self) -> float:
        """Return what no score exceeds: with a threshold beyond it all would go that may. Infinity: unknown."""
        return math.inf

    @abstractmethod
    def score(self, x: ScoreInput) -> Tensor:
        """Return the scores of all slots: float32 ``[L, H, N]``, higher stays, NaN goes first."""

    def score_ragged(self, x: RaggedInput) -> Tensor:
        """Return the same scores for all requests of a step: float32 ``[L, H, total]``, contiguous and new.

        On GPUs; a policy with kernels overrides it, launches a number of them that does not depend on ``x``, and does
        not wait for the device. Otherwise ``score`` is called for one request after the other.
        """
        from nitro.policies.ragged import score_densely

        return score_densely(self, x, checked_score)


def checked_score_ragged(policy: Policy, x: RaggedInput) -> Tensor:
    """Return ``policy.score_ragged(x)`` with its shape, dtype, device and strides checked.

    Raises:
        SettingsError: if the policy breaks its contract.
    """
    scores = policy.score_ragged(x)
    shape = (x.layers.num_layers, x.layers.num_kv_heads, x.batch.total)
    want = (torch.float32, shape, x.layers.device, True)
    got = (scores.dtype, tuple(scores.shape), scores.device, scores.is_contiguous())
    if got != want:
        raise SettingsError(
            f"policy {policy.name!r} returned scores of (dtype, shape, device, contiguous) {got} where its contract "
            f"asks for {want}: correct {type(policy).__module__}.{type(policy).__qualname__}.score_ragged or choose "
            "another policy"
        )
    return scores


def checked_score(policy: Policy, x: ScoreInput) -> Tensor:
    """Return ``policy.score(x)`` with its shape, dtype and device checked, as policies may be anybody's.

    Raises:
        SettingsError: if the policy breaks its contract.
    """
    scores = policy.score(x)
    want = (torch.float32, tuple(x.positions.shape), x.keys.device)
    got = (scores.dtype, tuple(scores.shape), scores.device)
    if got != want:
        raise SettingsError(
            f"policy {policy.name!r} returned scores of (dtype, shape, device) {got} where its contract asks for "
            f"{want}: correct {type(policy).__module__}.{type(policy).__qualname__}.score or choose another policy"
        )
    return scores


def check_number(policy: str, option: str, value: object, low: float, high: float) -> None:
    """Raise SettingsError unless ``value`` is a number (no boolean) with ``low <= value <= high``."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not number or not low <= value <= high:  # type: ignore[operator]
        raise SettingsError(
            f"option {option}={value!r} of policy {policy!r} must be a number between {low:g} and {high:g}: "
            f"set policy_options.{option} within these bounds, or leave it out"
        )


def check_integer(policy: str, option: str, value: object, low: int, high: int) -> None:
    """Raise SettingsError unless ``value`` is an integer (no boolean) with ``low <= value <= high``."""
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise SettingsError(
            f"option {option}={value!r} of policy {policy!r} must be an integer between {low} and {high}: "
            f"set policy_options.{option} within these bounds, or leave it out"
        )


def as_float32(rows: Tensor) -> Tensor:
    """Return ``rows`` in float32 and contiguous, so that sums run in the same order whatever the cache's strides."""
    return rows.to(torch.float32).contiguous()


def row_norms(rows: Tensor) -> Tensor:
    """Return the L2 norms along the last axis, in float32: ``[..., D] -> [...]``; NaN where a norm is not finite.

    So a slot with an infinity or a NaN in it (or a norm beyond float32) can be told apart, and goes first.
    """
    norms: Tensor = torch.linalg.vector_norm(as_float32(rows), dim=-1)
    return norms.masked_fill(~norms.isfinite(), math.nan)


def zero_rows(rows: Tensor, bad: Tensor) -> Tensor:
    """Return float32 ``rows`` ``[..., N, D]`` with zeros where ``bad`` ``[..., N]``, so that sums over N survive them.

    A matmul with weights of zero would not do: zero times infinity is NaN.
    """
    rows = as_float32(rows)
    # On the CPU, looking is cheaper than a copy that is hardly ever needed; elsewhere it would wait for the device.
    if bad.device.type == "cpu" and not bad.any():
        return rows
    return rows.masked_fill(bad.unsqueeze(-1), 0.0)
