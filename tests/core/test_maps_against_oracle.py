"""Closed-form maps equal the d x d float64 oracle on every kind of neighbourhood."""

import numpy as np
import pytest
import torch
from neighbourhood_kinds import KINDS, make
from oracle import dominant_subspace, fit_one, nearest

import deltalens.core.decompose as module
from deltalens.core.decompose import decompose

CLOSED = (
    "identity", "mean", "scalar", "diagonal", "linear", "affine", "low_rank:1", "low_rank:3", "low_rank:8",
    "orthogonal", "orthogonal:scaled",
)  # fmt: skip


def expected(name, anchors, pool, outputs, k, ridge):
    found = []
    for x in anchors:
        rows = nearest(x, pool, k, set())
        found.append(fit_one(name, x, pool[rows], outputs[rows], ridge))
    return found


def relative_difference(actual, oracle):
    scale = np.abs(oracle.tokenwise).max()
    return np.abs(actual - oracle.tokenwise).max() / scale if scale > 0 else np.abs(actual).max()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CLOSED)
def test_local_maps_equal_the_oracle_in_float64(name, kind):
    anchors, pool, outputs, k = make(kind)
    found = decompose(anchors, anchors, pool=(pool, outputs), map=name, neighbors=k, distinct=False)
    for actual, oracle in zip(found.tokenwise, expected(name, anchors, pool, outputs, k, 1e-2), strict=True):
        if kind == "duplicates" and oracle.gap < 1e-8:
            continue
        assert relative_difference(actual, oracle) <= 1e-9


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CLOSED)
@pytest.mark.parametrize("ridge", [1e-6, 1e-2])
def test_local_maps_equal_the_oracle_in_float32(name, kind, ridge):
    anchors, pool, outputs, k = (a.astype(np.float32) if isinstance(a, np.ndarray) else a for a in make(kind))
    found = decompose(anchors, anchors, pool=(pool, outputs), map=name, neighbors=k, ridge=ridge, distinct=False)
    assert found.tokenwise.dtype == np.float32
    errors = []
    for actual, oracle in zip(found.tokenwise, expected(name, anchors, pool, outputs, k, ridge), strict=True):
        errors.append(relative_difference(actual, oracle))
        if oracle.spread > 1e-3 and oracle.gap > 1e-2:
            assert errors[-1] <= 1e-4
    assert np.median(errors) <= 1e-4


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CLOSED)
@pytest.mark.parametrize("rows", [8, 60])
def test_global_maps_equal_the_oracle_with_few_rows_and_with_many(name, kind, rows):
    anchors, pool, outputs, _ = make(kind)
    pool, outputs = pool[:rows], outputs[:rows]
    found = decompose(anchors, anchors, pool=(pool, outputs), map=name, fit="global")
    for actual, x in zip(found.tokenwise, anchors, strict=True):
        oracle = fit_one(name, x, pool, outputs, 1e-2)
        assert relative_difference(actual, oracle) <= 1e-9
    assert found.neighbors.shape == (len(anchors), 0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CLOSED)
@pytest.mark.parametrize("fit", ["local", "global"])
def test_dominant_subspace_is_that_of_the_oracles_fitted_updates(name, kind, fit):
    anchors, pool, outputs, k = make(kind)
    found = decompose(
        anchors, anchors, pool=(pool, outputs), map=name, neighbors=k, distinct=False, fit=fit, subspace=5
    )
    for i, x in enumerate(anchors):
        rows = nearest(x, pool, k, set()) if fit == "local" else slice(None)
        oracle = fit_one(name, x, pool[rows], outputs[rows], 1e-2)
        if not np.abs(oracle.fitted).max() > 1e-12 * np.abs(pool).max():
            continue
        sigma = np.linalg.svd(oracle.fitted, compute_uv=False)
        wanted = dominant_subspace(oracle.fitted, 5, 1e-12)
        if wanted.shape[1] == 5 and len(sigma) > 5 and sigma[4] - sigma[5] < 1e-3 * sigma[0]:
            continue
        basis = found.basis[i][:, : found.subspace_rank[i]]
        assert found.subspace_rank[i] == wanted.shape[1]
        assert not found.basis[i][:, found.subspace_rank[i] :].any()
        np.testing.assert_allclose(basis @ basis.T, wanted @ wanted.T, atol=1e-7)


@pytest.mark.parametrize("name", [*CLOSED, "mlp:8"])
def test_batch_size_changes_nothing_beyond_rounding(name, monkeypatch):
    anchors, pool, outputs, k = make("random")
    whole = decompose(anchors, anchors, pool=(pool, outputs), map=name, neighbors=k)
    monkeypatch.setattr(module, "batch_size", lambda *_: 2)
    parts = decompose(anchors, anchors, pool=(pool, outputs), map=name, neighbors=k)
    np.testing.assert_allclose(parts.tokenwise, whole.tokenwise, rtol=0, atol=1e-10)
    np.testing.assert_allclose(parts.degrees_of_freedom, whole.degrees_of_freedom, rtol=1e-6)


@pytest.mark.parametrize("name", ["linear", "low_rank:3", "affine"])
def test_small_ridge_in_float32_on_ill_conditioned_rows_stays_finite(name):
    rng = np.random.default_rng(0)
    pool = (rng.normal(size=(200, 3)) @ rng.normal(size=(3, 64)) + 50).astype(np.float32)
    outputs = pool * 1.1
    found = decompose(pool[:20], outputs[:20], pool=(pool, outputs), map=name, neighbors=32, ridge=1e-12)
    assert np.isfinite(found.tokenwise).all()
    assert np.abs(found.residual).max() < 1e-2 * np.abs(outputs).max()


def test_torch_in_torch_out_and_half_precision_is_computed_in_float32():
    anchors, pool, outputs, k = (torch.tensor(a).bfloat16() if isinstance(a, np.ndarray) else a for a in make("random"))
    found = decompose(anchors, anchors, pool=(pool, outputs), map="linear", neighbors=k)
    wide = decompose(anchors.float(), anchors.float(), pool=(pool.float(), outputs.float()), map="linear", neighbors=k)
    assert found.tokenwise.dtype == torch.float32
    assert torch.equal(found.tokenwise, wide.tokenwise)
