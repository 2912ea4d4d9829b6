"""What one replaced state does to later tokens, against the obvious loop: attention, state-space, hybrid models."""

import io
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from rich.console import Console
from tiny_models import tiny_model
from typer.testing import CliRunner

import deltalens as dl
from deltalens.cli.app import app
from deltalens.errors import CorpusError, InputError
from deltalens.experiment.documents import built_in_documents
from deltalens.experiment.later import distance_ranges
from deltalens.experiment.plan import make_plan
from deltalens.models.blocks import override_output
from deltalens.models.builtin_models import TOKENIZER_FOLDER
from deltalens.report.later import later_tables

SMALL: dict[str, Any] = {"tokens": 256, "pool_tokens": 320, "window": 32, "neighbors": 24, "resamples": 100}
LAYER = 1


def kl(original: torch.Tensor, patched: torch.Tensor) -> torch.Tensor:
    p, q = original.double().log_softmax(-1), patched.double().log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1)


def obvious(model: dl.Model, ids: torch.Tensor, layer: int, position: int) -> torch.Tensor:
    """KL at every position of one window when block ``layer`` is skipped at one position: one run, one hook."""
    with dl.capture(model, ids) as states, torch.no_grad():
        replaced = states.outputs[layer].clone()
        replaced[0, position] = states.inputs[layer][0, position]
        with override_output(model.blocks[layer], replaced):
            patched = model.hf(input_ids=ids, use_cache=False).logits
        return kl(states.logits, patched)[0]


def looped(model: dl.Model, found: dl.Later) -> Iterator[tuple[pd.Series, torch.Tensor]]:
    spec = dl.RunSpec.parse(layers=[LAYER], maps=["identity"], **SMALL)
    windows = make_plan(spec, model, built_in_documents(), Path("unused")).corpus.evaluation
    for _, row in found.positions.iterrows():
        ids = windows.input_ids[row["window"] : row["window"] + 1, : windows.lengths[row["window"]]]
        yield row, obvious(model, ids, LAYER, row["position"])


def folder_of(hf: Any, folder: Path) -> Path:
    hf.save_pretrained(folder)
    shutil.copytree(TOKENIZER_FOLDER, folder, dirs_exist_ok=True)
    return folder


@pytest.mark.parametrize("name", ["tiny-gpt2", "tiny-mamba", "jamba", "gemma2"])
def test_later_effects_are_those_of_the_obvious_loop(name: str, tmp_path: Path) -> None:
    built_in = name.startswith("tiny-")
    model = dl.load(name if built_in else str(folder_of(tiny_model(name, vocab_size=2048), tmp_path / "model")))
    found = dl.later(model, layers=[LAYER], maps=["identity"], positions=6, batch_size=3, **SMALL)
    assert len(found.positions) == 6
    for row, slow in looped(model, found):
        later = slow[row["position"] + 1 :]
        assert row["kl_own"] == pytest.approx(float(slow[row["position"]]), rel=2e-3, abs=1e-6)
        assert row["kl_later"] == pytest.approx(float(later.sum()), rel=2e-3, abs=1e-5)
        assert row["kl_at_1"] == pytest.approx(float(later[0]), rel=2e-3, abs=1e-6)
        if len(later) > 3:
            assert row["kl_at_4_7"] == pytest.approx(float(later[3:7].mean()), rel=2e-3, abs=1e-6)
        assert float(slow[: row["position"]].abs().max()) < 1e-6


@pytest.fixture(scope="module")
def found() -> dl.Later:
    return dl.later("tiny-gpt2", layers=[2, 5], maps=["mean", "low_rank:4"], positions=24, **SMALL)


def test_the_own_effect_is_that_of_a_run(found: dl.Later, tmp_path: Path) -> None:
    run = dl.run(
        "tiny-gpt2",
        layers=[2],
        maps=["low_rank:4"],
        protocol=["held_out"],
        scope=["single"],
        out=tmp_path / "r",
        **SMALL,
    )
    key = ["window", "position"]
    own = found.positions[(found.positions["layer"] == 2) & (found.positions["map"] == "low_rank:4")]
    both = own.merge(run.tokens()[[*key, "kl_single", "kl_single_random"]], on=key)
    assert len(both) == len(own) == 24
    np.testing.assert_allclose(both["kl_own"], both["kl_single"], rtol=1e-3, atol=1e-7)
    np.testing.assert_allclose(both["kl_own_random"], both["kl_single_random"], rtol=1e-3, atol=1e-7)


def test_the_last_layer_has_no_later_effect(found: dl.Later) -> None:
    last = found.layers[found.layers["layer"] == 5]
    assert (last["kl_later"].abs() < 1e-9).all()
    assert (last["kl_own"] > 1e-4).all()
    assert (found.layers.loc[found.layers["layer"] == 2, "kl_later"] > 1e-5).all()


def test_summaries_are_those_of_the_position_rows(found: dl.Later) -> None:
    key = ["layer", "map", "fit", "protocol"]
    for _, row in found.layers.iterrows():
        own = found.positions[(found.positions[key] == row[key]).all(axis=1)]
        assert row["kl_later"] == pytest.approx(own["kl_later"].mean())
        assert row["kl_own_lo"] < row["kl_own"] < row["kl_own_hi"]
        assert row["later_share"] == pytest.approx(own["kl_later"].sum() / (own["kl_own"] + own["kl_later"]).sum())
    for _, row in found.distances.iterrows():
        own = found.positions[(found.positions[key] == row[key]).all(axis=1)]
        start, stop = row["distance_from"], row["distance_to"]
        column = "kl_at_1" if start == 1 else f"kl_at_{start}_{stop}"
        assert row["kl"] == pytest.approx(own[column].mean())
        assert row["positions"] == (own["later_tokens"] >= start).sum()


def test_positions_are_spread_over_the_windows_and_have_successors(found: dl.Later) -> None:
    own = found.positions[(found.positions["layer"] == 2) & (found.positions["map"] == "mean")]
    assert set(own["window"].value_counts()) == {3}
    assert not own.duplicated(["window", "position"]).any()
    assert own["later_tokens"].min() >= 1
    assert own["position"].min() >= 1


@pytest.mark.parametrize(
    ("length", "ranges"), [(2, [(1, 1)]), (8, [(1, 1), (2, 3), (4, 7)]), (9, [(1, 1), (2, 3), (4, 7), (8, 8)])]
)
def test_ranges_double_and_cover_every_distance(length: int, ranges: list[tuple[int, int]]) -> None:
    assert distance_ranges(length) == ranges


def test_few_clusters_have_no_intervals() -> None:
    few = dl.later("tiny-gpt2", layers=[2], maps=["mean"], positions=4, **SMALL | {"tokens": 96})
    assert np.isnan(few.layers["kl_own_lo"]).all()
    assert np.isfinite(few.layers["kl_own"]).all()


def test_bad_input_is_refused_in_one_line() -> None:
    with pytest.raises(InputError, match="positions is 0"):
        dl.later("no-such-model", positions=0)
    with pytest.raises(CorpusError, match="no token that takes part has a later one"):
        dl.later("tiny-gpt2", layers=[2], skip_first=31, maps=["mean"], **SMALL | {"neighbors": 4, "tokens": 320})


def test_long_names_and_many_ranges_cut_nothing(found: dl.Later) -> None:
    name = "orthogonal:scaled"
    layers = found.layers.head(1).assign(map=name, layer=23)
    ranges = [(2**power, 2 ** (power + 1) - 1) for power in range(8)]
    distances = pd.DataFrame(ranges, columns=["distance_from", "distance_to"])
    distances = distances.assign(layer=23, map=name, protocol="held_out", kl=0.1234)
    console = Console(width=80, file=io.StringIO())
    console.print(later_tables("tiny-gpt2", SimpleNamespace(layers=layers, distances=distances)))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "128-255" in text
    assert text.count(" 123") == len(ranges)
    assert max(len(line.rstrip()) for line in text.splitlines()) <= 80


def test_the_command_line_shows_80_columns_and_json(tmp_path: Path) -> None:
    flags = ["--layers", "2", "--tokens", "256", "--pool-tokens", "320", "--window", "32", "--neighbors", "24"]
    shown = CliRunner().invoke(
        app, ["later", *flags, "--positions", "8", "--out", str(tmp_path / "out")], env={"COLUMNS": "80"}
    )
    assert shown.exit_code == 0
    assert "effects on later tokens" in shown.stdout
    assert max(len(line.rstrip()) for line in shown.stdout.splitlines() if "tables:" not in line) <= 80
    files = {"later.parquet", "later_distances.parquet", "later_positions.parquet"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == files
    plain = CliRunner().invoke(app, ["later", *flags, "--positions", "8", "--json"])
    assert json.loads(plain.stdout)["layers"][0]["map"] == "low_rank:8"
