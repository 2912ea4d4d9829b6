"""Whole runs on a built-in model: the numbers repeat, resume, don't depend on the batch, and agree with the parts."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import stats

import deltalens as dl
from deltalens.experiment.store import RunFolder

SMALL: dict[str, Any] = {
    "layers": [1, 4],
    "maps": ["linear", "low_rank:4", "mean"],
    "tokens": 384,
    "pool_tokens": 512,
    "window": 48,
    "neighbors": 24,
    "resamples": 100,
}
KEY = ["layer", "map", "fit", "protocol"]


@pytest.fixture(scope="module")
def model() -> dl.Model:
    return dl.load("tiny-gpt2")


@pytest.fixture(scope="module")
def run(model: dl.Model, tmp_path_factory: pytest.TempPathFactory) -> dl.Run:
    return dl.run(model, out=tmp_path_factory.mktemp("run") / "r", **SMALL)


def assert_equal_runs(a: dl.Run, b: dl.Run) -> None:
    pd.testing.assert_frame_equal(a.tokens(), b.tokens(), check_exact=True)
    pd.testing.assert_frame_equal(a.summary(), b.summary(), check_exact=True)


def test_the_same_seed_gives_the_same_numbers(model: dl.Model, run: dl.Run, tmp_path: Path) -> None:
    assert_equal_runs(run, dl.run(model, out=tmp_path / "again", **SMALL))


def test_every_unit_has_one_summary_row_and_every_token_one_row_in_it(run: dl.Run) -> None:
    assert len(run.summary()) == 2 * 3 * 2
    sizes = run.tokens().groupby(KEY).size()
    assert sizes.nunique() == 1
    assert sizes.iloc[0] == run.manifest["corpus"]["evaluation"]["tokens"]


def test_excluded_tokens_stay_with_a_reason_and_without_measures(run: dl.Run) -> None:
    rows = run.tokens(layer=1, map="linear", protocol="held_out")
    left_out = rows[rows["excluded"]]
    assert set(left_out["reason"]) == {"first"}
    assert left_out[["relative_error", "kl_single", "kl_all", "nll"]].isna().all(axis=None)
    assert rows.loc[~rows["excluded"], "reason"].eq("").all()
    assert (run.summary()["n_excluded"] == len(left_out)).all()


def test_the_update_is_the_sum_of_its_parts(model: dl.Model, run: dl.Run) -> None:
    rows = run.tokens(layer=1, map="linear", protocol="held_out")
    rows = rows[~rows["excluded"]]
    angle = np.degrees(np.arccos(rows["cos_residual_tokenwise_signed"]))
    rebuilt = np.sqrt(
        rows["tokenwise_norm"] ** 2
        + rows["residual_norm"] ** 2
        + 2 * rows["tokenwise_norm"] * rows["residual_norm"] * np.cos(np.radians(angle))
    )
    np.testing.assert_allclose(rebuilt, rows["update_norm"], rtol=1e-4)


def test_summaries_are_those_of_the_token_rows(run: dl.Run) -> None:
    for _, row in run.summary().iterrows():
        tokens = run.tokens(**{name: row[name] for name in KEY})
        tokens = tokens[~tokens["excluded"]]
        assert row["relative_error"] == pytest.approx(tokens["relative_error"].median())
        both = tokens[["relative_error", "kl_single"]].dropna()
        assert row["spearman"] == pytest.approx(stats.spearmanr(both["relative_error"], both["kl_single"])[0])


def test_the_recorded_kl_is_that_of_one_patched_position(model: dl.Model, run: dl.Run) -> None:
    """The chain of corpus, capture, fit, patch and measure, against the shortest way to write it."""
    import deltalens.experiment.plan as plans
    from deltalens.experiment.documents import built_in_documents

    spec = dl.RunSpec.parse(**run.manifest["spec"])
    corpus = plans.make_plan(spec, model, built_in_documents(), Path("unused")).corpus
    rows = run.tokens(layer=4, map="mean", protocol="in_sample")
    windows = corpus.evaluation
    with dl.capture(model, {"input_ids": windows.input_ids, "attention_mask": windows.attention_mask}) as s:
        included = rows[~rows["excluded"]]
        index = torch.tensor(included[["window", "position"]].to_numpy())
        x = s.inputs[4][index[:, 0], index[:, 1]].double()
        y = s.outputs[4][index[:, 0], index[:, 1]].double()
    made = dl.decompose(x, y, protocol="in_sample", map="mean", neighbors=24)
    for row in (3, 100, 250):
        window, position = index[row].tolist()
        ids = corpus.evaluation.input_ids[window : window + 1, : position + 1]
        logits = model.hf(input_ids=ids).logits[0, -1].detach().double()

        def patch(module: Any, arguments: Any, output: Any, at: int = row) -> Any:
            states = output[0] if isinstance(output, tuple) else output
            states = states.clone()
            states[0, -1] = made.tokenwise[at].float()
            return (states, *output[1:]) if isinstance(output, tuple) else states

        handle = model.blocks[4].register_forward_hook(patch)
        patched = model.hf(input_ids=ids).logits[0, -1].detach().double()
        handle.remove()
        p, q = torch.log_softmax(logits, -1), torch.log_softmax(patched, -1)
        kl = float((p.exp() * (p - q)).sum())
        assert included["kl_single"].iloc[row] == pytest.approx(kl, rel=1e-3, abs=1e-7)


def test_in_sample_alignment_exceeds_held_out(run: dl.Run) -> None:
    table = run.summary().set_index(KEY)["cos_full_tokenwise"]
    for layer in (1, 4):
        assert table[layer, "linear", "local", "in_sample"] > table[layer, "linear", "local", "held_out"]


def test_another_batch_size_changes_no_more_than_rounding(model: dl.Model, run: dl.Run, tmp_path: Path) -> None:
    other = dl.run(model, out=tmp_path / "b", batch_size=3, **SMALL)
    ours, theirs = run.tokens(), other.tokens()
    for name in ("relative_error", "cos_full_tokenwise", "proj_residual"):
        close = (ours[name] - theirs[name]).abs().dropna() < 1e-4
        assert close.mean() >= 0.99
    floor = max(run.manifest["noise_floor"]["single"], 1e-6)
    moved = (ours["kl_single"] - theirs["kl_single"]).abs().dropna().quantile(0.99)
    assert moved <= max(floor, 1e-4 * ours["kl_single"].median())


def test_what_was_committed_is_not_measured_again(
    model: dl.Model, run: dl.Run, tmp_path: Path, monkeypatch: Any
) -> None:
    committed: list[str] = []
    write = RunFolder.write_unit

    def stop_after_five(self: RunFolder, key: Any, *rest: Any) -> None:
        if len(committed) == 5:
            raise KeyboardInterrupt
        committed.append(key.folder_name)
        write(self, key, *rest)

    monkeypatch.setattr(RunFolder, "write_unit", stop_after_five)
    with pytest.raises(KeyboardInterrupt):
        dl.run(model, out=tmp_path / "r", **SMALL)
    committed.clear()

    def count(self: RunFolder, key: Any, *rest: Any) -> None:
        committed.append(key.folder_name)
        write(self, key, *rest)

    monkeypatch.setattr(RunFolder, "write_unit", count)
    resumed = dl.run(model, out=tmp_path / "r", resume=True, **SMALL)
    assert len(committed) == 12 - 5
    assert_equal_runs(run, resumed)


def test_another_spec_in_the_same_folder_is_refused_with_the_difference(model: dl.Model, run: dl.Run) -> None:
    with pytest.raises(dl.StoreError, match="neighbors was 24, is 25"):
        dl.run(model, out=run.folder, resume=True, **(SMALL | {"neighbors": 25}))


def test_edited_weights_are_another_model(run: dl.Run) -> None:
    model = dl.load("tiny-gpt2")
    with torch.no_grad():
        model.hf.transformer.h[2].mlp.c_proj.weight.zero_()
    with pytest.raises(dl.StoreError, match="weights was"):
        dl.run(model, out=run.folder, resume=True, **SMALL)


def test_a_loaded_model_keeps_its_precision(model: dl.Model) -> None:
    with pytest.raises(dl.InputError, match=r"deltalens\.load"):
        dl.run(model, dtype="bfloat16", **SMALL)


def test_a_refused_run_leaves_the_folder_free(model: dl.Model, tmp_path: Path) -> None:
    options = SMALL | {"layers": [0], "neighbors": 300, "maps": ["mean"], "protocol": ["held_out"]}
    neox = dl.load("tiny-neox")
    with pytest.raises(dl.InputError, match="distinct"):
        dl.run(neox, out=tmp_path / "r", **options)
    assert (
        dl.run(neox, out=tmp_path / "r", resume=True, **(options | {"neighbors": 24})).manifest["status"] == "complete"
    )


@pytest.mark.parametrize(
    ("change", "says"),
    [({"scope": "Single"}, "scope"), ({"layer": "2"}, "layer"), ({"layer": 99}, "99"), ({"states": None}, "states")],
)
def test_an_intervention_that_means_nothing_is_refused(model: dl.Model, change: dict[str, Any], says: str) -> None:
    asked = {"layer": 1, "states": torch.zeros(1, 12, 128)} | change
    with pytest.raises((dl.InputError, TypeError), match=says):
        dl.intervene(model, torch.arange(12)[None], **asked)


def test_arguments_of_another_kind_are_refused_in_one_line() -> None:
    # In a process of its own, since the type checker of the tests would speak first.
    asked = "".join(f"\ntry: dl.run({call})\nexcept dl.InputError as error: print(error)" for call in _WRONG_KINDS)
    found = subprocess.run(
        [sys.executable, "-c", f"import deltalens as dl{asked}"], capture_output=True, text=True, check=True
    )
    assert found.stdout.splitlines() == list(_WRONG_KINDS.values())


_WRONG_KINDS = {
    "text=5": "text is a int; give a string, a Path, or a sequence of them",
    "text={'a': 1}": "text is a dict; give a string, a Path, or a sequence of them",
    "out=''": "out is ''; give the path of a folder",
    "out=3": "out is 3; give the path of a folder",
}


def test_without_controls_their_columns_are_not_there(model: dl.Model, tmp_path: Path) -> None:
    made = dl.run(model, out=tmp_path / "r", controls=False, **(SMALL | {"layers": [1], "maps": ["mean"]}))
    assert "kl_single" in made.tokens()
    assert not [name for name in made.tokens() if "random" in name or "shuffled" in name]
    assert not [name for name in made.summary() if name.endswith(("_null", "_chance"))]


@pytest.mark.parametrize("protocol", ["leave_one_out", "in_sample"])
def test_protocols_without_a_pool_need_no_pool_text(model: dl.Model, tmp_path: Path, protocol: str) -> None:
    text = " ".join(f"word{i % 37} and {i}" for i in range(400))
    made = dl.run(model, text, out=tmp_path / "r", protocol=protocol, **(SMALL | {"layers": [1], "maps": ["linear"]}))
    assert made.manifest["corpus"]["document_split"] == "none"
    assert np.isfinite(made.summary()["relative_error"]).all()


@pytest.mark.parametrize("name", ["tiny-neox", "tiny-mamba"])
def test_other_kinds_of_model_give_finite_numbers(tmp_path: Path, name: str) -> None:
    options = SMALL | {"layers": [2], "maps": ["isolated", "identity", "diagonal", "mlp:4", "affine", "orthogonal"]}
    made = dl.run(name, out=tmp_path / "r", **(options | {"tokens": 144}))
    summary = made.summary()
    assert np.isfinite(summary[["relative_error", "kl_single", "kl_all"]]).all(axis=None)
    skip = summary[summary["map"] == "identity"]
    assert skip["kl_single"].to_numpy()[0] == pytest.approx(skip["kl_skip"].to_numpy()[0])


def test_global_maps_are_fitted_once_for_the_whole_pool(model: dl.Model, tmp_path: Path) -> None:
    made = dl.run(model, out=tmp_path / "r", fit="global", **(SMALL | {"layers": [1]}))
    assert set(made.summary()["fit"]) == {"global"}
    assert made.neighbors().empty


def test_a_run_on_text_that_no_command_can_name_gives_no_command(model: dl.Model, tmp_path: Path) -> None:
    small = SMALL | {"layers": [1], "maps": ["mean"], "tokens": 96, "pool_tokens": 192, "scope": ""}
    text = " ".join(f"word{i % 37} and {i}" for i in range(900))
    (tmp_path / "text.txt").write_text(text)
    given = dl.run(model, text, out=tmp_path / "given", **small)
    assert given.manifest["command"] is None
    assert "given in Python" in (given.folder / "report.html").read_text()
    named = dl.run(model, tmp_path / "text.txt", out=tmp_path / "named", **small)
    assert str(tmp_path / "text.txt") in named.manifest["command"]
    assert dl.run(model, out=tmp_path / "built_in", **small).manifest["command"].startswith("deltalens run tiny-gpt2")


def test_an_approximate_search_reports_its_recall(model, tmp_path):
    pytest.importorskip("faiss")
    made = dl.run(model, out=tmp_path / "r", search="faiss", scope=(), **(SMALL | {"layers": [1]}))
    recall = made.summary()["neighbor_recall"]
    assert recall.between(0.5, 1).all()
    assert made.manifest["search"] == {
        "kind": "faiss", "recall_least": recall.min(), "recall_mean": pytest.approx(recall.mean())
    }  # fmt: skip
    tokens = made.tokens()
    assert 0 < tokens["neighbor_recall"].notna().groupby(tokens["map"]).sum().max() <= 2 * 256


def test_an_exact_search_says_so_and_has_no_recall(run):
    assert run.manifest["search"] == {"kind": "exact"}
    assert "neighbor_recall" not in run.summary()
