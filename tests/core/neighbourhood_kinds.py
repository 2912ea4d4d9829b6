"""Pools of every awkward kind, each as anchors, pool inputs and pool outputs."""

import numpy as np

KINDS = (
    "random", "rank_deficient", "duplicates", "constant", "zero", "more_rows_than_width", "tiny", "huge",
    "far_from_origin", "zero_updates", "constant_updates", "one_hot",
)  # fmt: skip


def make(kind: str, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """Anchors (n, d), pool inputs (p, d), pool outputs (p, d) and k."""
    rng = np.random.default_rng(seed)
    d, p, n, k = (6, 60, 7, 24) if kind == "more_rows_than_width" else (24, 60, 7, 10)
    pool = rng.normal(size=(p, d))
    anchors = rng.normal(size=(n, d))
    matrix = rng.normal(size=(d, d)) / d**0.5
    if kind == "rank_deficient":
        basis = rng.normal(size=(4, d))
        pool, anchors = rng.normal(size=(p, 4)) @ basis, rng.normal(size=(n, 4)) @ basis
    if kind == "duplicates":
        pool = np.repeat(pool[: p // 5], 5, 0)
    if kind == "constant":
        pool = np.repeat(pool[:1], p, 0)
    if kind == "zero":
        pool = np.zeros_like(pool)
    if kind == "far_from_origin":
        pool, anchors = pool + 30 * matrix[0], anchors + 30 * matrix[0]
    if kind == "one_hot":
        pool = np.eye(d)[rng.integers(d, size=p)]
    outputs = pool + pool @ matrix + 0.3 * rng.normal(size=(p, d))
    if kind == "zero_updates":
        outputs = pool.copy()
    if kind == "constant_updates":
        outputs = pool + matrix[0]
    scale = {"tiny": 1e-25, "huge": 1e25}.get(kind, 1.0)
    return anchors * scale, pool * scale, outputs * scale, k
