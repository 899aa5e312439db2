"""RoPE, as far as a policy needs it: the rotation of a layer's cached keys, and how to undo it."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from nitro.kernels import score

if TYPE_CHECKING:
    from nitro.policies.ragged import RaggedInput


class Rotation(NamedTuple):
    """How RoPE rotated the keys of a layer.

    Attributes:
        cos_sin: ``[max_position, rotary_dim]``, of each position the cosines, then the sines, as in the model's own
            rotary embedding, so with its scaling; elements of a key beyond ``rotary_dim`` are not rotated.
        interleaved: pairs are neighbours (GPT-J); otherwise half of ``rotary_dim`` apart (GPT-NeoX, Llama).
    """

    cos_sin: Tensor
    interleaved: bool

    def undo(self, keys: Tensor, positions: Tensor) -> Tensor:
        """Return keys as they were before RoPE: float32 ``[..., D]``; NaN where a position is not in the table.

        Args:
            keys: ``[..., D]``.
            positions: int32 ``[...]``.
        """
        table = self.cos_sin.to(keys.device)
        return score.unrotate(keys.float(), table, positions, interleaved=self.interleaved)


@dataclass(frozen=True, slots=True, eq=False)
class Rotations:
    """What is known of the rotations of a worker's layers.

    Attributes:
        layers: one a layer; None: that layer's keys are scored as they are in the cache. Empty: all of them are.
        problem: why the rotation of some layers, which there is, cannot be undone.
    """

    layers: tuple[Rotation | None, ...] = ()
    problem: str | None = None


def keydiff_unrotated(x: RaggedInput) -> Tensor:
    """Return KeyDiff's scores of keys with RoPE undone, float32 ``[L, H, total]``.

    One launch (two where requests are long) for each run of layers with the same rotation, so one for most models.
    """
    if not any(x.rotations):
        return score.keydiff(x.layers, x.batch)
    out = x.new_scores()
    for _, run in groupby(enumerate(x.rotations), key=lambda item: None if item[1] is None else id(item[1].cos_sin)):
        found = list(run)
        rotation = found[0][1]
        part = slice(found[0][0], found[-1][0] + 1)
        layers = x.layers.part(part.start, part.stop)
        if rotation is None:
            score.keydiff(layers, x.batch, out=out[part])
        else:
            score.keydiff_unrotated(
                layers,
                x.batch,
                rotation.cos_sin,
                x.positions[part],
                interleaved=rotation.interleaved,
                out=out[part],
            )
    return out
