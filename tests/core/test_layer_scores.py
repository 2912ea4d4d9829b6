"""Block Influence and linearity are their definitions in float64, and undefined where they would say nothing."""

import numpy as np
import pytest
import torch

from deltalens.core.layer_scores import block_influence, linearity


def oracle(x: np.ndarray, y: np.ndarray) -> float:
    """By numpy's least squares on centred, normalised float64 states."""
    a, b = x - x.mean(0), y - y.mean(0)
    a, b = a / np.linalg.norm(a), b / np.linalg.norm(b)
    return float(1 - np.linalg.norm(a @ np.linalg.lstsq(a, b, rcond=None)[0] - b) ** 2)


def states(kind: str, n: int = 90, d: int = 8) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(n, d))
    if kind == "rank_deficient":
        x = rng.normal(size=(n, 3)) @ rng.normal(size=(3, d))
    if kind == "uneven":
        x = x * np.logspace(0, -4, d)
    y = x + x @ rng.normal(size=(d, d)) + 3 * np.tanh(x @ rng.normal(size=(d, d))) + 5
    if kind == "unrelated":
        y = rng.normal(size=(n, d))
    return x, y


@pytest.mark.parametrize("kind", ["random", "rank_deficient", "uneven", "unrelated"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_linearity_is_the_least_squares_oracles(kind: str, dtype: torch.dtype) -> None:
    x, y = (torch.as_tensor(a).to(dtype) for a in states(kind))
    found = linearity(x, y)
    wide_x, wide_y = x.double().numpy(), y.double().numpy()
    tolerance = 1e-9 if dtype == torch.float64 or kind != "rank_deficient" else 2e-2
    assert found.states == pytest.approx(oracle(wide_x, wide_y), abs=tolerance)
    assert found.updates == pytest.approx(oracle(wide_x, wide_y - wide_x), abs=tolerance)
    assert 0 < found.states < 1


def test_linearity_ignores_shift_and_size_but_not_curvature() -> None:
    x, y = (torch.as_tensor(a) for a in states("random"))
    assert linearity(3 * x + 2, 1e3 * y - 7).states == pytest.approx(linearity(x, y).states)
    assert linearity(x, x @ torch.ones(8, 8).double() + x).states == pytest.approx(1)
    assert linearity(x, (3 * x).cos()).states < 0.5


def test_unrelated_outputs_reach_the_floor() -> None:
    rng = torch.Generator().manual_seed(0)
    found = [
        linearity(torch.randn(60, 12, generator=rng), torch.randn(60, 12, generator=rng)).states for _ in range(40)
    ]
    floor = linearity(torch.randn(60, 12, generator=rng), torch.randn(60, 12, generator=rng)).floor
    assert floor == pytest.approx(12 / 59)
    assert np.mean(found) == pytest.approx(floor, abs=0.02)


@pytest.mark.parametrize("rows", [1, 2, 8, 9])
def test_it_is_undefined_where_any_outputs_would_score_one(rows: int) -> None:
    x, y = (torch.as_tensor(a[:rows]) for a in states("random"))
    assert np.isnan(linearity(x, y).states)
    assert not np.isnan(linearity(*(torch.as_tensor(a[:10]) for a in states("random"))).states)


def test_equal_outputs_leave_it_undefined_and_equal_inputs_explain_nothing() -> None:
    x, y = (torch.as_tensor(a) for a in states("random"))
    assert np.isnan(linearity(x, torch.ones_like(x)).states)
    assert np.isnan(linearity(x, x).updates)
    assert linearity(0.1 * torch.ones_like(x), y).states == pytest.approx(0, abs=1e-12)
    assert np.isnan(linearity(x, 0.1 * torch.ones_like(x)).states)


def test_block_influence_is_one_minus_the_cosine() -> None:
    x, y = (torch.as_tensor(a) for a in states("random"))
    expected = 1 - torch.nn.functional.cosine_similarity(x, y)
    torch.testing.assert_close(block_influence(x, y), expected, atol=1e-12, rtol=1e-9)
    near = block_influence(x, x + 1e-9 * y)
    assert bool((near > 0).all())
    assert float(near.max()) < 1e-15
    x[0] = 0
    assert torch.isnan(block_influence(x, y)).tolist() == [True] + [False] * (len(x) - 1)
