import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from synthetic import Recipe, SyntheticRun, write_run

from deltalens.errors import InputError
from deltalens.report import compare_report
from deltalens.report.comparability import comparability_warnings, same_tokens
from deltalens.report.compare import comparison_payload
from deltalens.report.differences import all_differences, independent_interval, matched_layers, run_differences
from deltalens.report.protocol import distinct_names

BASE = Recipe(layers=(0, 1, 2), n_layers=3, windows=10, window=16, maps=("diagonal", "linear"))


def variant(folder: Path, **changes: object) -> SyntheticRun:
    return write_run(folder, Recipe(**{**vars(BASE), **changes}))


def edit_manifest(run: SyntheticRun, section: str, **changes: object) -> None:
    content = run.manifest
    content[section] |= changes
    (run.folder / "run.json").write_text(json.dumps(content), encoding="utf-8")


def test_a_run_does_not_differ_from_itself(tmp_path: Path) -> None:
    run = variant(tmp_path / "a")
    found = run_differences(run, run, 1)
    assert {d.paired for d in found if d.protocol == "held_out" and d.measure == "relative_error"} == {True}
    assert all(d.difference == 0 and d.low == d.high == 0 for d in found if d.paired)
    assert all(d.difference == 0 and d.low <= 0 <= d.high for d in found if not d.paired)


def test_a_known_shift_of_every_token_is_found_exactly(tmp_path: Path) -> None:
    first, second = variant(tmp_path / "a"), variant(tmp_path / "b")
    tokens = second.tokens()
    tokens["relative_error"] += 0.25
    tokens.to_parquet(second.folder / "tokens.parquet")
    shifted = [d for d in run_differences(first, second, 1) if d.measure == "relative_error" and d.paired]
    assert len(shifted) == 6
    assert all(d.low == pytest.approx(0.25) == d.high == d.difference for d in shifted)


def test_other_tokens_are_never_paired(tmp_path: Path) -> None:
    first, second = variant(tmp_path / "a"), variant(tmp_path / "b", windows=8)
    assert not same_tokens(first, second)
    assert not any(d.paired for d in run_differences(first, second, 1))


def test_an_independent_difference_has_both_runs_uncertainty() -> None:
    a = pd.Series({"m": 1.0, "m_lo": 0.7, "m_hi": 1.3})
    b = pd.Series({"m": 2.0, "m_lo": 1.6, "m_hi": 2.4})
    assert independent_interval(a, b, "m") == pytest.approx((0.5, 1.5))
    assert np.isnan(independent_interval(a, b.drop("m_lo"), "m")).all()


def test_models_of_different_depth_are_matched_by_relative_depth(tmp_path: Path) -> None:
    shallow = variant(tmp_path / "a", layers=tuple(range(3)), n_layers=3)
    deep = variant(tmp_path / "b", layers=tuple(range(12)), n_layers=12)
    assert [b for _, b in matched_layers(shallow, deep)] == [1, 5, 9]
    assert comparison_payload([shallow, deep], ["a", "b"], [])["normalised"]
    assert not comparison_payload([shallow, shallow], ["a", "b"], [])["normalised"]


def test_every_other_run_is_compared_with_the_first(tmp_path: Path) -> None:
    runs = [variant(tmp_path / name, seed=seed) for seed, name in enumerate("abc")]
    assert {d.run for d in all_differences(runs)} == {1, 2}


def warnings_between(first: SyntheticRun, second: SyntheticRun) -> str:
    return "\n".join(comparability_warnings([first, second], ["one", "two"]))


@pytest.mark.parametrize(
    ("section", "changes", "expected"),
    [
        ("corpus", {"hash": "cd" * 32}, "different texts"),
        ("model", {"attention": "eager"}, "attention"),
        ("model", {"dtype": "bfloat16"}, "dtype"),
        ("model", {"vocabulary": 7}, "different vocabularies"),
        ("model", {"name": "another"}, "equal byte for byte"),
        ("spec", {"neighbors": 32}, "neighbors"),
        ("versions", {"torch": "2.0.0"}, "version of torch"),
    ],
)
def test_each_reason_not_to_compare_is_a_warning(
    tmp_path: Path, section: str, changes: dict[str, object], expected: str
) -> None:
    first, second = variant(tmp_path / "a"), variant(tmp_path / "b")
    assert warnings_between(first, second) == ""
    edit_manifest(second, section, **changes)
    assert expected in warnings_between(first, second)


def test_runs_without_a_common_map_are_told_apart_and_still_drawn(tmp_path: Path) -> None:
    first, second = variant(tmp_path / "a", maps=("linear",)), variant(tmp_path / "b", maps=("mlp:32",))
    assert "no map in common" in warnings_between(first, second)
    assert compare_report([first, second], tmp_path / "c.html").stat().st_size > 10_000


def test_runs_of_one_model_get_names_that_tell_them_apart(tmp_path: Path) -> None:
    runs = [variant(tmp_path / "a"), variant(tmp_path / "b"), variant(tmp_path / "b")]
    names = distinct_names(runs)
    assert len(set(names)) == 3
    assert names[0] == "synthetic-30 (a)"


def test_one_run_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="at least two"):
        compare_report([variant(tmp_path / "a")], tmp_path / "c.html")
