"""Least squares with coefficients that must not be negative, weighted so that relative errors count."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from dbsp_core.utils.errors import UserError

__all__ = ["Fit", "fit"]


@dataclass(frozen=True)
class Fit:
    """Coefficients ≥ 0, one per column, and the relative errors of the samples, float64[samples]."""

    coefficients: tuple[float, ...]
    errors: np.ndarray

    @property
    def residual(self) -> float:
        """Root mean square of the relative errors."""
        return float(np.sqrt(np.mean(self.errors**2)))


def fit(columns: np.ndarray, seconds: np.ndarray, given: np.ndarray | float = 0.0) -> Fit:
    """Finds the coefficients ≥ 0 with the least sum of squared relative errors.

    Every set of coefficients that are not zero is tried: exact, and there are few.

    Args:
        columns: float64[samples, n], n ≤ 6.
        seconds: float64[samples] > 0.
        given: float64[samples], seconds that are explained already.

    Raises:
        UserError: There are fewer samples than columns.
    """
    columns, seconds = np.asarray(columns, dtype=np.float64), np.asarray(seconds, dtype=np.float64)
    samples, n = columns.shape
    if samples < n or (seconds <= 0).any():
        raise UserError(f"{samples} samples cannot fix {n} constants, or a time is not positive; measure more sizes")
    scaled, wanted = columns / seconds[:, None], np.ones(samples) - given / seconds
    norms = np.linalg.norm(scaled, axis=0)
    scaled = scaled / np.where(norms > 0, norms, 1)
    best, least = np.zeros(n), np.inf
    for size in range(1, n + 1):
        for chosen in itertools.combinations(range(n), size):
            found, *_ = np.linalg.lstsq(scaled[:, chosen], wanted, rcond=None)
            loss = float(((scaled[:, chosen] @ found - wanted) ** 2).sum())
            if (found >= 0).all() and loss < least - 1e-12:
                best, least = np.zeros(n), loss
                best[list(chosen)] = found
    return Fit(tuple((best / np.where(norms > 0, norms, 1)).tolist()), scaled @ best - wanted)
