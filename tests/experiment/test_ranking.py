"""Rankings point at the layers that were made to matter or not, and their figures are those of the parts."""

import io
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from scipy import stats

import deltalens as dl
from deltalens import cli
from deltalens.report.ranking import ranking_table, write_ranking_figure

SMALL: dict[str, Any] = {"tokens": 512, "pool_tokens": 1024, "window": 64, "neighbors": 32, "resamples": 100}
IDLE, TOKENWISE, TURNED, TURNED_BACK = 1, 2, 3, 4


class Turn(torch.nn.Module):
    """An MLP's place in a block: the update ``Q x - x``."""

    def __init__(self, rotation: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("rotation", rotation)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.rotation.mT - x


@pytest.fixture(scope="module")
def planted() -> dl.Model:
    """One block does nothing, one reads no other token, and two rotate the state of each token there and back."""
    model = dl.load("tiny-gpt2")
    blocks = model.hf.transformer.h
    silent = [blocks[IDLE].mlp, *(blocks[layer].attn for layer in (IDLE, TOKENWISE, TURNED, TURNED_BACK))]
    with torch.no_grad():
        for part in silent:
            part.c_proj.weight.zero_()
            part.c_proj.bias.zero_()
    generator = torch.Generator().manual_seed(0)
    rotation = torch.linalg.qr(torch.randn(model.width, model.width, generator=generator)).Q
    for layer, turn in ((TURNED, rotation), (TURNED_BACK, rotation.mT.contiguous())):
        blocks[layer].ln_2, blocks[layer].mlp = torch.nn.Identity(), Turn(turn)
    return dl.load(model.hf, tokenizer=model.tokenizer)


@pytest.fixture(scope="module")
def ranking(planted: dl.Model) -> dl.LayerRanking:
    return dl.rank_layers(planted, skip_first=0, **SMALL)


def test_a_layer_that_does_nothing_goes_first_and_costs_nothing(ranking: dl.LayerRanking) -> None:
    rows = ranking.to_frame().set_index("layer")
    for name in ("skip", "block_influence", "nonlinearity"):
        assert ranking.removal_order(name)[0] == IDLE, name
    columns = ["skip_increase", "global_increase", "local_increase", "block_influence", "nonlinearity"]
    assert rows.loc[IDLE, columns].abs().max() < 1e-6
    assert rows.loc[[0, TOKENWISE, TURNED, TURNED_BACK, 5], "skip_increase"].min() > 0.05


def test_linear_layers_are_replaced_at_no_cost_though_skipping_them_costs_most(ranking: dl.LayerRanking) -> None:
    rows = ranking.to_frame().set_index("layer")
    assert set(ranking.removal_order("skip")[-3:]) >= {TURNED, TURNED_BACK}
    assert set(ranking.removal_order("global")[:3]) == {IDLE, TURNED, TURNED_BACK}
    for layer in (TURNED, TURNED_BACK):
        assert abs(rows.loc[layer, "global_increase"]) < 0.02 * rows.loc[layer, "skip_increase"]
        assert rows.loc[layer, "linearity"] > 1 - 1e-6
        assert rows.loc[layer, "order_block_influence"] >= 4


def test_a_tokenwise_layer_is_the_isolated_block_exactly(planted: dl.Model) -> None:
    rows = dl.rank_layers(planted, local_map="isolated", layers=[TOKENWISE, 5], **SMALL).to_frame().set_index("layer")
    assert abs(rows.loc[TOKENWISE, "local_increase"]) < 1e-5
    assert abs(rows.loc[5, "local_increase"]) > 1e-3


def test_skipping_is_what_the_model_without_the_block_loses(planted: dl.Model, ranking: dl.LayerRanking) -> None:
    """Nothing is excluded here, so patching every position and leaving the block out are one and the same."""
    from deltalens.experiment.documents import built_in_documents
    from deltalens.experiment.plan import make_plan

    spec = dl.RunSpec.parse(**ranking.manifest["spec"])
    windows = make_plan(spec, planted, built_in_documents(), Path("unused")).corpus.evaluation

    def losses() -> torch.Tensor:
        logits = planted.hf(input_ids=windows.input_ids).logits[:, :-1].detach().double()
        found = torch.nn.functional.cross_entropy(logits.transpose(1, 2), windows.input_ids[:, 1:], reduction="none")
        return found[windows.attention_mask[:, 1:].bool()]

    original = losses()
    assert ranking.manifest["original_loss"] == pytest.approx(float(original.mean()), rel=1e-5)
    for layer in (0, 2, 5):
        with dl.replaced_blocks(planted, {layer: torch.nn.Identity()}):
            increase = float((losses() - original).mean())
        row = ranking.to_frame().set_index("layer").loc[layer]
        assert row["skip_increase"] == pytest.approx(increase, rel=1e-3)
        assert row["skip_increase_lo"] < increase < row["skip_increase_hi"]


def test_orders_and_agreement_are_those_of_the_scores(ranking: dl.LayerRanking) -> None:
    rows, columns = (
        ranking.to_frame(),
        {"skip": "skip_increase", "local": "local_increase", "nonlinearity": "nonlinearity"},
    )
    for name, column in columns.items():
        np.testing.assert_array_equal(rows[f"order_{name}"], stats.rankdata(rows[column], method="ordinal"))
        assert ranking.removal_order(name) == rows.sort_values(column)["layer"].tolist()
    pairs = ranking.agreement().set_index(["a", "b"])
    assert len(pairs) == 10
    found = pairs.loc[("skip", "nonlinearity")]
    assert found["kendall"] == pytest.approx(stats.kendalltau(rows["skip_increase"], rows["nonlinearity"]).statistic)
    assert found["spearman"] == pytest.approx(stats.spearmanr(rows["skip_increase"], rows["nonlinearity"]).statistic)
    assert found["kendall_lo"] <= found["kendall_hi"]
    assert rows["nonlinearity"].to_numpy() == pytest.approx(1 - rows["linearity"].to_numpy())


def test_few_windows_leave_intervals_out_and_few_layers_agreement(planted: dl.Model) -> None:
    found = dl.rank_layers(planted, layers=[0, 2], **(SMALL | {"tokens": 128}))
    assert found.to_frame()["skip_increase_lo"].isna().all()
    assert found.agreement()[["kendall", "spearman_hi"]].isna().all(axis=None)
    assert "intervals need 8" in found.manifest["warnings"][0]
    assert "undefined" in shown(found)


def shown(ranking: dl.LayerRanking) -> str:
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(ranking_table(ranking))
    return console.export_text()


def test_the_table_has_a_line_per_layer_within_80_columns(ranking: dl.LayerRanking, tmp_path: Path) -> None:
    text = shown(ranking)
    assert max(len(line) for line in text.splitlines()) <= 80
    table = [line.split() for line in text.split("Nats per token")[0].splitlines() if "→" in line]
    assert [words[0] for words in table] == [f"{layer}→{layer + 1}" for layer in range(6)]
    assert "…" not in text.split("Nats per token")[0]
    assert write_ranking_figure(ranking, tmp_path / "r.svg").read_text().startswith("<?xml")
    ranking.save(tmp_path / "r.json")
    assert dl.LayerRanking(json.loads((tmp_path / "r.json").read_text())).removal_order() == ranking.removal_order()


def test_long_names_and_large_figures_cut_nothing(ranking: dl.LayerRanking) -> None:
    facts = json.loads(ranking.to_json()) | {"global_map": "orthogonal:scaled", "local_map": "orthogonal:scaled"}
    for row in facts["layers"]:
        row["layer"] += 20
        for name in ("skip", "global", "local"):
            row |= {f"{name}_increase": 12.345, f"{name}_increase_lo": 11.0, f"{name}_increase_hi": 13.5}
    text = shown(dl.LayerRanking(facts))
    table = text[: text.index("Nats per token")]
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in table
    assert all(table.count(f"{layer}→{layer + 1}") == 1 for layer in (20, 21))
    assert {table.count(part) for part in ("12.345", "±1.250")} == {3 * len(facts["layers"])}


def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[Any, str, str]:
    monkeypatch.setattr(sys, "argv", ["deltalens", *words])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    return caught.value.code, *capsys.readouterr()


def test_the_command_prints_json(monkeypatch: Any, capsys: Any, tmp_path: Path) -> None:
    words = ["--tokens", "128", "--pool-tokens", "256", "--neighbors", "16", "--layers", "1,2", "--json", "--quiet"]
    code, out, _ = call(
        monkeypatch, capsys, "rank", *words, "--global-map", "affine", "--out", str(tmp_path / "r.json")
    )
    assert code in (0, None)
    assert json.loads(out) == json.loads((tmp_path / "r.json").read_text())
    assert json.loads(out)["global_map"] == "affine"


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["--maps", "linear"], 2, "--maps"),
        (["--global-map", "cubic"], 2, "cubic"),
        (["--global-map", "isolated"], 2, "isolated"),
        (["--local-map", "low_rank:100"], 2, "100"),
        (["--layers", "9"], 2, "layers 0 to 5"),
        (["--figure", "x.gif"], 2, ".pdf"),
        (["--out", "."], 1, "folder"),
        (["--text", "missing.txt"], 1, "does not exist"),
    ],
)
def test_what_cannot_work_is_one_line(
    monkeypatch: Any, capsys: Any, tmp_path: Path, words: list[str], code: int, says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    found, out, err = call(monkeypatch, capsys, "rank", *words)
    assert (found, out) == (code, "")
    assert says in err
    assert len(err.strip().splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_fields_that_a_ranking_decides_are_refused_in_python() -> None:
    for name in ("maps", "fit", "protocol", "scope"):
        with pytest.raises(dl.InputError, match=name):
            dl.rank_layers("tiny-gpt2", **{name: "linear"})  # type: ignore[arg-type]
    with pytest.raises(dl.InputError, match="unknown"):
        dl.LayerRanking({"layers": []}).removal_order("best")
