"""One model over seeds and over training revisions: names, spread, warnings, figures."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from memory import around, run_of, summary_rows
from transformers import GPT2LMHeadModel

import deltalens as dl
from deltalens import cli
from deltalens.report.training import depth_by_training
from deltalens.study.contrasts import control_contrast, protocol_contrast
from deltalens.study.spread import figure_spread, typical_spread, verdict_spread
from deltalens.study.verdicts import judge

TINY: dict[str, Any] = {
    "maps": "diagonal", "layers": "1,2", "tokens": 128, "pool_tokens": 256, "window": 64, "neighbors": 16,
    "resamples": 100,
}  # fmt: skip
COMMITS = {name: f"{number:040x}" for number, name in enumerate(("step0", "step1000", "step2000"), start=1)}


@pytest.fixture(scope="module")
def seeds(tmp_path_factory: pytest.TempPathFactory) -> dl.Study:
    return dl.repeat("tiny-gpt2", seeds=[0, 7], out=tmp_path_factory.mktemp("seeds") / "out", **TINY)


def test_each_seed_is_a_run_that_equals_one_made_alone(seeds: dl.Study, tmp_path: Path) -> None:
    assert [(run.folder.name, run.manifest["spec"]["seed"]) for run in seeds.runs] == [
        ("tiny-gpt2-seed-0", 0), ("tiny-gpt2-seed-7", 7),
    ]  # fmt: skip
    alone = dl.run("tiny-gpt2", out=tmp_path / "alone", seed=7, **TINY)
    pd.testing.assert_frame_equal(alone.summary(), seeds.runs[1].summary(), check_exact=True)


def test_the_spread_is_that_of_the_runs_own_summaries(seeds: dl.Study) -> None:
    spread = seeds.spread().set_index(["layer", "map", "protocol", "measure"])
    values = [
        run.summary().set_index(["layer", "map", "protocol"])["spearman"][(2, "diagonal", "held_out")]
        for run in seeds.runs
    ]
    row = spread.loc[(2, "diagonal", "held_out", "spearman")]
    assert [row["runs"], row["min"], row["median"], row["max"]] == [2, min(values), np.median(values), max(values)]
    assert min(values) < max(values)
    written = pd.read_csv(seeds.folder / "spread.csv")
    assert len(written) == len(seeds.spread())


def test_a_model_in_memory_and_a_text_are_taken_as_they_are(tmp_path: Path) -> None:
    model = dl.load("tiny-gpt2")
    text = ["A sentence that goes on. " * 120, "Another of its kind, which differs. " * 120, "Third. " * 300]
    study = dl.repeat(model, text, seeds=[1], out=tmp_path / "out", **TINY)
    assert study.runs[0].manifest["corpus"]["name"] == "texts"
    with pytest.raises(dl.InputError, match="both seed and seeds"):
        dl.repeat(model, text, seeds=[1], seed=2)


def test_spread_leaves_out_what_is_undefined_and_keeps_groups_apart() -> None:
    def run(value: float) -> Any:
        return run_of(summary_rows("held_out", 1, spearman=value))

    table = figure_spread(["a", "a", "a", "b"], [run(0.2), run(0.6), run(np.nan), run(0.9)])
    rows = table[table["measure"] == "spearman"].set_index("group")
    assert rows.loc["a", ["runs", "min", "median", "max"]].tolist() == [2, 0.2, 0.4, 0.6]
    assert rows.loc["b", ["runs", "min", "median", "max"]].tolist() == [1, 0.9, 0.9, 0.9]


def test_the_typical_figure_is_the_judged_protocols_median_layer() -> None:
    held = summary_rows("held_out", 3, spearman=[0.1, 0.5, 0.7])
    own = run_of(held, summary_rows("in_sample", 3, spearman=0.99))
    table = typical_spread(["a", "a"], [own, run_of(summary_rows("held_out", 3, spearman=[0.2, 0.3, 0.4]))])
    row = table[table["measure"] == "spearman"].iloc[0]
    assert [row["runs"], row["min"], row["max"]] == [2, 0.3, 0.5]


def test_a_run_that_sweeps_counts_with_its_first_point_and_plans_every_one(monkeypatch: Any, capsys: Any) -> None:
    points = [summary_rows("held_out", 1, spearman=value).assign(neighbors=k) for k, value in ((8, 0.2), (16, 0.9))]
    run = run_of(*points)
    run.manifest["spec"] = {"neighbors": [8, 16]}
    for table in (figure_spread(["a", "a"], [run, run]), typical_spread(["a", "a"], [run, run])):
        row = table[table["measure"] == "spearman"].iloc[0]
        assert [row["runs"], row["min"], row["max"]] == [2, 0.2, 0.2]
    words = "repeat --seeds 0 --layers 1,2 --maps mean --protocol held_out --neighbors 8,16 --dry-run --json"
    assert json.loads(call(monkeypatch, capsys, *words.split())[1])["plan"][0]["units"] == 4


def test_protocols_are_contrasted_on_the_maps_that_are_best_outside_the_sample() -> None:
    good = {"relative_update_error": [0.2, 0.2, 0.9]}
    run = run_of(
        summary_rows("held_out", 3, map="linear", cos_full_tokenwise=0.8, cos_full_tokenwise_null=0.1, **good),
        summary_rows("held_out", 3, map="diagonal", cos_full_tokenwise=0.1, relative_update_error=0.5),
        summary_rows("in_sample", 3, map="linear", cos_full_tokenwise=[0.9, 0.95, 0.0], **good),
        summary_rows("in_sample", 3, map="diagonal", cos_full_tokenwise=[0.0, 0.0, 0.99], relative_update_error=0.01),
    )
    row = protocol_contrast(["x"], [run]).set_index("figure").loc["alignment"]
    assert (row["held out"], row["held out, null"], row["in sample"]) == (0.8, 0.1, 0.95)


def test_controls_are_counted_by_their_intervals() -> None:
    columns = around("spearman_minus_random", [0.1, 0.005, -0.2, np.nan]) | around("kl_ratio_shuffled", 1.2)
    row = control_contrast(["x"], [run_of(summary_rows("held_out", 4, **columns))]).iloc[0]
    assert (row["layers above random"], row["layers above 1"]) == ("1 of 4", "4 of 4")
    assert control_contrast(["x"], [run_of(summary_rows("in_sample", 4))]).empty


def test_verdicts_over_seeds_are_counted() -> None:
    def run(cosine: float) -> Any:
        columns = around("cos_full_tokenwise", cosine, 0.005) | {"cos_full_tokenwise_null": 0.3}
        return run_of(summary_rows("held_out", 4, **columns))

    runs = [run(0.97), run(0.97), run(0.5)]
    table = verdict_spread(["a"] * 3, judge(["x", "y", "z"], runs)).set_index("claim")
    assert table.loc[1, ["supported", "partly", "not supported", "agree"]].tolist() == [2, 0, 1, False]
    assert table.loc[4, ["not measured", "agree"]].tolist() == [3, True]
    assert set(table.index) == {1, 2, 3, 4, 5, 6, 8}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hub's cache with three revisions of one model, the last two with equal weights."""
    folder = tmp_path_factory.mktemp("hub")
    repository = folder / "models--somebody--growing"
    (repository / "refs").mkdir(parents=True)
    built_in = dl.load("tiny-gpt2")
    for name, commit in COMMITS.items():
        hf = GPT2LMHeadModel(built_in.hf.config).eval()
        hf.load_state_dict(built_in.hf.state_dict())
        if name == "step0":
            torch.manual_seed(0)
            with torch.no_grad():
                for parameter in hf.parameters():
                    parameter.add_(0.02 * torch.randn_like(parameter))
        hf.save_pretrained(repository / "snapshots" / commit)
        built_in.tokenizer.save_pretrained(repository / "snapshots" / commit)
        (repository / "refs" / name).write_text(commit, encoding="utf8")
    return folder


@pytest.fixture
def offline(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))


@pytest.mark.usefixtures("offline")
def test_revisions_are_runs_with_a_figure_and_a_warning_where_weights_are_equal(tmp_path: Path) -> None:
    revisions = [*COMMITS, "step9999"]
    study = dl.checkpoints("somebody/growing", revisions=revisions, out=tmp_path / "out", **TINY)
    assert [outcome.state for outcome in study.outcomes] == ["done", "done", "done", "failed"]
    assert "step9999" in str(study.failures[0].member.spec.revision)
    assert [run.manifest["model"]["revision"] for run in study.runs] == list(COMMITS.values())
    assert len(study.warnings) == 1
    assert study.warnings[0].startswith("step1000 and step2000 have equal weights")
    assert study.warnings[0] in (study.folder / "README.md").read_text(encoding="utf8")
    for kind in ("png", "pdf", "svg"):
        assert (study.folder / "figures" / f"training_diagonal.{kind}").stat().st_size > 1000
    assert (study.folder / "compare.html").is_file()
    layers, values = depth_by_training(study.runs, "diagonal", "spearman")
    assert layers == [1, 2]
    expected = study.runs[0].summary().query("protocol == 'held_out' and layer == 2")["spearman"].iloc[0]
    assert values[1, 0] == expected
    assert values[1, 0] != values[1, 1] == values[1, 2]


def test_a_model_in_memory_has_one_revision() -> None:
    with pytest.raises(dl.InputError, match="one revision"):
        dl.checkpoints(dl.load("tiny-gpt2"), revisions=["a"])
    with pytest.raises(dl.InputError, match="give revisions alone"):
        dl.checkpoints("tiny-gpt2", revisions=["a"], revision="b")


def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["deltalens", *arguments])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    out, err = capsys.readouterr()
    return int(caught.value.code or 0), out, err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["repeat"], "give --seeds 0,1,2"),
        (["repeat", "--seeds", "0,1", "--seed", "2"], "both seed and seeds"),
        (["repeat", "--seeds", "0,x"], "whole numbers"),
        (["repeat", "--seeds", "0", "--ridge", "0"], "ridge"),
        (["checkpoints", "a/b"], "give --revisions step0,step1000"),
        (["checkpoints", "a/b", "--revisions", "x,x"], "twice"),
        (["checkpoints", "a/b", "--revisions", "x", "--resume"], "--out"),
    ],
)
def test_commands_refuse_in_one_line(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    arguments: list[str],
    says: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = call(monkeypatch, capsys, *arguments, "--quiet")
    assert (code, out) == (2, "")
    assert says in err
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_series_is_resumed_by_its_folder_alone(
    seeds: dl.Study, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = call(monkeypatch, capsys, "repeat", "--resume", "--out", str(seeds.folder))
    assert code == 0
    assert "tiny-gpt2-seed-7" in out
    assert "swap_log_ratio" in out
    assert max(len(line) for line in out.splitlines() if not line.startswith("index: ")) <= 80
    code, _, err = call(monkeypatch, capsys, "repeat", "--resume", "--out", str(seeds.folder), "--seeds", "0")
    assert code == 1
    assert "holds another study" in err


def test_the_commands_plan_names_every_revision(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = ["checkpoints", "a/b", "--revisions", "step0,step1", "--dry-run", "--json"]
    code, out, _ = call(monkeypatch, capsys, *arguments)
    assert code == 0
    assert [(row["name"], row["revision"]) for row in json.loads(out)["plan"]] == [
        ("step0", "step0"),
        ("step1", "step1"),
    ]


def test_layers_that_a_run_lacks_are_blank() -> None:
    runs = [run_of(summary_rows("held_out", 3, spearman=[0.1, 0.2, 0.3])), run_of(summary_rows("held_out", 2))]
    layers, values = depth_by_training(runs, "low_rank:8", "spearman")
    assert layers == [0, 1, 2]
    np.testing.assert_array_equal(values, [[0.1, np.nan], [0.2, np.nan], [0.3, np.nan]])
