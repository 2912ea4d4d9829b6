"""Inside the residual: planted effects are found where they were put, and every figure is what its definition says."""

import errno
import io
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from rich.console import Console
from scipy.linalg import subspace_angles
from typer.testing import CliRunner

import deltalens as dl
from deltalens.cli.app import app
from deltalens.errors import InputError, StoreError
from deltalens.models.block_call import BlockRunner
from deltalens.models.interventions.backbone import undisturbed
from deltalens.models.jacobian import TokenJacobian
from deltalens.report.inside import inside_figure, inside_tables, write_inside_figure

RUN: dict[str, Any] = {"tokens": 256, "pool_tokens": 512, "window": 32, "neighbors": 24, "resamples": 100}
SMALL: dict[str, Any] = RUN | {"jacobian_tokens": 0}
PLANTED_LAYER, EVERY = 3, 8


@pytest.fixture(scope="module")
def found() -> dl.Inside:
    return dl.inside("tiny-gpt2", layers=[2], protocol=["held_out", "in_sample"], **SMALL | {"jacobian_tokens": 3})


def planted() -> dl.Model:
    """Attention adds nothing but at every eighth token of one layer."""
    model = dl.load("tiny-gpt2")
    for layer, block in enumerate(model.blocks):
        if layer != PLANTED_LAYER:
            with torch.no_grad():
                for parameter in block.attn.c_proj.parameters():
                    parameter.zero_()

    def sparse(_: object, __: object, output: Any) -> Any:
        kept = (torch.arange(output[0].shape[1]) % EVERY == 0) & (output[0].shape[1] > 1)
        return (output[0] * kept[:, None], *output[1:])

    model.blocks[PLANTED_LAYER].attn.register_forward_hook(sparse)
    return model


def test_a_planted_context_effect_is_found_in_its_layer_and_at_its_tokens() -> None:
    found = dl.inside(planted(), layers=[2, PLANTED_LAYER, 4], maps=["affine"], scope=[], **SMALL)
    rows = found.layers.set_index("layer")
    assert rows.loc[PLANTED_LAYER, "explained_mixer"] > 0.5
    for silent in (2, 4):
        assert rows.loc[silent, "explained_mixer"] == pytest.approx(0, abs=1e-4)
        assert rows.loc[silent, "explained_mlp"] == pytest.approx(1, abs=1e-4)
    tokens = found.tokens[found.tokens["layer"] == PLANTED_LAYER]
    here = tokens["position"] % EVERY == 0
    assert tokens.loc[here, "context_norm"].min() > 100 * tokens.loc[~here, "context_norm"].max()
    assert (found.tokens.loc[found.tokens["layer"] != PLANTED_LAYER, "context_norm"] < 1e-4).all()
    assert tokens.loc[here, "residual_norm"].median() > 2 * tokens.loc[~here, "residual_norm"].median()


def test_shares_of_the_sub_layers_sum_to_one_and_the_map_is_additive(found: dl.Inside) -> None:
    for _, row in found.layers.iterrows():
        assert row["sum_error"] < 1e-4
        assert row["update_mixer"] + row["update_mlp"] == pytest.approx(1, abs=1e-4)
        assert row["explained_mixer"] + row["explained_mlp"] + row["explained_rest"] == pytest.approx(1)
        if row["map"] == "affine":  # linear in the updates, so that the parts' residuals sum to the whole's
            assert row["explained_rest"] == pytest.approx(0, abs=1e-3)


def test_token_rows_are_those_of_a_run(found: dl.Inside, tmp_path: Path) -> None:
    run = dl.run("tiny-gpt2", layers=[2], maps=["affine"], protocol=["held_out"], out=tmp_path / "run", **RUN)
    rows = run.tokens()
    rows = rows[~rows["excluded"]].reset_index(drop=True)
    own = found.tokens[(found.tokens["map"] == "affine") & (found.tokens["protocol"] == "held_out")]
    for name in ("update_norm", "residual_norm", "proj_residual", "kl_single", "kl_in", "kl_out"):
        np.testing.assert_allclose(own[name], rows[name], rtol=1e-4, atol=1e-8)


def test_layer_rows_are_those_of_the_token_rows(found: dl.Inside) -> None:
    key = ["map", "protocol"]
    for _, row in found.layers.iterrows():
        own = found.tokens[(found.tokens[key] == row[key]).all(axis=1)]
        energy = own["residual_norm"] ** 2
        assert row["kl_in"] == pytest.approx(own["kl_in"].median())
        assert row["proj_residual"] == pytest.approx(own["proj_residual"].median(), rel=1e-12)
        assert row["kl_in_lo"] < row["kl_in"] < row["kl_in_hi"]
        assert row["recovered_out"] == pytest.approx(1 - own["kl_out"].sum() / own["kl_single"].sum())
        assert row["energy_in"] == pytest.approx((energy * own["proj_residual"]).sum() / energy.sum(), rel=1e-4)
        assert row["context_average"] == pytest.approx(1 - energy.sum() / (own["context_norm"] ** 2).sum(), rel=1e-4)
        assert 1 <= row["participation"] <= row["effective_rank"] <= row["effective_rank_random"]


def test_local_maps_are_those_of_the_whole_jacobian(found: dl.Inside) -> None:
    """The d × d matrices written out: of the layer by one product per dimension, of the fit by its definition."""
    model, spec = (
        dl.load("tiny-gpt2"),
        dl.RunSpec.parse(layers=[2], **{k: v for k, v in SMALL.items() if "jac" not in k}),
    )
    row = found.local_maps[found.local_maps["protocol"] == "held_out"].iloc[1]
    x, y, pool_x, pool_y, ids, inputs = states_of(spec, model, int(row["row"]))
    order = ((pool_x - x) ** 2).sum(1).argsort()[:24]
    rows, updates = pool_x[order], (pool_y - pool_x)[order]
    mean, shift = rows.mean(0), updates.mean(0)
    centered = rows - mean
    gram = centered @ centered.T + 0.01 * (centered**2).sum(1).mean() * torch.eye(24)
    fitted = (updates - shift).T @ torch.linalg.solve(gram, centered)
    with undisturbed(model.hf):
        exact = TokenJacobian(BlockRunner(model, 2), ids, inputs, int(row["position"]))
        own = exact.forward(torch.eye(len(x))).double().T - torch.eye(len(x))
    (u, s, v), (fu, fs, fv) = torch.linalg.svd(own), torch.linalg.svd(fitted)
    assert row["gain_layer"] == pytest.approx(float(s[0]), rel=0.02)
    assert row["gain_fit"] == pytest.approx(float(fs[0]), rel=1e-3)
    angles = np.degrees(subspace_angles(u[:, :8].numpy(), fu[:, :8].numpy()))
    assert row["angle_output"] == pytest.approx(angles.min(), abs=5)
    assert row["overlap_input"] == pytest.approx(float((v[:8] @ fv[:8].T).square().sum() / 8), abs=0.03)
    error = ((own - fitted) @ centered.T).square().sum() / (own @ centered.T).square().sum()
    assert row["agreement"] == pytest.approx(float(1 - error), abs=1e-3)
    residuals = [y - x - shift - matrix @ (x - mean) for matrix in (own, fitted)]
    assert row["linearised_share"] == pytest.approx(
        float(1 - (residuals[0].norm() / residuals[1].norm()) ** 2), abs=0.01
    )
    assert row["homogeneity"] == pytest.approx(float((own @ x) @ (y - x) / (y - x).square().sum()), abs=1e-3)


def states_of(spec: dl.RunSpec, model: dl.Model, row: int) -> tuple[torch.Tensor, ...]:
    """One included token's states, the pool's, and the token's window with its ids, without the study's own code."""
    from deltalens.experiment.documents import built_in_documents
    from deltalens.experiment.plan import make_plan

    corpus = make_plan(spec, model, built_in_documents(), Path("unused")).corpus
    assert corpus.pool is not None
    parts = []
    for windows in (corpus.evaluation, corpus.pool):
        with dl.capture(model, {"input_ids": windows.input_ids, "attention_mask": windows.attention_mask}) as states:
            kept = windows.attention_mask.bool() & (torch.arange(windows.input_ids.shape[1]) > 0)
            parts += [states.inputs[2][kept].double(), states.outputs[2][kept].double()]
            if windows is corpus.evaluation:
                window = int(torch.nonzero(kept)[row, 0])
                ids, inputs = windows.input_ids[window], states.inputs[2][window]
    return parts[0][row], parts[1][row], parts[2], parts[3], ids, inputs


def test_a_mixer_only_model_has_all_of_its_residual_from_the_mixer() -> None:
    found = dl.inside("tiny-mamba", layers=[1], maps=["affine"], scope=[], **SMALL | {"jacobian_tokens": 1})
    row = found.layers.iloc[0]
    assert row["sum_error"] < 1e-4
    assert (row["explained_mixer"], row["explained_mlp"]) == pytest.approx((1, 0), abs=1e-3)
    assert len(found.local_maps) == 1


def test_what_is_not_a_sum_of_sub_layers_is_undefined_and_said() -> None:
    model = dl.load("tiny-gpt2")
    model.blocks[2].register_forward_hook(lambda _, __, output: output * 1.05)
    found = dl.inside(model, layers=[2], maps=["affine"], scope=[], **SMALL)
    row = found.layers.iloc[0]
    assert np.isnan([row["explained_mixer"], row["explained_mlp"], row["update_mlp"]]).all()
    assert row["sum_error"] > 1e-2
    assert any("layer 2: input + mixer + mlp misses the output" in note for note in found.notes)


def test_a_global_fit_has_no_neighbourhoods_to_compare_maps_over() -> None:
    found = dl.inside(
        "tiny-gpt2", layers=[2], maps=["affine"], fit="global", scope=[], **SMALL | {"jacobian_tokens": 1}
    )
    assert len(found.local_maps) == 0
    assert any("local fits only" in note for note in found.notes)


def test_the_isolated_map_leaves_the_whole_effect_of_the_context() -> None:
    found = dl.inside("tiny-gpt2", layers=[2], maps=["isolated"], scope=[], **SMALL)
    assert found.layers["context_average"].iloc[0] == pytest.approx(0)
    np.testing.assert_allclose(found.tokens["residual_norm"], found.tokens["context_norm"])


def test_tables_and_figure_are_written_and_the_same_each_time(tmp_path: Path) -> None:
    fields = SMALL | {"layers": [1], "maps": ["affine"], "jacobian_tokens": 1}
    found = dl.inside("tiny-gpt2", out=tmp_path / "a", **fields)
    dl.inside("tiny-gpt2", out=tmp_path / "b", **fields)
    names = {
        "inside.parquet",
        "inside_tokens.parquet",
        "spectra.parquet",
        "local_maps.parquet",
        "inside.pdf",
        "inside.png",
    }
    assert {path.name for path in (tmp_path / "a").iterdir()} == names
    for name in sorted(name for name in names if name.endswith("parquet")):
        first, second = (pd.read_parquet(tmp_path / folder / name) for folder in "ab")
        pd.testing.assert_frame_equal(first, second, check_exact=True)
    pd.testing.assert_frame_equal(pd.read_parquet(tmp_path / "a" / "inside.parquet"), found.layers)


def test_any_number_of_maps_is_drawn_and_a_figure_is_whole_or_not_there(found: dl.Inside, tmp_path: Path) -> None:
    def many(table: pd.DataFrame) -> pd.DataFrame:
        return pd.concat([table.assign(map=f"low_rank:{rank}") for rank in range(1, 13)])

    tables = SimpleNamespace(
        layers=many(found.layers), spectra=many(found.spectra), local_maps=found.local_maps, notes=()
    )
    figure = inside_figure("tiny-gpt2", tables)
    assert len(figure.axes[1].lines) == 12 + 2  # a residual per map, the updates, random vectors

    def half(path: Path, **_: object) -> None:
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    failing = SimpleNamespace(savefig=half)
    with pytest.raises(StoreError, match="can't be written"):
        write_inside_figure(failing, tmp_path)  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


def test_long_names_of_maps_cut_no_figure(found: dl.Inside) -> None:
    long = SimpleNamespace(
        layers=found.layers.assign(map="orthogonal:scaled", layer=23, effective_rank_update=120.0), notes=(),
        spectra=found.spectra, local_maps=found.local_maps,
    )  # fmt: skip
    console = Console(width=80, file=io.StringIO())
    console.print(inside_tables("tiny-gpt2", long))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    for whole in ("layer", "(update)", "direct.", "/ null", "average", "KL of it", "nats", "(120)", "23→24"):
        assert whole in text[: text.index("rank: effective")]
    assert max(len(line.rstrip()) for line in text.splitlines()) <= 80


def test_a_folder_that_takes_no_files_is_refused_before_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(StoreError, match="takes no files"):
        dl.inside("no-such-model", out=tmp_path)


def test_bad_input_is_refused_before_any_model_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="jacobian_tokens is -1"):
        dl.inside("no-such-model", jacobian_tokens=-1)
    with pytest.raises(InputError, match="no field of a run"):
        dl.inside("no-such-model", depth=3)
    with pytest.raises(StoreError, match="choose another"):
        dl.inside("no-such-model", out=tmp_path / "file")


def test_the_command_line_shows_80_columns_and_json() -> None:
    flags = ["--layers", "2", "--tokens", "256", "--pool-tokens", "512", "--window", "32", "--neighbors", "24"]
    shown = CliRunner().invoke(app, ["inside", *flags, "--jacobian-tokens", "1"], env={"COLUMNS": "80"})
    assert shown.exit_code == 0
    assert "inside the residual" in shown.stdout
    assert max(len(line.rstrip()) for line in shown.stdout.splitlines()) <= 80
    plain = CliRunner().invoke(app, ["inside", *flags, "--jacobian-tokens", "0", "--maps", "affine", "--json"])
    content = json.loads(plain.stdout)
    assert [row["map"] for row in content["layers"]] == ["affine"]
    assert content["local_maps"] == []
