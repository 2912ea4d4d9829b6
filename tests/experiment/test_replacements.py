"""Replacements are what the decomposition says, survive their file, and a damaged file is refused in one line."""

import io
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import deltalens as dl
from deltalens import cli
from deltalens.experiment.documents import built_in_documents
from deltalens.experiment.plan import make_plan
from deltalens.report.replacements import replacements_table

MAPS = ("identity", "mean", "scalar", "diagonal", "linear", "affine", "low_rank:4", "orthogonal", "orthogonal:scaled",
        "mlp:8")  # fmt: skip
SMALL: dict[str, Any] = {"tokens": 512, "pool_tokens": 1024, "window": 64, "resamples": 100}


@pytest.fixture(scope="module")
def model() -> dl.Model:
    return dl.load("tiny-gpt2")


@pytest.fixture(scope="module")
def found(model: dl.Model, tmp_path_factory: pytest.TempPathFactory) -> dl.Replacements:
    folder = tmp_path_factory.mktemp("replacements") / "maps"
    return dl.fit_replacements(model, maps=MAPS, layers=[0, 3], out=folder, **SMALL)


@pytest.fixture(scope="module")
def run(model: dl.Model, tmp_path_factory: pytest.TempPathFactory) -> dl.Run:
    """The same maps, fitted by a run with one fit for the whole pool."""
    options = {"fit": "global", "protocol": "held_out", "scope": "", "controls": False}
    return dl.run(model, maps=MAPS, layers=[3], out=tmp_path_factory.mktemp("run") / "r", **SMALL, **options)


def evaluation(model: dl.Model, **fields: Any) -> Any:
    spec = dl.RunSpec.parse(protocol="held_out", scope="", **SMALL | fields)
    return make_plan(spec, model, built_in_documents(), Path("unused")).corpus.evaluation


@pytest.mark.parametrize("map", MAPS)
def test_the_saved_map_is_the_decomposition_of_a_global_run(
    model: dl.Model, found: dl.Replacements, run: dl.Run, map: str
) -> None:
    windows = evaluation(model)
    rows = run.tokens(layer=3, map=map)
    with dl.capture(model, {"input_ids": windows.input_ids, "attention_mask": windows.attention_mask}) as states:
        x, y = states.inputs[3], states.outputs[3]
    kept = found.load(3, map)
    index = torch.tensor(rows.loc[~rows["excluded"], ["window", "position"]].to_numpy())
    x, y = x[index[:, 0], index[:, 1]], y[index[:, 0], index[:, 1]]
    residual = (y - kept.states(x)).norm(dim=1)
    expected = rows.loc[~rows["excluded"], "residual_norm"].to_numpy()
    np.testing.assert_allclose(residual, expected, rtol=1e-4, atol=1e-5 * float(y.norm(dim=1).max()))
    assert kept.states(x).dtype == torch.float32


@pytest.mark.parametrize(("layer", "map"), [(0, "affine"), (3, "low_rank:4")])
def test_the_loss_is_that_of_the_model_with_the_file_in_place(
    model: dl.Model, found: dl.Replacements, layer: int, map: str
) -> None:
    windows = evaluation(model)
    kept = torch.arange(windows.input_ids.shape[1]) >= 1
    counted = (windows.attention_mask.bool() & kept)[:, :-1] & windows.attention_mask[:, 1:].bool()

    def loss(replaced: dict[int, Any]) -> float:
        with dl.replaced_blocks(model, replaced), torch.no_grad():
            logits = model.hf(input_ids=windows.input_ids).logits[:, :-1].double()
        losses = torch.nn.functional.cross_entropy(logits.mT, windows.input_ids[:, 1:], reduction="none")
        return float(losses[counted].mean())

    row = found.to_frame().set_index(["layer", "map"]).loc[(layer, map)]
    original = loss({})
    assert found.manifest["original_loss"] == pytest.approx(original, rel=1e-5)
    assert row["skip_loss"] == pytest.approx(loss({layer: torch.nn.Identity()}), rel=1e-5)
    replaced = loss({layer: dl.load_replacement(found.folder / row["file"])})
    assert row["replaced_loss"] == pytest.approx(replaced, rel=1e-5)
    assert row["replaced_increase"] == pytest.approx(replaced - original, abs=1e-4)
    assert row["replaced_increase_lo"] < row["replaced_increase"] < row["replaced_increase_hi"]


def test_skipping_is_the_identity_and_affine_costs_less(found: dl.Replacements) -> None:
    rows = found.to_frame().set_index(["layer", "map"])
    for layer in (0, 3):
        assert rows.loc[(layer, "identity"), "replaced_loss"] == rows.loc[(layer, "identity"), "skip_loss"]
        assert rows.loc[(layer, "affine"), "replaced_increase"] < rows.loc[(layer, "affine"), "skip_increase"]


def test_a_file_says_what_it_holds(model: dl.Model, found: dl.Replacements) -> None:
    with safe_open(found.folder / "03.low_rank-4.safetensors", framework="pt") as reader:
        header = reader.metadata()
        shapes = {name: tuple(reader.get_slice(name).get_shape()) for name in reader.keys()}  # noqa: SIM118
    assert shapes == {"left": (128, 4), "right": (4, 128)}
    assert header["formula"] == "T(x) = x + left right x"
    assert "includes the residual stream" in header["convention"]
    assert json.loads(header["model"])["weight_hash"] == model.identity.weight_hash
    assert (header["map"], header["layer"], header["dtype"]) == ("low_rank:4", "3", "float32")
    assert json.loads(header["fit"])["pool_tokens"] > 900
    assert json.loads((found.folder / "replacements.json").read_text()) == found.manifest


def test_the_table_fits_80_columns(found: dl.Replacements) -> None:
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(replacements_table(found))
    text = console.export_text()
    assert max(len(line) for line in text.splitlines()) <= 80
    assert "orthogonal:scaled" in text
    assert "…" not in text


def test_half_precision_models_are_fitted_in_float32(tmp_path: Path) -> None:
    half = dl.load("tiny-gpt2", dtype="bfloat16")
    made = dl.fit_replacements(half, maps=["affine"], layers=[3], out=tmp_path / "m", **SMALL)
    kept = made.load(3, "affine")
    assert {tensor.dtype for tensor in kept.parameters_by_name.values()} == {torch.float32}
    assert made.to_frame()["replaced_increase"].iloc[0] < made.to_frame()["skip_increase"].iloc[0]
    with dl.replaced_blocks(half, {3: kept}):
        assert half.hf(torch.tensor([[5, 6, 7]])).logits.dtype == torch.bfloat16
    with pytest.raises(dl.InputError, match="weights"), dl.replaced_blocks(dl.load("tiny-gpt2"), {3: kept}):
        pass


def rewritten(source: Path, target: Path, tensors: Any = None, **header: str | None) -> Path:
    """The file again, with other tensors or header fields; a field of None is left out."""
    with safe_open(source, framework="pt") as reader:
        known = reader.metadata() | header
    kept = load_file(source) if tensors is None else tensors
    save_file(kept, target, {key: value for key, value in known.items() if value is not None})
    return target


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "another format": ({"format": "weights"}, "format 'weights'"),
    "another schema": ({"schema": "9"}, "schema '9'"),
    "no map": ({"map": None}, "KeyError"),
    "unknown map": ({"map": "cubic"}, "cubic"),
    "the block itself": ({"map": "isolated"}, "no parameters"),
    "another map": ({"map": "low_rank:5"}, "another formula"),
    "another formula": ({"formula": "T(x) = 2 x"}, "another formula"),
    "another convention": ({"convention": "residual only"}, "another formula"),
    "no layer": ({"layer": "three"}, "three"),
    "negative layer": ({"layer": "-1"}, "layer -1"),
    "another width": ({"width": "64"}, "shape"),
    "another dtype": ({"dtype": "float16"}, "float16"),
    "model no object": ({"model": "[]"}, "model is a list"),
    "model half": ({"model": '{"name": "x"}'}, "damaged"),
    "deep model": ({"model": "[" * 100_000}, "damaged"),
    "output unknown": ({"output": '{"container": "set", "carried": []}'}, "damaged"),
    "carried odd": ({"output": '{"container": "tuple", "carried": [[1]]}'}, "damaged"),
    "cache layer odd": ({"cache_layer": '"x"'}, "damaged"),
    "missing tensor": ({"tensors": {}}, "parameters"),
    "half tensors": ({"tensors": {"matrix": torch.zeros(128, 128).half()}, "dtype": "float16"}, "float32"),
    "wrong shape": ({"tensors": {"matrix": torch.zeros(128, 127)}}, "(128, 127)"),
    "not finite": ({"tensors": {"matrix": torch.full((128, 128), torch.nan)}}, "finite"),
    "one more": ({"tensors": {"matrix": torch.zeros(128, 128), "extra": torch.zeros(1)}}, "extra"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_hostile_file_is_refused_in_one_line(found: dl.Replacements, tmp_path: Path, case: str) -> None:
    changes, says = WRONG[case]
    path = rewritten(found.folder / "03.linear.safetensors", tmp_path / "x.safetensors", **changes)
    with pytest.raises(dl.StoreError) as caught:
        dl.load_replacement(path)
    assert says in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_a_damaged_file_is_refused_in_one_line(found: dl.Replacements, tmp_path: Path) -> None:
    whole = (found.folder / "03.linear.safetensors").read_bytes()
    damaged = {
        "cut": whole[:-100], "empty": b"", "header": whole[:8] + b"\x00" + whole[9:], "pickle": b"\x80\x04N.",
        "huge": (2**62).to_bytes(8, "little") + whole[8:],
    }  # fmt: skip
    for name, content in damaged.items():
        path = tmp_path / f"{name}.safetensors"
        path.write_bytes(content)
        with pytest.raises(dl.StoreError, match="can't be read as a replacement"):
            dl.load_replacement(path)
    for path in (tmp_path, tmp_path / "missing", "x" * 300, "nul\0"):
        with pytest.raises(dl.StoreError, match="can't be read as a replacement"):
            dl.load_replacement(path)


def test_only_what_was_fitted_can_be_loaded(found: dl.Replacements) -> None:
    with pytest.raises(dl.InputError, match="no replacement of layer 1"):
        found.load(1, "affine")


def test_a_folder_that_holds_something_is_refused_before_work(found: dl.Replacements) -> None:
    with pytest.raises(dl.StoreError, match="isn't empty"):
        dl.fit_replacements("tiny-gpt2", out=found.folder, **SMALL)


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        ([], 2, "--out"),
        (["--out", "m", "--maps", "isolated"], 2, "isolated"),
        (["--out", "m", "--maps", "low_rank:200"], 2, "200"),
        (["--out", "m", "--protocol", "in_sample"], 2, "--protocol"),
        (["--out", "m", "--ridge", "0.1,0.2"], 2, "ridge"),
        (["--out", "m", "--layers", "9"], 2, "layers 0 to 5"),
        (["--out", "file"], 1, "is a file"),
    ],
)
def test_what_cannot_work_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path, words: list[str], code: int, says: str
) -> None:
    (tmp_path / "file").write_text("x")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["deltalens", "replace", *words])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    out, err = capsys.readouterr()
    assert (caught.value.code, out) == (code, "")
    assert says in err
    assert len(err.strip().splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_the_command_writes_what_it_prints(monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path) -> None:
    words = ["--tokens", "128", "--pool-tokens", "256", "--layers", "2", "--maps", "mean", "--out", str(tmp_path / "m")]
    monkeypatch.setattr(sys, "argv", ["deltalens", "replace", *words, "--json"])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert not caught.value.code
    printed = json.loads(capsys.readouterr()[0])
    assert printed == json.loads((tmp_path / "m" / "replacements.json").read_text())
    assert {path.name for path in (tmp_path / "m").iterdir()} == {"replacements.json", "02.mean.safetensors"}
