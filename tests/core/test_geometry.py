"""Angles, shares and sizes are those of the definitions, and undefined ones are NaN, never 0 or 1."""

from dataclasses import fields

import numpy as np
import pytest
import torch

from deltalens.core.decompose import decompose
from deltalens.core.geometry import Geometry, chance_geometry, measure_geometry, split_residual


@pytest.fixture
def example():
    rng = np.random.default_rng(0)
    x, y = torch.tensor(rng.normal(size=(30, 7))), torch.tensor(rng.normal(size=(30, 7)))
    return x, y, decompose(x, y, protocol="leave_one_out", map="linear", neighbors=9, subspace=3)


def test_measures_are_the_definitions(example):
    x, y, found = example
    geometry = measure_geometry(x, y, found, proj_tokenwise_trivial=False)
    for i in range(len(x)):
        full, left = (y - x)[i].numpy(), (y - found.tokenwise)[i].numpy()
        moved = (found.tokenwise - x)[i].numpy()
        norm = np.linalg.norm
        for name, wanted in {
            "state_norm": norm(x[i]),
            "next_norm": norm(y[i]),
            "update_norm": norm(full),
            "tokenwise_norm": norm(moved),
            "residual_norm": norm(left),
            "relative_error": norm(left) / norm(y[i]),
            "relative_update_error": norm(left) / norm(full),
            "cos_full_tokenwise_signed": full @ moved / norm(full) / norm(moved),
            "cos_residual_tokenwise": abs(left @ moved) / norm(left) / norm(moved),
            "angle_residual_tokenwise": np.degrees(np.arccos(abs(left @ moved) / norm(left) / norm(moved))),
            "proj_full": norm(found.basis[i].numpy().T @ full) ** 2 / norm(full) ** 2,
            "proj_residual": norm(found.basis[i].numpy().T @ left) ** 2 / norm(left) ** 2,
            "proj_tokenwise": norm(found.basis[i].numpy().T @ moved) ** 2 / norm(moved) ** 2,
        }.items():
            assert float(getattr(geometry, name)[i]) == pytest.approx(wanted, rel=1e-9), name
    assert torch.equal(geometry.cos_full_tokenwise, geometry.cos_full_tokenwise_signed.abs())


def test_trivial_projection_is_unknown_rather_than_one(example):
    assert measure_geometry(*example, proj_tokenwise_trivial=True).proj_tokenwise.isnan().all()


def test_undefined_measures_are_nan():
    x = torch.tensor([[1.0, 0.0], [0.0, 0.0]])
    y = torch.tensor([[1.0, 0.0], [0.0, 0.0]])
    found = decompose(x, y, protocol="in_sample", map="identity", neighbors=2)
    geometry = measure_geometry(x, y, found, proj_tokenwise_trivial=False)
    assert geometry.relative_error.tolist()[0] == 0
    assert geometry.relative_error.isnan().tolist() == [False, True]
    for name in ("relative_update_error", "cos_full_tokenwise", "angle_residual_tokenwise", "proj_full"):
        assert getattr(geometry, name).isnan().all(), name


def test_tiny_angles_are_resolved_far_below_the_cosines_precision():
    x = torch.zeros(1, 2, dtype=torch.float64)
    y = torch.tensor([[1.0, 1e-9]], dtype=torch.float64)
    pool = torch.zeros(1, 2, dtype=torch.float64), torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    found = decompose(x, y, pool=pool, map="mean", neighbors=1)
    geometry = measure_geometry(x, y, found, proj_tokenwise_trivial=True)
    assert float(geometry.angle_full_tokenwise) == pytest.approx(np.degrees(1e-9), rel=1e-6)


def test_measures_survive_tiny_and_huge_float32_states(example):
    x, y, _ = example
    measured = []
    for scale in (1e-30, 1.0, 1e30):
        a, b = (x * scale).float(), (y * scale).float()
        found = decompose(a, b, protocol="leave_one_out", map="linear", neighbors=9)
        measured.append(measure_geometry(a, b, found, proj_tokenwise_trivial=False))
    for other in (measured[0], measured[2]):
        for name in ("cos_full_tokenwise", "relative_error", "proj_residual"):
            torch.testing.assert_close(getattr(other, name), getattr(measured[1], name), rtol=1e-3, atol=1e-4)


def test_chance_takes_the_partners_residual(example):
    x, y, found = example
    partner = torch.arange(30).roll(1)
    partner[3] = -1
    chance = chance_geometry(x, y, found, partner)
    real = measure_geometry(x, y, found, proj_tokenwise_trivial=True)
    assert chance.residual_norm[3].isnan()
    assert chance.proj_residual[3].isnan()
    keep = partner >= 0
    torch.testing.assert_close(chance.residual_norm[keep], real.residual_norm[partner[keep]])
    torch.testing.assert_close(chance.cos_full_tokenwise, real.cos_full_tokenwise)
    moved = found.tokenwise - x
    cosine = torch.nn.functional.cosine_similarity(found.residual[partner[5]], moved[5], dim=0)
    assert float(chance.cos_residual_tokenwise_signed[5]) == pytest.approx(float(cosine))


def test_residual_splits_into_orthogonal_parts(example):
    _, _, found = example
    inside, outside = split_residual(found)
    torch.testing.assert_close(inside + outside, found.residual)
    torch.testing.assert_close((inside * outside).sum(1), torch.zeros(30, dtype=torch.float64), atol=1e-10, rtol=0)
    assert inside.norm(dim=1).min() > 0


def test_columns_are_those_of_the_method():
    assert [field.name for field in fields(Geometry)] == [
        "state_norm", "next_norm", "update_norm", "tokenwise_norm", "residual_norm", "relative_error",
        "relative_update_error", "cos_full_tokenwise", "cos_full_tokenwise_signed", "cos_residual_tokenwise",
        "cos_residual_tokenwise_signed", "angle_full_tokenwise", "angle_residual_tokenwise", "proj_full",
        "proj_tokenwise", "proj_residual",
    ]  # fmt: skip
