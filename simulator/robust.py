"""Regression that a few odd measurements do not pull far, with expectations where data is thin."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Float64 = NDArray[np.float64]

TO_SIGMA = 1.4826  # median absolute deviation -> standard deviation, Gaussian
_HUBER = 1.345  # in units of spread: 95 % as efficient as least squares on Gaussian noise
_ROUNDS = 50
_SMALLEST_NOISE = 1e-3  # relative: clocks and medians are no better


def robust_fit(
    matrix: Float64, y: Float64, expected: Float64, spreads: Float64, noise: float
) -> Float64:
    """Return the most likely parameters under Huber's loss and a Gaussian prior.

    Rows are in units in which their noise is alike; `noise` is its standard deviation.
    """
    noise = max(noise, _SMALLEST_NOISE)
    prior = np.diag(noise / spreads)
    weights = np.ones(len(y))
    fitted = expected
    for _ in range(_ROUNDS):
        root = np.sqrt(weights)[:, None]
        solution: Float64 = np.linalg.lstsq(
            np.concatenate((matrix * root, prior)),
            np.concatenate((y * root[:, 0], prior @ expected)),
            rcond=None,
        )[0]
        residual = np.abs(y - matrix @ solution)
        sigma = max(noise, TO_SIGMA * float(np.median(residual)))
        weights = np.minimum(1.0, _HUBER * sigma / np.maximum(residual, 1e-300))
        if np.allclose(solution, fitted, rtol=1e-9, atol=1e-12):
            break
        fitted = solution
    return fitted
