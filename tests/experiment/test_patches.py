"""Patches that can't be made say nothing: NaN, for the map's own state as for every control."""

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from torch import Tensor

import deltalens as dl
from deltalens.experiment import layer as layers
from deltalens.experiment.fitting import AnchorFits, Fit
from deltalens.experiment.patches import spread

SMALL: dict[str, Any] = {
    "layers": [2], "maps": ["mean"], "tokens": 96, "pool_tokens": 192, "window": 24, "neighbors": 16,
    "resamples": 100, "protocol": ["held_out"],
}  # fmt: skip
BAD = (5, 40)  # rows among the included tokens


@pytest.fixture(scope="module")
def model() -> dl.Model:
    return dl.load("tiny-gpt2")


@pytest.fixture(scope="module")
def untouched(model: dl.Model, tmp_path_factory: pytest.TempPathFactory) -> pd.DataFrame:
    return included(dl.run(model, out=tmp_path_factory.mktemp("run") / "r", **SMALL))


def included(run: dl.Run) -> pd.DataFrame:
    tokens = run.tokens()
    return tokens[~tokens["excluded"]].reset_index(drop=True)


def spoil(states: Tensor, value: float) -> Tensor:
    spoiled = states.clone()
    spoiled[list(BAD), 0] = value
    return spoiled


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30])
def test_what_a_map_cannot_give_in_the_dtype_of_the_model_has_no_effect(
    model: dl.Model, untouched: pd.DataFrame, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: float
) -> None:
    fit = AnchorFits.fit

    def spoiled(self: AnchorFits, map: Any) -> Fit:
        made = fit(self, map)
        made.decomposition.tokenwise.copy_(spoil(made.decomposition.tokenwise, value))
        return made

    monkeypatch.setattr(AnchorFits, "fit", spoiled)
    if value == 1e30:  # finite in the float32 of the fits, not in the float16 of the model
        model = dl.load("tiny-gpt2", dtype="float16")
    rows = included(dl.run(model, out=tmp_path / "r", **SMALL))
    own = ["kl_single", "nll_delta_single", "top1_agrees_single"]
    lost = rows["kl_single"].isna()
    assert sorted(rows.index[lost]) == sorted(BAD)
    assert rows.loc[lost, own].isna().all(axis=None)
    assert untouched["kl_single"].notna().all()
    # With all positions replaced, what comes after in the window sees a state that wasn't.
    first = rows.loc[list(BAD)].groupby("window")["position"].min()
    after = rows["position"] >= rows["window"].map(first).fillna(10**9)
    assert after.sum() > len(BAD)
    pd.testing.assert_series_equal(rows["kl_all"].isna(), after, check_names=False)


def test_controls_without_a_finite_state_have_no_effect(
    model: dl.Model, untouched: pd.DataFrame, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    control_patches = layers.control_patches
    monkeypatch.setattr(
        layers,
        "control_patches",
        lambda *given: {name: spoil(states, torch.inf) for name, states in control_patches(*given).items()},
    )
    rows = included(dl.run(model, out=tmp_path / "r", **SMALL))
    controls = ["kl_single_random", "kl_single_shuffled", "kl_residual_only", "kl_in", "kl_out", "kl_tokenwise_matched"]
    for name in controls:
        assert sorted(rows.index[rows[name].isna() & untouched[name].notna()]) == sorted(BAD)
        others = rows.index.difference(list(BAD))
        pd.testing.assert_series_equal(rows.loc[others, name], untouched.loc[others, name])


def test_where_there_is_nothing_to_put_the_original_state_stays() -> None:
    onto = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0)).half()
    inside = torch.tensor([[False, True, True], [True, False, True]])
    rows = torch.ones(4, 4)
    rows[1, 2] = 1e6  # beyond float16
    patch = spread(rows, onto, inside)
    assert torch.equal(patch.undefined, torch.tensor([[False, False, True], [False, False, False]]))
    kept = ~inside | patch.undefined
    assert torch.equal(patch.states[kept], onto[kept])
    assert bool((patch.states[~kept] == 1).all())
    assert torch.equal(patch.undefined_in("all"), torch.tensor([[False, False, True], [False, False, False]]))
