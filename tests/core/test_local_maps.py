"""Singular vectors from products, fitted matrices and principal angles, against numpy, scipy and the map itself."""

import numpy as np
import pytest
import torch
from scipy.linalg import subspace_angles

from deltalens.core.decompose import decompose
from deltalens.core.local_maps import affine_fit, agreement, leading_part, overlap, principal_angles
from deltalens.errors import InputError


def draws(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("decay", [0.5, 0.8, 0.95])
def test_leading_part_is_that_of_the_singular_value_decomposition(decay: float) -> None:
    left, right = torch.linalg.qr(draws(60, 60)).Q, torch.linalg.qr(draws(60, 60, seed=1)).Q
    matrix = left @ torch.diag(decay ** torch.arange(60).double()) @ right.mT
    found = leading_part(lambda v: v @ matrix.mT, lambda u: u @ matrix, 60, 4, seed=2)
    np.testing.assert_allclose(found.gains, decay ** np.arange(4), rtol=2e-3)
    assert np.degrees(subspace_angles(found.output.numpy(), left[:, :4].numpy()).max()) < 5
    assert np.degrees(subspace_angles(found.input.numpy(), right[:, :4].numpy()).max()) < 5
    assert overlap(found.output, left[:, :4]) > 0.995
    torch.testing.assert_close(matrix @ found.input, found.output * found.gains, rtol=0, atol=0.02)


def test_leading_part_is_exact_where_all_dimensions_are_drawn() -> None:
    matrix = draws(10, 10)
    left, gains, right = torch.linalg.svd(matrix)
    found = leading_part(lambda v: v @ matrix.mT, lambda u: u @ matrix, 10, 3, seed=0)
    torch.testing.assert_close(found.gains, gains[:3])
    assert principal_angles(found.output, left[:, :3]).max() < 1e-5
    assert principal_angles(found.input, right[:3].mT).max() < 1e-5


def test_more_vectors_than_dimensions_are_refused() -> None:
    with pytest.raises(InputError, match="ask for 1 to 3"):
        leading_part(lambda v: v, lambda u: u, 3, 4, seed=0)


@pytest.mark.parametrize(("k", "d"), [(12, 30), (30, 12), (5, 5)])
def test_the_affine_fit_with_its_matrix_in_hand_is_the_map_affine(k: int, d: int) -> None:
    inputs, updates, anchors = draws(k, d) + 1, draws(k, d, seed=1), draws(4, d, seed=2)
    fit = affine_fit(inputs, updates, ridge=0.01)
    tokenwise = anchors + fit.mean_update + fit.forward(anchors - fit.mean_input)
    judged = decompose(
        anchors, anchors, pool=(inputs, inputs + updates), map="affine", neighbors=k, ridge=0.01, distinct=False
    )
    torch.testing.assert_close(tokenwise, judged.tokenwise)
    matrix = fit.left.mT @ fit.right
    torch.testing.assert_close(fit.transposed(anchors), anchors @ matrix)


def test_equal_inputs_have_a_zero_matrix() -> None:
    fit = affine_fit(torch.ones(4, 3), draws(4, 3), ridge=0.1)
    assert fit.forward(draws(2, 3)).abs().max() == 0


@pytest.mark.parametrize("seed", range(5))
def test_principal_angles_are_scipys(seed: int) -> None:
    first, second = (torch.linalg.qr(draws(9, 3, seed=seed + s)).Q for s in (0, 100))
    second[:, 0] = first[:, 0]
    second = torch.linalg.qr(second).Q
    slow = np.degrees(np.sort(subspace_angles(first.numpy(), second.numpy())))
    np.testing.assert_allclose(principal_angles(first, second), slow, atol=1e-5)
    assert overlap(first, second) == pytest.approx((np.cos(np.radians(slow)) ** 2).mean())


def test_agreement_is_one_for_equal_and_zero_for_absent_maps() -> None:
    images = draws(6, 4)
    assert agreement(images, images) == 1
    assert agreement(images, torch.zeros_like(images)) == 0
    assert np.isnan(agreement(torch.zeros(2, 2), images[:2, :2]))
