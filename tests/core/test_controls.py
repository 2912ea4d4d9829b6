"""Controls keep what they must keep and break what they must break."""

from inspect import unwrap

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deltalens.core.controls import (
    covariance_directions,
    derangement,
    layer_seed,
    permuted_updates,
    random_directions,
    shuffled_directions,
)
from deltalens.errors import InputError


@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.booleans()), min_size=1, max_size=60), st.integers(0, 10**6))
def test_partners_are_included_tokens_of_other_windows(tokens, seed):
    windows = torch.tensor([w for w, _ in tokens])
    included = torch.tensor([i for _, i in tokens])
    partner = derangement(windows, included, seed)
    assert torch.equal(partner, derangement(windows, included, seed))
    assert (partner[~included] == -1).all()
    counts = torch.bincount(windows[included], minlength=5)
    if (counts > 0).sum() < 2:
        assert (partner == -1).all()
        return
    chosen = partner[included]
    assert included[chosen].all()
    assert (windows[chosen] != windows[included]).all()
    if 2 * counts.max() <= counts.sum():
        assert len(set(chosen.tolist())) == len(chosen)


def test_partners_are_drawn_from_many_windows():
    windows = torch.arange(1000) // 100
    partner = derangement(windows, torch.ones(1000, dtype=torch.bool), seed=0)
    pairs = {(int(a), int(b)) for a, b in zip(windows, windows[partner], strict=True)}
    assert len(pairs) == 90


def test_directions_keep_sizes():
    residual = torch.randn(50, 8, generator=torch.Generator().manual_seed(0)) * torch.arange(50).unsqueeze(1)
    partner = torch.arange(50).roll(1)
    included = torch.arange(50) > 5
    for moved in (
        random_directions(residual, 1),
        shuffled_directions(residual, partner),
        covariance_directions(residual, included, 1),
    ):
        assert moved.dtype == residual.dtype
        known = ~moved.isnan().any(1)
        torch.testing.assert_close(moved[known].norm(dim=1), residual[known].norm(dim=1))
        assert known.sum() >= 49


def test_layers_draw_independent_directions():
    seeds = [layer_seed(seed, layer) for seed in (0, 1, 7, 2**31 - 1) for layer in range(200)]
    assert len(set(seeds)) == len(seeds)
    residual = torch.ones(500, 64)
    first, second = (random_directions(residual, layer_seed(0, layer)) for layer in (0, 1))
    cosines = torch.nn.functional.cosine_similarity(first, second)
    assert abs(float(cosines.mean())) < 4 / (500 * 64) ** 0.5
    assert float(cosines.abs().max()) < 0.6


def test_random_directions_are_uniform_and_seeded():
    residual = torch.ones(20000, 3)
    moved = random_directions(residual, 3)
    assert torch.equal(moved, random_directions(residual, 3))
    assert not torch.equal(moved, random_directions(residual, 4))
    unit = moved / moved.norm(dim=1, keepdim=True)
    assert unit.mean(0).abs().max() < 0.02
    # A coordinate of a uniform point on the sphere in three dimensions is itself uniform.
    assert abs(float((unit[:, 0].abs() < 0.5).float().mean()) - 0.5) < 0.02


def test_shuffled_directions_are_the_partners():
    residual = torch.tensor([[3.0, 0.0], [0.0, 1.0], [0.0, 0.0]])
    moved = shuffled_directions(residual, torch.tensor([1, -1, 0]))
    assert moved[0].tolist() == [0.0, 3.0]
    assert moved[1].isnan().all()
    assert moved[2].tolist() == [0.0, 0.0]
    assert shuffled_directions(residual, torch.tensor([2, 0, 0]))[0].isnan().all()


def test_covariance_directions_follow_the_included_residuals_spread():
    generator = torch.Generator().manual_seed(0)
    residual = torch.randn(4000, 3, generator=generator) * torch.tensor([5.0, 1.0, 0.0])
    residual[0] = torch.tensor([0.0, 0.0, 1e6])
    included = torch.arange(4000) > 0
    moved = covariance_directions(residual, included, 2)
    assert (moved[:, 2].abs() <= 1e-6 * moved.norm(dim=1)).all()
    wide = moved[1:, 0].abs() > moved[1:, 1].abs()
    # Two independent Gaussians of spreads 5 and 1: P(|5a| > |b|) = (2/π) atan 5.
    assert float(wide.float().mean()) == pytest.approx(2 / np.pi * np.arctan(5), abs=0.03)


def test_permuted_updates_keep_the_included_set_and_the_excluded_places():
    updates = torch.arange(40.0).view(20, 2)
    included = torch.arange(20) % 3 > 0
    moved = permuted_updates(updates, included, 0)
    assert torch.equal(moved[~included], updates[~included])
    assert torch.equal(moved[included].sort(0).values, updates[included])
    assert not torch.equal(moved, updates)
    assert torch.equal(moved, permuted_updates(updates, included, 0))


def test_global_randomness_is_left_alone():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    residual = torch.ones(9, 3)
    random_directions(residual, 1)
    derangement(torch.arange(9) // 3, torch.ones(9, dtype=torch.bool), 1)
    permuted_updates(residual, torch.ones(9, dtype=torch.bool), 1)
    assert torch.equal(before, torch.get_rng_state())


def test_other_lengths_are_refused():
    with pytest.raises(InputError, match="windows has 3"):
        unwrap(derangement)(torch.arange(3), torch.ones(2, dtype=torch.bool), 0)
