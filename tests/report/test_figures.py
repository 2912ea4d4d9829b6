from pathlib import Path

import matplotlib
import pytest
from memory import run_of, summary_rows
from synthetic import Recipe, SyntheticRun, write_run

from deltalens.errors import InputError, StoreError
from deltalens.report import write_figures
from deltalens.report.plots import angle_plot, profile_plot, scatter_plot

FEW = Recipe(layers=(0, 1), n_layers=2, windows=3, maps=("diagonal",), protocols=("held_out",))


def test_each_figure_comes_as_vector_and_bitmap(tmp_path: Path) -> None:
    paths = write_figures(write_run(tmp_path / "run", FEW), tmp_path / "figures")
    stems = {p.stem for p in paths}
    assert {"profile_cos_full_tokenwise", "angles", "error_against_kl"} <= stems
    assert {p.suffix for p in paths} == {".pdf", ".svg", ".png"}
    assert len(paths) == 3 * len(stems)
    assert all(p.stat().st_size > 1000 for p in paths)


def test_figures_leave_matplotlib_s_settings_alone(tmp_path: Path) -> None:
    before = dict(matplotlib.rcParams)
    write_figures(write_run(tmp_path / "run", FEW), tmp_path / "figures")
    assert dict(matplotlib.rcParams) == before


@pytest.mark.parametrize("drop", [("kl_single", "spearman"), ("angle_residual_tokenwise", "angle_full_tokenwise")])
def test_figures_that_were_not_measured_are_left_out(tmp_path: Path, drop: tuple[str, ...]) -> None:
    run = write_run(tmp_path / "run", Recipe(**{**vars(FEW), "drop": drop, "controls": False, "nulls": False}))
    stems = {p.stem for p in write_figures(run, tmp_path / "figures")}
    assert not stems & ({"error_against_kl", "profile_spearman"} if "kl_single" in drop else {"angles"})
    assert "profile_cos_full_tokenwise" in stems


def test_an_empty_run_has_no_figures(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no finished unit"):
        write_figures(run_of(summary_rows("held_out", 0)), tmp_path)


def test_a_plot_for_notebooks_holds_the_run_s_numbers(run: SyntheticRun) -> None:
    figure = profile_plot(run, "relative_error")
    wanted = run.summary().query("map == 'diagonal' and protocol == 'held_out'").sort_values("layer")["relative_error"]
    lines = [t for t in figure.data if t.name == "diagonal"]
    assert len(lines) == 2
    assert list(lines[0].y) == list(wanted)
    included = (~run.tokens(layer=2, map="diagonal", protocol="held_out")["excluded"]).sum()
    assert len(scatter_plot(run, 2, "diagonal").data[1].x) == included
    assert len(angle_plot(run, "diagonal").data[0].z) == 6


def test_an_unknown_measure_map_or_layer_is_named(run: SyntheticRun) -> None:
    with pytest.raises(InputError, match="no measure 'nonsense'"):
        profile_plot(run, "nonsense")
    with pytest.raises(InputError, match="layer 99"):
        scatter_plot(run, 99, "diagonal")
    with pytest.raises(InputError, match="no map 'nonsense'"):
        angle_plot(run, "nonsense")
