"""The definitions once more, slowly: one anchor at a time, float64, the d x d problem written out."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Oracle:
    """T(x) of one anchor, the fitted updates of the rows, and the figures that say how well-posed the fit is."""

    tokenwise: np.ndarray
    fitted: np.ndarray
    spread: float
    gap: float


def fit_one(name: str, x: np.ndarray, rows: np.ndarray, outputs: np.ndarray, ridge: float) -> Oracle:
    """Fit one map on rows (k, d) and evaluate it at x (d,)."""
    x, rows, outputs = (np.asarray(a, dtype=np.float64) for a in (x, rows, outputs))
    kind, _, size = name.partition(":")
    updates = outputs - rows
    energy = np.sum(rows**2)
    if kind != "mean" and energy == 0:
        return Oracle(x, np.zeros_like(rows), 0.0, 1.0)
    sigma = np.linalg.svd(rows, compute_uv=False)
    spread = sigma[-1] / sigma[0] if sigma[0] > 0 else 0.0
    move, gap = MAPS[kind](rows, updates, ridge, size)
    return Oracle(move(x), np.stack([move(row) - row for row in rows]), spread, gap)


def _identity(rows, updates, ridge, size):
    return lambda x: x, 1.0


def _mean(rows, updates, ridge, size):
    return lambda x: x + updates.mean(0), 1.0


def _scalar(rows, updates, ridge, size):
    k = len(rows)
    penalty = ridge * np.mean(np.sum(rows**2, 1))
    factor = (np.sum(rows * (rows + updates)) + k * penalty) / (np.sum(rows * rows) + k * penalty)
    return lambda x: factor * x, 1.0


def _diagonal(rows, updates, ridge, size):
    penalty = ridge * np.sum(rows**2) / rows.shape[1]
    factors = (np.sum(rows * (rows + updates), 0) + penalty) / (np.sum(rows**2, 0) + penalty)
    return lambda x: np.maximum(0, factors) * x, 1.0


def _ridge_matrix(rows, updates, penalty):
    d = rows.shape[1]
    return np.linalg.solve(rows.T @ rows + penalty * np.eye(d), rows.T @ updates).T


def _linear(rows, updates, ridge, size):
    matrix = _ridge_matrix(rows, updates, ridge * np.mean(np.sum(rows**2, 1)))
    return lambda x: x + matrix @ x, 1.0


def _affine(rows, updates, ridge, size):
    middle, mean = rows.mean(0), updates.mean(0)
    centered = rows - middle
    penalty = ridge * np.mean(np.sum(centered**2, 1))
    if np.ptp(rows, axis=0).max() == 0:
        return lambda x: x + mean, 1.0
    matrix = _ridge_matrix(centered, updates - mean, penalty)
    return lambda x: x + mean + matrix @ (x - middle), 1.0


def _low_rank(rows, updates, ridge, size):
    d = rows.shape[1]
    rank = int(size)
    penalty = ridge * np.mean(np.sum(rows**2, 1))
    matrix = _ridge_matrix(rows, updates, penalty)
    hat_times_updates = rows @ matrix.T
    values, vectors = np.linalg.eigh(updates.T @ hat_times_updates)
    top = vectors[:, ::-1][:, :rank]
    sigma = np.sqrt(np.maximum(values[::-1], 0))
    gap = (sigma[rank - 1] - sigma[rank]) / sigma[0] if rank < d and sigma[0] > 0 else 1.0
    return lambda x: x + top @ (top.T @ (matrix @ x)), gap


def _orthogonal(rows, updates, ridge, size):
    d = rows.shape[1]
    penalty = ridge * np.mean(np.sum(rows**2, 1))
    target = (rows + updates).T @ rows + penalty * np.eye(d)
    left, sigma, right = np.linalg.svd(target)
    scale = sigma.sum() / (np.sum(rows**2) + d * penalty) if size == "scaled" else 1.0
    return lambda x: scale * (left @ (right @ x)), sigma[-1] / sigma[0]


MAPS = {
    "identity": _identity,
    "mean": _mean,
    "scalar": _scalar,
    "diagonal": _diagonal,
    "linear": _linear,
    "affine": _affine,
    "low_rank": _low_rank,
    "orthogonal": _orthogonal,
}


def dominant_subspace(fitted: np.ndarray, size: int, eps: float) -> np.ndarray:
    """Right singular vectors (d, m) of the fitted updates, at most ``size``."""
    _, sigma, right = np.linalg.svd(fitted.astype(np.float64), full_matrices=False)
    keep = sigma > max(fitted.shape) * eps * sigma[0]
    return right[keep][:size].T


def nearest(x: np.ndarray, pool: np.ndarray, k: int, forbidden: set[int]) -> list[int]:
    """The k nearest pool rows of one anchor by (distance, index)."""
    distances = ((pool.astype(np.float64) - x.astype(np.float64)) ** 2).sum(1)
    order = [j for j in np.lexsort((np.arange(len(pool)), distances)) if j not in forbidden]
    return order[:k]
