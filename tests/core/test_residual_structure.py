"""Structure over residuals against the slow way: every pair written out, every singular value, in float64."""

import itertools

import numpy as np
import pytest
import torch

from deltalens.core.residual_structure import (
    explained_share,
    permuted_coordinates,
    shared_directions,
    spectrum,
    squared_cosines,
)


def draws(n: int, d: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("n", "d"), [(40, 7), (7, 40), (1, 5), (12, 12)])
def test_spectrum_is_that_of_the_unit_rows(n: int, d: int) -> None:
    vectors = draws(n, d) * torch.logspace(-3, 3, n).unsqueeze(1)
    units = vectors.double().numpy()
    units /= np.linalg.norm(units, axis=1, keepdims=True)
    energies = np.linalg.svd(units, compute_uv=False) ** 2
    p = energies / energies.sum()
    found = spectrum(vectors)
    np.testing.assert_allclose(found.shares[: len(p)].numpy(), p, atol=1e-12)
    assert found.effective_rank == pytest.approx(np.exp(-(p[p > 0] * np.log(p[p > 0])).sum()))
    assert found.participation == pytest.approx(1 / (p**2).sum())
    assert found.leading(2) == pytest.approx(p[:2].sum())


def test_one_direction_has_rank_one_whatever_the_sizes_and_signs() -> None:
    vectors = torch.outer(torch.tensor([1.0, -5.0, 1e-4]), torch.tensor([3.0, 4.0]))
    assert spectrum(vectors).effective_rank == pytest.approx(1.0)


def test_zero_vectors_count_in_nothing() -> None:
    vectors, windows = draws(9, 4), torch.arange(9) % 3
    padded = torch.cat([vectors, torch.zeros(3, 4)])
    assert spectrum(padded).effective_rank == pytest.approx(spectrum(vectors).effective_rank)
    more = torch.cat([windows, torch.tensor([0, 1, 7])])
    assert shared_directions(padded, more) == shared_directions(vectors, windows)
    assert np.isnan(spectrum(torch.zeros(3, 4)).effective_rank)
    assert np.isnan(spectrum(torch.zeros(3, 4)).leading(1))
    assert np.isnan(shared_directions(torch.zeros(3, 4), torch.arange(3)).mean_cosine)


@pytest.mark.parametrize(("n", "d"), [(30, 5), (6, 20)])
def test_shared_directions_are_means_over_pairs_of_different_windows(n: int, d: int) -> None:
    vectors, windows = draws(n, d) + 0.5, torch.arange(n) % 4 * 10
    cosines = [
        float(torch.nn.functional.cosine_similarity(vectors[i].double(), vectors[j].double(), dim=0))
        for i, j in itertools.permutations(range(n), 2)
        if windows[i] != windows[j]
    ]
    found = shared_directions(vectors, windows)
    assert found.mean_cosine == pytest.approx(np.mean(cosines), abs=1e-12)
    assert found.mean_squared_cosine == pytest.approx(np.mean(np.square(cosines)), abs=1e-12)


def test_one_window_has_no_pairs() -> None:
    assert np.isnan(shared_directions(draws(5, 3), torch.zeros(5, dtype=torch.long)).mean_squared_cosine)


def test_permuted_coordinates_keep_large_components_and_lose_a_planted_axis() -> None:
    windows = torch.arange(400) % 20
    axis = torch.nn.functional.normalize(draws(1, 32, seed=1), dim=1)
    planted = draws(400, 1, seed=2) * axis * 10 + draws(400, 32)
    large = draws(400, 32) * torch.tensor([20.0] + [1.0] * 31)
    for vectors, kept in ((planted, False), (large, True)):
        real = shared_directions(vectors, windows).mean_squared_cosine
        null = shared_directions(permuted_coordinates(vectors, seed=3), windows).mean_squared_cosine
        assert real > 5 / 32
        assert (null > 0.9 * real) == kept


def test_explained_shares_of_summands_sum_to_one() -> None:
    parts = [draws(20, 6, seed) for seed in range(3)]
    total = torch.stack(parts).sum(0)
    shares = [explained_share(total, part) for part in parts]
    assert sum(shares) == pytest.approx(1)
    slow = [
        sum(float(r @ p) for r, p in zip(total.double(), part.double(), strict=True))
        / float(total.double().norm() ** 2)
        for part in parts
    ]
    np.testing.assert_allclose(shares, slow)
    assert np.isnan(explained_share(torch.zeros(2, 2), torch.ones(2, 2)))


def test_squared_cosines_are_undefined_for_zero_vectors() -> None:
    found = squared_cosines(torch.tensor([[1.0, 1.0], [0.0, 0.0]]), torch.tensor([[2.0, 0.0], [1.0, 0.0]]))
    assert found[0] == pytest.approx(0.5)
    assert found[1].isnan()
