"""The network's recipe is the one defined, step by step, and it is fair where it must be."""

import numpy as np
import pytest
import torch
from oracle import nearest

from deltalens.core.decompose import decompose


def by_autograd(x, rows, updates, hidden, ridge, seed=0):
    """One anchor, by autograd and torch's Adam on the loss as written."""
    k = len(rows)
    middle, mean = rows.mean(0), updates.mean(0)
    _, sigma, axes = torch.linalg.svd(rows - middle, full_matrices=False)
    axes = axes[sigma > 1e-9 * sigma[0]]
    inside = (rows - middle) @ axes.T
    axes = axes * torch.sign(inside.gather(0, inside.abs().argmax(0, keepdim=True))).T
    size = inside.square().sum(1).mean().sqrt()
    features, feature = (rows - middle) @ axes.T / size, (x - middle) @ axes.T / size
    scale = (updates - mean).square().sum(1).mean().sqrt()
    q = len(axes)
    generator = torch.Generator().manual_seed(seed)
    draws = torch.randn(min(k, rows.shape[1]), hidden, generator=generator, dtype=torch.float64)
    first = (draws[:q].T / q**0.5).clone().requires_grad_()
    first_bias = torch.zeros(hidden, dtype=torch.float64, requires_grad=True)
    second = torch.zeros(rows.shape[1], hidden, dtype=torch.float64, requires_grad=True)
    second_bias = torch.zeros(rows.shape[1], dtype=torch.float64, requires_grad=True)
    weights = [first, first_bias, second, second_bias]
    optimizer = torch.optim.Adam(weights, lr=0.01)

    def network(points):
        return torch.nn.functional.gelu(points @ first.T + first_bias) @ second.T + second_bias

    for _ in range(60):
        optimizer.zero_grad()
        out, targets = network(features), (updates - mean) / scale
        # ‖t - f‖² with the sum of t, which is zero, left out: its rounding would set Adam's first step.
        error = (out.square() - 2 * targets * (out - second_bias)).sum(1).mean()
        penalty = first.square().sum() + second.square().sum() + second_bias.square().sum()
        (error + ridge * penalty).backward()
        optimizer.step()
    return (x + mean + scale * network(feature)).detach()


@pytest.mark.parametrize(("k", "d"), [(10, 24), (20, 6)])
def test_batched_training_follows_the_recipe(k, d):
    rng = np.random.default_rng(0)
    pool, x = rng.normal(size=(80, d)), rng.normal(size=(6, d))
    outputs = pool + np.tanh(pool @ rng.normal(size=(d, d)))
    found = decompose(x, x, pool=(pool, outputs), map="mlp:8", neighbors=k)
    for i in range(len(x)):
        rows = nearest(x[i], pool, k, set())
        args = (torch.tensor(a) for a in (x[i], pool[rows], outputs[rows] - pool[rows]))
        np.testing.assert_allclose(found.tokenwise[i], by_autograd(*args, 8, 1e-2), atol=1e-6)


def test_network_bends_where_linear_maps_cannot():
    rng = np.random.default_rng(1)
    pool, x = rng.normal(size=(400, 8)), rng.normal(size=(60, 8))
    bend = lambda s: s + np.abs(s @ np.ones((8, 1))) * np.ones(8)  # noqa: E731
    errors = {
        name: np.median(
            np.linalg.norm(decompose(x, bend(x), pool=(pool, bend(pool)), map=name, fit="global").residual, axis=1)
        )
        for name in ("affine", "mlp:32")
    }
    assert errors["mlp:32"] < 0.5 * errors["affine"]


def test_seed_decides_everything():
    rng = np.random.default_rng(2)
    x, y = rng.normal(size=(30, 6)), rng.normal(size=(30, 6))
    request = {"protocol": "in_sample", "map": "mlp:8", "neighbors": 10}
    one, again, other = (decompose(x, y, seed=seed, **request) for seed in (3, 3, 4))
    np.testing.assert_array_equal(one.tokenwise, again.tokenwise)
    np.testing.assert_array_equal(one.degrees_of_freedom, again.degrees_of_freedom)
    assert np.abs(one.tokenwise - other.tokenwise).max() > 1e-3


def test_constant_updates_and_constant_inputs_give_the_mean():
    rng = np.random.default_rng(3)
    x = rng.normal(size=(20, 5))
    same = decompose(x, x + 1.5, protocol="in_sample", map="mlp:8", neighbors=8)
    np.testing.assert_allclose(same.tokenwise, x + 1.5, atol=1e-12)
    constant = np.ones((20, 5))
    y = constant + rng.normal(size=(20, 5))
    found = decompose(constant, y, protocol="in_sample", map="mlp:8", neighbors=20, distinct=False)
    np.testing.assert_allclose(found.tokenwise, np.broadcast_to(y.mean(0), y.shape), atol=1e-9)
