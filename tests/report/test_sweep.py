"""Curves over expressivity: regimes are thirds, frontiers aren't dominated, knees are where the curve bends most."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deltalens.errors import InputError
from deltalens.report.points import parse_point
from deltalens.report.sweep import frontier, is_sweep, knee, sweep_table
from deltalens.report.sweep_figures import write_sweep_figures
from deltalens.report.sweep_section import sweep_section


class Swept:
    """A run's summary with two maps, two layers, four neighbourhood sizes and two ridges."""

    folder = Path("swept")

    def __init__(self, **spec: Any) -> None:
        self.manifest = {
            "spec": {"maps": ["linear", "mlp:8"], "neighbors": [8, 16, 32, 64], "ridge": [0.1, 0.01]} | spec
        }

    def summary(self) -> pd.DataFrame:
        rows = [
            {
                "layer": layer, "map": name, "fit": "local", "protocol": protocol, "neighbors": k, "ridge": ridge,
                "degrees_of_freedom": k / (1 + ridge) + layer, "relative_error": scale * (0.1 + (4 + layer) / k),
                "relative_error_lo": 0.0, "cos_full_tokenwise": 1 - 1 / k, "spearman": 0.9 - layer / 10,
            }
            for layer in (0, 1)
            for name, scale in (("linear", 1.0), ("mlp:8", 0.8))
            for protocol in ("held_out", "in_sample")
            for k in (8, 16, 32, 64)
            for ridge in (0.1, 0.01)
        ]  # fmt: skip
        return pd.DataFrame(rows)

    def tokens(self, *_: object, **__: object) -> pd.DataFrame:
        return pd.DataFrame()

    neighbors = pool = tokens


@pytest.fixture(scope="module")
def table() -> pd.DataFrame:
    return sweep_table(Swept())


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=12))
def test_no_point_of_the_frontier_is_dominated_and_every_other_is(points):
    freedom, error = (np.array([p[i] for p in points], dtype=float) for i in (0, 1))
    best = set(frontier(freedom, error).tolist())
    for i in range(len(points)):
        others = [j for j in range(len(points)) if j != i and freedom[j] > 0 and freedom[j] <= freedom[i]]
        beaten = any(error[j] < error[i] for j in others) or any(j in best and error[j] == error[i] for j in others)
        assert (i in best) == (freedom[i] > 0 and not beaten)


def test_undefined_figures_are_on_no_frontier():
    assert frontier(np.array([1.0, math.nan, 2.0]), np.array([math.nan, 0.1, 0.5])).tolist() == [2]
    assert frontier(np.array([]), np.array([])).tolist() == []


def test_the_knee_of_a_known_curve_is_where_its_slope_is_that_of_the_chord():
    # With u = log freedom in 0-1 and error = exp(-a u): 1 - u - v is largest where dv/du = -1, v brought to 0-1.
    a = 5.0
    u = np.linspace(0, 1, 2001)
    error = np.exp(-a * u)
    fall = 1 - math.exp(-a)
    wanted = math.log(a / fall) / a
    assert u[knee(np.exp(3 * u), error)] == pytest.approx(wanted, abs=1e-3)


@settings(max_examples=40, deadline=None)
@given(st.floats(0.1, 50), st.floats(0.1, 10), st.floats(0, 0.01))
def test_the_knee_does_not_depend_on_units(stretch, scale, shift):
    freedom, error = np.array([1.0, 2, 4, 8, 16]), np.array([1.0, 0.5, 0.3, 0.28, 0.27])
    assert knee(freedom * stretch, (error + shift) * scale) == knee(freedom, error) == 2


@pytest.mark.parametrize(
    "error",
    [[1.0, 0.75, 0.5, 0.25], [1.0, 0.95, 0.8, 0.1], [1.0, 0.98, 0.97, 0.96], [1.0, 0.1]],
    ids=["straight", "bulging", "flat", "two points"],
)
def test_a_curve_that_does_not_bend_has_no_knee(error):
    assert knee(2.0 ** np.arange(len(error)), np.array(error)) is None


def test_the_table_is_long_and_keeps_the_point(table):
    assert len(table) == 2 * 2 * 2 * 8
    assert list(table)[:7] == ["layer", "map", "family", "fit", "protocol", "neighbors", "ridge"]
    assert set(table["family"]) == {"linear", "mlp"}
    assert not table.duplicated(["layer", "map", "protocol", "neighbors", "ridge"]).any()


def test_regimes_are_thirds_of_the_errors_under_one_protocol(table):
    for _, rows in table.groupby("protocol"):
        by = rows.groupby("error_regime")["relative_error"]
        assert by.max()["low"] < by.min()["middle"] <= by.max()["middle"] < by.min()["high"]
        assert rows["error_regime"].value_counts().between(len(rows) // 3 - 2, len(rows) // 3 + 2).all()


def test_each_curve_has_its_own_frontier_and_knee(table):
    for (layer, _, _, _), rows in table.groupby(["layer", "family", "fit", "protocol"]):
        best = rows[rows["frontier"]].sort_values("degrees_of_freedom")
        assert best["neighbors"].tolist() == [8, 16, 32, 64]
        assert (best["ridge"] == 0.1).all()  # the same error at fewer degrees of freedom
        assert rows.loc[rows["knee"], "neighbors"].tolist() in ([16], [32])
        assert rows["knee"].sum() == 1
        assert layer in (0, 1)


def test_a_run_without_a_curve_has_no_section_and_no_figures(tmp_path):
    class Plain(Swept):
        def summary(self) -> pd.DataFrame:
            rows = super().summary()
            return rows[(rows["neighbors"] == 8) & (rows["ridge"] == 0.1)]

    plain = Plain(neighbors=8, ridge=0.1)
    assert not is_sweep(sweep_table(plain))
    assert sweep_section(plain) is None
    assert write_sweep_figures(plain, tmp_path) == []


def test_figures_are_written_per_protocol_and_again_the_same(tmp_path):
    first, again = (write_sweep_figures(Swept(), tmp_path / name) for name in ("a", "b"))
    kinds = {"sweep_held_out", "sweep_in_sample", "sweep_regimes_held_out", "sweep_regimes_in_sample"}
    assert {path.stem for path in first} == kinds
    assert len(first) == 4 * 3
    for one, other in zip(first, again, strict=True):
        assert one.suffix == ".svg" or one.read_bytes() == other.read_bytes()


def test_the_section_names_every_knee(table):
    section = sweep_section(Swept())
    assert section is not None
    assert len(section.rows) == int((table["knee"] & (table["protocol"] == "held_out")).sum()) == 4
    assert {row[0] for row in section.rows} == {"0→1", "1→2"}
    assert all(image.startswith("data:image/svg+xml;base64,") for _, image in section.images)


@pytest.mark.parametrize("text", ["neighbors", "=3", "neighbors="])
def test_a_point_that_cannot_be_read_is_refused(text):
    with pytest.raises(InputError, match="neighbors=16"):
        parse_point(text)


def test_a_point_is_read_from_text():
    assert parse_point("neighbors=16, ridge=0.10") == {"neighbors": "16", "ridge": "0.10"}
    assert parse_point(None) == {}
