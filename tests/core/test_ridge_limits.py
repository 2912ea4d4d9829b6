"""As the ridge grows a map goes to the identity, and to nothing else: no hang, no NaN, no endless ridge."""

import pytest
import torch

from deltalens.core.decompose import decompose
from deltalens.errors import InputError


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["linear", "low_rank:2", "orthogonal", "scalar", "diagonal", "affine", "mlp:4"])
def test_the_largest_ridge_gives_the_identity_or_the_mean(name: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, 6, generator=generator, dtype=dtype)
    y = x + torch.randn(40, 6, generator=generator, dtype=dtype)
    found = decompose(x, y, protocol="in_sample", map=name, neighbors=12, ridge=1e12)
    limit = "mean" if name in ("affine", "mlp:4") else "identity"
    expected = decompose(x, y, protocol="in_sample", map=limit, neighbors=12)
    # Adam's last steps have a size of their own, so a network comes near its limit and not onto it.
    assert (found.tokenwise - expected.tokenwise).abs().max() <= (1e-3 if name == "mlp:4" else 1e-4)


@pytest.mark.parametrize("ridge", [1e13, 1e300, float("inf"), float("nan"), 0.0, -1.0])
def test_a_ridge_out_of_range_is_refused(ridge: float) -> None:
    x = torch.eye(4)
    with pytest.raises(InputError, match="ridge"):
        decompose(x, 2 * x, protocol="in_sample", map="linear", neighbors=2, ridge=ridge)
