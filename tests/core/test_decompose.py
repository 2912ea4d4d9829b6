"""What a decomposition promises: protocols, planted layers, freedom, null rules, and clear refusals."""

from inspect import unwrap

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import fit_one, nearest

import deltalens.core.decompose as module
from deltalens.core.decompose import decompose, decompose_layer, decomposition_from_tokenwise
from deltalens.core.geometry import measure_geometry
from deltalens.core.maps import MAPS, parse_map
from deltalens.core.neighbors import find_neighborhoods
from deltalens.errors import InputError

FITTED = ("mean", "scalar", "diagonal", "linear", "affine", "low_rank:3", "orthogonal", "orthogonal:scaled", "mlp:4")


def planted(name, rng, d=16, p=400, n=50):
    """A pool that is exactly tokenwise in the map's own class, and evaluation states."""
    pool, x = rng.normal(size=(p, d)) + 0.5, rng.normal(size=(n, d)) + 0.5
    low = rng.normal(size=(d, 3)) @ rng.normal(size=(3, d)) / d
    layers = {
        "mean": lambda s: s + low[0],
        "scalar": lambda s: 1.3 * s,
        "diagonal": lambda s: s * np.linspace(0.2, 2, d),
        "linear": lambda s: s + s @ low,
        "affine": lambda s: s + s @ low + low[0],
        "low_rank:3": lambda s: s + s @ low,
        "orthogonal": lambda s: s @ np.linalg.qr(np.eye(d) + low)[0],
    }
    return pool, layers[name](pool), x, layers[name](x)


@pytest.mark.parametrize("fit", ["local", "global"])
@pytest.mark.parametrize("name", ["mean", "scalar", "diagonal", "linear", "affine", "low_rank:3", "orthogonal"])
def test_planted_residual_is_recovered(name, fit):
    rng = np.random.default_rng(1)
    pool, outputs, x, moved = planted(name, rng)
    residual = 0.1 * rng.normal(size=x.shape)
    found = decompose(x, moved + residual, pool=(pool, outputs), map=name, neighbors=40, ridge=1e-8, fit=fit)
    sizes = np.linalg.norm(found.residual, axis=1) / np.linalg.norm(residual, axis=1)
    cosines = (found.residual * residual).sum(1) / (
        np.linalg.norm(found.residual, axis=1) * np.linalg.norm(residual, axis=1)
    )
    assert np.abs(sizes - 1).max() < 0.01
    assert np.degrees(np.arccos(np.clip(cosines, -1, 1))).max() < 1


@pytest.mark.parametrize("name", ["linear", "affine", "mean"])
def test_pool_residuals_shrink_in_sample_and_grow_held_out_as_theory_says(name):
    """With noise of variance s² in the pool, E‖r‖² is s²(1 - h) in-sample and s²(1 + ‖weights‖²) held out."""
    rng = np.random.default_rng(2)
    d, p, k = 64, 300, 32
    low = rng.normal(size=(d, d)) / d
    pool, x = rng.normal(size=(p, d)), rng.normal(size=(200, d))
    layer = (lambda s: s + s @ low) if name != "mean" else (lambda s: s + low[0])
    noise, own = rng.normal(size=pool.shape), rng.normal(size=x.shape)
    outputs, y = layer(pool) + noise, layer(x) + own
    exact_outputs, exact_y = layer(pool), layer(x)

    def ratio(protocol):
        noisy, clean = (
            decompose(
                x if protocol == "held_out" else pool,
                targets,
                pool=(pool, fitted_on) if protocol == "held_out" else None,
                protocol=protocol,
                map=name,
                neighbors=k,
                ridge=1e-1,
            )
            for targets, fitted_on in (
                ((y, outputs), (exact_y, exact_outputs))
                if protocol == "held_out"
                else ((outputs, None), (exact_outputs, None))
            )
        )
        # Fits are linear in the updates, so the difference is what the noise alone leaves.
        left = noisy.residual - clean.residual
        return np.mean(left**2), noisy

    held_out, _ = ratio("held_out")
    in_sample, _ = ratio("in_sample")
    weights = [_own_and_other_weights(name, anchor, pool, k, 1e-1) for anchor in x]
    grown = 1 + np.mean([np.sum(w**2) for w in weights])
    own_weights = [_own_and_other_weights(name, anchor, pool, k, 1e-1) for anchor in pool]
    shrunk = np.mean([(1 - w[0]) ** 2 + np.sum(w[1:] ** 2) for w in own_weights])
    assert grown > 1.01
    assert shrunk < 0.99
    assert held_out == pytest.approx(grown, rel=0.03)
    assert in_sample == pytest.approx(shrunk, rel=0.03)


def _own_and_other_weights(name, anchor, pool, k, ridge):
    """The weights (k,) of the neighbours' updates in T(x) - x, the nearest first."""
    rows = pool[nearest(anchor, pool, k, set())]
    if name == "mean":
        return np.full(k, 1 / k)
    middle = rows.mean(0) if name == "affine" else 0
    centered = rows - middle
    penalty = ridge * np.mean(np.sum(centered**2, 1))
    weights = np.linalg.solve(centered @ centered.T + penalty * np.eye(k), centered @ (anchor - middle))
    return weights - weights.mean() + 1 / k if name == "affine" else weights


@pytest.mark.parametrize("name", FITTED)
def test_anchor_left_out_has_no_influence_on_its_own_map(name):
    rng = np.random.default_rng(3)
    x, y = rng.normal(size=(40, 6)), rng.normal(size=(40, 6))
    changed = y.copy()
    changed[7] += 100
    request = {"protocol": "leave_one_out", "map": name, "neighbors": 12}
    before, after = decompose(x, y, **request), decompose(x, changed, **request)
    np.testing.assert_array_equal(before.tokenwise[7], after.tokenwise[7])
    assert 7 not in before.neighbors[7]
    assert np.abs(before.tokenwise - after.tokenwise).max() > 1e-3


@pytest.mark.parametrize("name", ["linear", "diagonal", "mean", "mlp:4"])
def test_anchor_left_out_of_its_group_leaves_the_averaged_update(name):
    rng = np.random.default_rng(4)
    x = np.repeat(rng.normal(size=(15, 5)), 3, 0)
    y = rng.normal(size=x.shape)
    changed = y.copy()
    changed[4] += 100
    request = {"protocol": "leave_one_out", "map": name, "neighbors": 9}
    before, after = decompose(x, y, **request), decompose(x, changed, **request)
    np.testing.assert_allclose(before.tokenwise[4], after.tokenwise[4], atol=1e-11)
    assert np.abs(before.tokenwise[3] - after.tokenwise[3]).max() > 0.1
    assert 4 not in before.neighbors[4]


def test_whole_windows_can_be_left_out():
    rng = np.random.default_rng(5)
    x, y = torch.tensor(rng.normal(size=(30, 4))), torch.tensor(rng.normal(size=(30, 4)))
    windows = torch.arange(30) // 10
    excluded = torch.stack([torch.nonzero(windows == w)[:, 0] for w in windows])
    found = find_neighborhoods(x, x, neighbors=8, excluded=excluded)
    assert (windows[found.indices] != windows.unsqueeze(1)).all()
    assert decompose_layer(x, y, x, y, found, parse_map("linear")).tokenwise.isfinite().all()


@pytest.mark.parametrize("name", FITTED)
@pytest.mark.parametrize("fit", ["local", "global"])
def test_infinite_ridge_gives_the_identity_or_the_mean(name, fit):
    rng = np.random.default_rng(6)
    x, y = rng.normal(size=(30, 5)), rng.normal(size=(30, 5))
    request = {"protocol": "in_sample", "neighbors": 9, "fit": fit}
    limit = "mean" if name in ("mean", "affine", "mlp:4") else "identity"
    wanted = decompose(x, y, map=limit, **request).tokenwise
    found = decompose(x, y, map=name, ridge=1e12, **request).tokenwise
    np.testing.assert_allclose(found, wanted, atol=0.2 if name == "mlp:4" else 1e-8)


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(FITTED), st.integers(0, 10**6), st.sampled_from([2.0**-40, 8.0, 2.0**40]))
def test_fits_commute_with_scaling(name, seed, scale):
    rng = np.random.default_rng(seed)
    x, y = rng.normal(size=(20, 5)), rng.normal(size=(20, 5))
    request = {"protocol": "leave_one_out", "map": name, "neighbors": 7}
    one, scaled = decompose(x, y, **request), decompose(x * scale, y * scale, **request)
    np.testing.assert_allclose(scaled.tokenwise / scale, one.tokenwise, atol=1e-7)
    np.testing.assert_allclose(scaled.degrees_of_freedom, one.degrees_of_freedom, rtol=1e-4)


@settings(max_examples=20, deadline=None)
@given(st.sampled_from(("mean", "scalar", "linear", "affine", "low_rank:3", "orthogonal")), st.integers(0, 10**6))
def test_fits_commute_with_rotations(name, seed):
    rng = np.random.default_rng(seed)
    x, y = rng.normal(size=(20, 5)), rng.normal(size=(20, 5))
    turn = np.linalg.qr(rng.normal(size=(5, 5)))[0]
    request = {"protocol": "leave_one_out", "map": name, "neighbors": 7}
    one, turned = decompose(x, y, **request), decompose(x @ turn, y @ turn, **request)
    np.testing.assert_allclose(turned.tokenwise, one.tokenwise @ turn, atol=1e-8)


@settings(max_examples=20, deadline=None)
@given(st.sampled_from(FITTED), st.integers(0, 10**6), st.booleans())
def test_parts_add_up_and_projections_are_shares(name, seed, everywhere):
    rng = np.random.default_rng(seed)
    x, y = torch.tensor(rng.normal(size=(20, 5))), torch.tensor(rng.normal(size=(20, 5)))
    fit = "global" if everywhere else "local"
    found = decompose(x, y, protocol="in_sample", map=name, neighbors=7, subspace=3, fit=fit)
    torch.testing.assert_close(found.tokenwise + found.residual, y)
    torch.testing.assert_close(found.update, y - x)
    gram = found.basis.mT @ found.basis
    torch.testing.assert_close(gram, torch.diag_embed(gram.diagonal(dim1=1, dim2=2)), atol=1e-9, rtol=0)
    assert (gram.diagonal(dim1=1, dim2=2).sum(1).round() == found.subspace_rank).all()
    geometry = measure_geometry(x, y, found, proj_tokenwise_trivial=False)
    for share in (geometry.proj_full, geometry.proj_residual, geometry.proj_tokenwise):
        assert ((share >= 0) & (share <= 1)).all()


@pytest.mark.parametrize("name", ["mean", "low_rank:2", "low_rank:3"])
def test_updates_lie_in_their_subspace_where_the_map_says_so(name):
    rng = np.random.default_rng(7)
    x, y = torch.tensor(rng.normal(size=(20, 9))), torch.tensor(rng.normal(size=(20, 9)))
    found = decompose(x, y, protocol="in_sample", map=name, neighbors=7, subspace=3)
    assert parse_map(name).spans_updates(3)
    assert not parse_map("low_rank:4").spans_updates(3)
    share = measure_geometry(x, y, found, proj_tokenwise_trivial=False).proj_tokenwise
    torch.testing.assert_close(share, torch.ones_like(share))


def divergence_by_differences(name, rows, outputs, ridge, step=1e-5):
    """``(1/d) Σ ∂ŷ/∂y`` of the oracle by central differences."""
    total = 0.0
    for j in range(len(rows)):
        for c in range(rows.shape[1]):
            change = np.zeros_like(outputs)
            change[j, c] = step
            up, down = (fit_one(name, rows[0], rows, outputs + s * change, ridge).fitted[j, c] for s in (1, -1))
            total += (up - down) / (2 * step)
    return total / rows.shape[1]


@pytest.mark.parametrize("name", ["mean", "scalar", "diagonal", "linear", "affine", "low_rank:2", "orthogonal"])
@pytest.mark.parametrize(("k", "d"), [(6, 4), (4, 6), (3, 9)])
def test_degrees_of_freedom_are_the_divergence_of_the_fit(name, k, d):
    rng = np.random.default_rng(8)
    pool = rng.normal(size=(k, d))
    outputs = pool + 0.5 * rng.normal(size=(k, d))
    for fit in ("local", "global"):
        found = decompose(pool, outputs, protocol="in_sample", map=name, neighbors=k, fit=fit, ridge=0.1)
        wanted = divergence_by_differences(name, pool, outputs, 0.1)
        np.testing.assert_allclose(found.degrees_of_freedom, wanted, rtol=1e-5)


def test_scaled_rotations_add_their_scales_freedom():
    rng = np.random.default_rng(9)
    pool = rng.normal(size=(4, 6))
    outputs = pool + 0.5 * rng.normal(size=(4, 6))
    found = decompose(pool, outputs, protocol="in_sample", map="orthogonal:scaled", neighbors=4, ridge=0.1)
    wanted = divergence_by_differences("orthogonal:scaled", pool, outputs, 0.1)
    np.testing.assert_allclose(found.degrees_of_freedom, wanted, rtol=1e-5)


def test_probes_estimate_the_networks_divergence_and_none_leave_it_unknown():
    rng = np.random.default_rng(10)
    x = torch.tensor(rng.normal(size=(12, 5)))
    y = x + torch.tensor(rng.normal(size=(12, 5)))
    near = find_neighborhoods(x, x, neighbors=12)
    found = [decompose_layer(x, y, x, y, near, parse_map("mlp:4"), probes=count) for count in (0, 150)]
    assert found[0].degrees_of_freedom.isnan().all()
    assert torch.equal(found[0].tokenwise, found[1].tokenwise)
    step, total = 1e-3, 0.0
    base = decompose_layer(x, y, x, y, near, parse_map("mlp:4"), probes=0).tokenwise
    for j in range(12):
        for c in range(5):
            moved = y.clone()
            moved[j, c] += step
            again = decompose_layer(x, moved, x, moved, near, parse_map("mlp:4"), probes=0).tokenwise
            total += float(again[j, c] - base[j, c]) / step
    assert found[1].degrees_of_freedom.median() == pytest.approx(total / 5, rel=0.25)


@pytest.mark.parametrize("name", ["identity", *FITTED])
def test_zero_inputs_are_left_alone_but_for_the_mean(name):
    y = np.random.default_rng(11).normal(size=(6, 4))
    found = decompose(np.zeros((6, 4)), y, pool=(np.zeros((6, 4)), y), map=name, neighbors=6, distinct=False)
    wanted = y.mean(0) if name == "mean" else np.zeros(4)
    np.testing.assert_allclose(found.tokenwise, np.broadcast_to(wanted, y.shape), atol=1e-15)


def test_identity_has_an_empty_subspace():
    x = np.random.default_rng(12).normal(size=(6, 4))
    found = decompose(x, 2 * x, protocol="in_sample", map="identity", neighbors=3)
    assert found.subspace_rank.tolist() == [0] * 6
    assert not found.basis.any()
    np.testing.assert_array_equal(found.tokenwise, x)


def test_a_map_supplied_from_outside_is_decomposed_alike():
    rng = np.random.default_rng(13)
    x, y, pool = (torch.tensor(rng.normal(size=(s, 6))) for s in (9, 9, 30))
    matrix = torch.tensor(rng.normal(size=(6, 2)) @ rng.normal(size=(2, 6)))
    near = find_neighborhoods(x, pool, neighbors=8)
    found = decomposition_from_tokenwise(x, y, x + x @ matrix, pool @ matrix, near, subspace=3)
    everywhere = decomposition_from_tokenwise(x, y, x + x @ matrix, pool @ matrix, None, subspace=3)
    for one in (found, everywhere):
        torch.testing.assert_close(one.residual, y - x - x @ matrix)
        assert one.subspace_rank.tolist() == [2] * 9
        torch.testing.assert_close(x @ matrix @ one.basis @ one.basis.mT, (x @ matrix).expand(9, 9, 6))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"map": "bilinear"}, "unknown"),
        ({"map": "low_rank:0"}, "size 0"),
        ({"map": "low_rank:99", "neighbors": 5}, "lower the rank"),
        ({"map": "isolated"}, "model's layer"),
        ({"ridge": 0.0}, "ridge"),
        ({"ridge": -1.0}, "ridge"),
        ({"ridge": float("nan")}, "ridge"),
        ({"subspace": 0}, "subspace"),
        ({"neighbors": 99}, "only 10"),
        ({"fit": "regional"}, "fit"),
        ({"protocol": "cross"}, "protocol"),
        ({"protocol": "held_out"}, "needs pool"),
        ({"protocol": "leave_one_out", "fit": "global"}, "one fit per token"),
        ({"pool": (np.zeros((3, 4)), np.zeros((3, 4)))}, "leave out pool"),
        ({"protocol": "held_out", "pool": (np.zeros((3, 4)), np.zeros((2, 4)))}, "2 rows"),
        ({"y": np.full((10, 4), np.inf)}, "row 0"),
        ({"x": np.zeros((10, 4), dtype=int)}, "floating"),
        ({"x": np.zeros((10, 3))}, "width"),
        ({"neighbors": "8"}, "whole number, but '8'"),
        ({"neighbors": 8.0}, "whole number"),
        ({"neighbors": True}, "whole number"),
        ({"map": 3}, "map must be"),
        ({"map": type(parse_map("linear"))}, "map must be"),
        ({"map": None}, "map must be"),
        ({"protocol": "held_out", "pool": (np.zeros((3, 4)),)}, "pair"),
        ({"protocol": "held_out", "pool": np.zeros((2, 4))}, "pair"),
        ({"protocol": "held_out", "pool": (None, np.zeros((3, 4)))}, "NoneType"),
        ({"protocol": 2}, "protocol"),
        ({"protocol": ["in_sample"]}, "protocol"),
        ({"fit": 5}, "fit"),
        ({"metric": None}, "metric"),
        ({"subspace": 2.5}, "whole number"),
        ({"seed": None}, "seed"),
        ({"seed": -1}, "seed"),
        ({"ridge": "1"}, "number above 0"),
        ({"ridge": None}, "number above 0"),
        ({"x": np.zeros((10, 0)), "y": np.zeros((10, 0))}, "width 0"),
        ({"x": np.zeros((0, 4)), "y": np.zeros((0, 4))}, "no rows"),
        ({"x": np.zeros((0, 4)), "y": np.zeros((0, 4)), "fit": "global"}, "no rows"),
        ({"map": "low_rank:11", "fit": "global"}, "or the pool"),
    ],
)
def test_impossible_requests_say_what_to_change(change, words):
    rng = np.random.default_rng(14)
    request = {"x": rng.normal(size=(10, 4)), "y": rng.normal(size=(10, 4)), "protocol": "in_sample", "map": "linear"}
    request = {"neighbors": 5} | request | change
    with pytest.raises(InputError, match=words) as raised:
        # Without the tests' own shape checks, as users call it.
        unwrap(decompose)(request.pop("x"), request.pop("y"), **request)
    assert "\n" not in str(raised.value)


def test_a_rank_above_the_rows_is_refused_before_neighbours_are_sought(monkeypatch):
    monkeypatch.setattr(module, "find_neighborhoods", lambda *_, **__: pytest.fail("long work began"))
    x = np.eye(9)
    with pytest.raises(InputError, match="lower the rank"):
        decompose(x, x, protocol="in_sample", map="low_rank:6", neighbors=5)


def test_every_registered_form_parses_to_its_canonical_name():
    for form in MAPS:
        name = form.replace(":r", ":3").replace(":h", ":5")
        assert parse_map(name).name == name == str(parse_map(name))
    assert parse_map(" mlp ").name == "mlp:32"
    for wrong in ("", "low_rank:", "low_rank:-1", "mlp:x", "linear:3", "orthogonal:twice", "low_rank:1e9"):
        with pytest.raises(InputError):
            parse_map(wrong)
