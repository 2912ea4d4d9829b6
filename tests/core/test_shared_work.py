"""What fits share or sample changes their cost, not their results."""

import numpy as np
import torch

import deltalens.core.decompose as module
from deltalens.core.decompose import decompose, decompose_layer
from deltalens.core.maps import parse_map
from deltalens.core.neighbors import find_neighborhoods
from deltalens.core.products import PoolGram


def layer(count, width):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count, width, generator=generator)
    return x, x + torch.randn(count, width, generator=generator)


def test_gathered_gram_gives_what_each_neighbourhoods_own_products_give(monkeypatch):
    x, y = layer(80, 16)
    near = find_neighborhoods(x, x, neighbors=12)
    assert near.merged.gram.pays(near.rows)
    for scale in (1.0, 1e-3, 300.0):
        shared = decompose_layer(x, x + scale * y, x, x + scale * y, near, parse_map("linear"))
        with monkeypatch.context() as patch:
            patch.setattr(PoolGram, "pays", lambda *_: False)
            own = decompose_layer(x, x + scale * y, x, x + scale * y, near, parse_map("linear"))
        torch.testing.assert_close(shared.tokenwise, own.tokenwise, rtol=1e-5, atol=1e-5 * max(scale, 1.0))


def test_another_pool_than_the_neighbourhoods_own_is_fitted_as_given():
    x, y = layer(80, 16)
    near, same = find_neighborhoods(x, x, neighbors=12), find_neighborhoods(2 * x, 2 * x, neighbors=12)
    other = decompose_layer(2 * x, y, 2 * x, y, near, parse_map("linear"))
    expected = decompose_layer(2 * x, y, 2 * x, y, same, parse_map("linear"))
    torch.testing.assert_close(other.tokenwise, expected.tokenwise, rtol=1e-5, atol=1e-5)


def test_probing_a_sample_leaves_its_estimates_and_all_maps_as_they_are(monkeypatch):
    x, y = (states.numpy() for states in layer(30, 6))
    request = {"protocol": "in_sample", "map": "mlp:4", "neighbors": 8}
    whole = decompose(x, y, **request)
    monkeypatch.setattr(module, "PROBED_ANCHORS", 5)
    part = decompose(x, y, **request)
    probed = np.isfinite(part.degrees_of_freedom)
    assert probed.sum() == 5
    np.testing.assert_allclose(part.degrees_of_freedom[probed], whole.degrees_of_freedom[probed], rtol=1e-3)
    np.testing.assert_array_equal(part.tokenwise, whole.tokenwise)
