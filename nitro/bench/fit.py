"""Least squares with costs that cannot be negative, on which single stalls have little hold."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
_HUBER = 1.345  # standard deviations from which a residual counts linearly; Huber's usual choice
_MAD_TO_SIGMA = 1.4826
_ITERATIONS = 30


def nonnegative(matrix: Floats, target: Floats) -> Floats:
    """Return the x ≥ 0 that minimises ``|matrix @ x − target|``, by Lawson and Hanson's active sets.

    Args:
        matrix: ``[rows, columns]``; columns of zeros get 0.
        target: ``[rows]``.

    Returns:
        ``[columns]``.
    """
    norms = np.linalg.norm(matrix, axis=0)
    used = np.flatnonzero(norms > 0)
    scaled = matrix[:, used] / norms[used]  # tokens are counted in millions, steps one by one
    x, free = np.zeros(len(used)), np.zeros(len(used), dtype=bool)
    tolerance = 1e-10 * max(float(np.abs(scaled.T @ target).max(initial=0.0)), 1e-300)
    for _ in range(10 * len(used)):
        gradient = scaled.T @ (target - scaled @ x)
        if free.all() or gradient[~free].max() <= tolerance:
            break
        free[np.flatnonzero(~free)[gradient[~free].argmax()]] = True
        trial = _on(scaled, target, free)
        while trial[free].min(initial=1.0) <= 0:
            falling = free & (trial <= 0)
            steps = x[falling] / np.maximum(x[falling] - trial[falling], 1e-300)
            x = x + steps.min() * (trial - x)
            free &= x > 1e-15
            x[~free] = 0.0
            trial = _on(scaled, target, free)
        x = trial
    found = np.zeros(matrix.shape[1])
    found[used] = x / norms[used]
    return found


def robust(matrix: Floats, target: Floats) -> Floats:
    """Return costs as `nonnegative`, but with Huber's weights: what is far off counts by its distance alone."""
    found = nonnegative(matrix, target)
    for _ in range(_ITERATIONS):
        off = np.abs(target - matrix @ found)
        sigma = _MAD_TO_SIGMA * float(np.median(off))
        if sigma <= 1e-12 * max(float(np.abs(target).max(initial=0.0)), 1e-300):
            break  # more than half of the rows are met exactly
        root = np.sqrt(np.minimum(1.0, _HUBER * sigma / np.maximum(off, 1e-300)))
        better = nonnegative(matrix * root[:, None], target * root)
        if np.allclose(better, found, rtol=1e-9, atol=0.0):
            break
        found = better
    return found


def _on(matrix: Floats, target: Floats, free: npt.NDArray[np.bool_]) -> Floats:
    x = np.zeros(matrix.shape[1])
    x[free] = np.linalg.lstsq(matrix[:, free], target, rcond=None)[0]
    return x
