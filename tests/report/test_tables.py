from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from synthetic import Recipe, SyntheticRun, write_run

from deltalens.report import claims_for, claims_table, summary_table


def printed(renderable: object, width: int = 80) -> list[str]:
    console = Console(width=width, file=StringIO(), force_terminal=False)
    console.print(renderable)
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined]


def test_the_table_fits_80_columns_with_a_row_per_layer_and_map(run: SyntheticRun) -> None:
    lines = printed(summary_table(run), width=200)
    assert max(map(len, (line.rstrip() for line in lines))) <= 80
    for name in ("diagonal", "low_rank:8", "orthogonal", "mlp:32"):
        assert sum(name in line for line in lines) == 6


def test_long_map_names_and_three_digit_layers_still_fit(tmp_path: Path) -> None:
    recipe = Recipe(layers=(9, 101), n_layers=120, maps=("orthogonal:scaled", "low_rank:256"), fits=("local", "global"))
    lines = printed(summary_table(write_run(tmp_path / "r", recipe)), width=200)
    assert max(map(len, (line.rstrip() for line in lines))) <= 80
    assert any("101→102" in line for line in lines)


def test_the_table_shows_the_held_out_figures(run: SyntheticRun) -> None:
    row = run.summary().query("layer == 0 and map == 'diagonal' and protocol == 'held_out'").iloc[0]
    line = next(line for line in printed(summary_table(run)) if "diagonal" in line)
    assert f"{row['cos_full_tokenwise']:.2f}" in line
    assert f"{row['spearman']:.2f} {row['spearman_lo']:.2f}".replace(" 0.", " .") in line


@pytest.mark.parametrize(
    "recipe",
    [
        Recipe(controls=False, nulls=False),
        Recipe(nan_share=1.0, layers=(0,), n_layers=1),
        Recipe(maps=("identity",), layers=(0,), n_layers=1),
        Recipe(drop=("kl_single", "kl_all", "spearman", "spearman_lo", "spearman_hi")),
    ],
)
def test_missing_figures_are_dashes(tmp_path: Path, recipe: Recipe) -> None:
    lines = printed(summary_table(write_run(tmp_path / "r", recipe)))
    assert not any("nan" in line.lower() for line in lines)


def test_every_claim_is_printed_with_verdict_and_rule(run: SyntheticRun) -> None:
    text = "\n".join(printed(claims_table(claims_for([run])), width=120))
    assert text.count("Rule:") == 9
    assert "not measured" in text


def test_markup_in_names_is_printed_as_it_is(tmp_path: Path) -> None:
    run = write_run(tmp_path / "r", Recipe(model="[red]x[/red]", layers=(0,), n_layers=1))
    assert any("[red]x[/red]" in line for line in printed(summary_table(run)))
