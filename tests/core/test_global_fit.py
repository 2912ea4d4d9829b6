"""A global map's parameters alone give the tokenwise part that its decomposition gives."""

import numpy as np
import pytest
import torch
from neighbourhood_kinds import KINDS, make

from deltalens.core.decompose import decompose
from deltalens.core.global_fit import fit_global
from deltalens.core.maps import GlobalMap, parse_map
from deltalens.errors import InputError

NAMES = ("identity", "mean", "scalar", "diagonal", "linear", "affine", "low_rank:3", "orthogonal", "orthogonal:scaled",
         "mlp:5")  # fmt: skip


def pool_of(kind: str, dtype: torch.dtype, rows: int | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    anchors, pool_x, pool_y, _ = make(kind)
    x, px, py = (torch.as_tensor(a).to(dtype) for a in (anchors, pool_x, pool_y))
    return x, px[:rows], py[:rows]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rows", [None, 9])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NAMES)
def test_parameters_give_the_tokenwise_part_to_rounding(
    name: str, kind: str, rows: int | None, dtype: torch.dtype
) -> None:
    x, px, py = pool_of(kind, dtype, rows)
    expected = decompose(x, py.new_zeros(x.shape), pool=(px, py), map=name, fit="global").tokenwise
    parameters = fit_global(px, py, parse_map(name))
    size = max(float(x.abs().max()), float(expected.abs().max()), float(px.abs().max()))
    # A network adds hidden units of either sign, so that its rounding is that of the sum of their sizes.
    units = 3e3 if name.startswith("mlp") else 200
    assert float((x + parameters.update(x) - expected).abs().max()) <= units * torch.finfo(dtype).eps * size


@pytest.mark.parametrize("name", NAMES)
def test_parameters_rebuild_the_map_and_are_no_views_of_the_pool(name: str) -> None:
    x, px, py = pool_of("random", torch.float32, None)
    found = fit_global(px, py, parse_map(name))
    assert isinstance(found, GlobalMap)
    again = type(found)(**{key: value.clone() for key, value in found.tensors().items()})
    np.testing.assert_array_equal(again.update(x), found.update(x))
    before = found.update(x)
    px.zero_()
    py.zero_()
    np.testing.assert_array_equal(before, found.update(x))


def test_low_rank_is_stored_as_its_factors() -> None:
    _, px, py = pool_of("random", torch.float32, None)
    shapes = {name: tuple(t.shape) for name, t in fit_global(px, py, parse_map("low_rank:3")).tensors().items()}
    assert shapes == {"left": (24, 3), "right": (3, 24)}


def test_other_fits_of_the_same_pool_differ() -> None:
    x, px, py = pool_of("random", torch.float32, None)
    updates = {name: fit_global(px, py, parse_map(name)).update(x) for name in NAMES}
    for one in NAMES:
        for other in NAMES:
            assert one == other or not torch.allclose(updates[one], updates[other], rtol=1e-3), (one, other)


@pytest.mark.parametrize("change", [{"rows": 0}, {"ridge": 0.0}, {"nan": True}])
def test_what_cannot_be_fitted_is_refused(change: dict[str, float]) -> None:
    _, px, py = pool_of("random", torch.float32, change.get("rows"))
    if "nan" in change:
        px[0, 0] = torch.nan
    with pytest.raises(InputError):
        fit_global(px, py, parse_map("linear"), ridge=change.get("ridge", 0.01))
