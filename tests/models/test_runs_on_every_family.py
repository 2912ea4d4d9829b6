"""A whole run on a folder with a tiny random model of each family: finite figures, on the scheme that's listed."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from intervention_models import OTHER_SCHEMES
from tiny_models import FAMILIES, MULTI_STREAM, from_config, tiny_model

import deltalens as dl
from deltalens.errors import ModelError
from deltalens.models.builtin_models import TOKENIZER_FOLDER

SIZES: dict[str, Any] = {
    "layers": [2],
    "maps": ["mean", "low_rank:4"],
    "window": 16,
    "tokens": 128,
    "pool_tokens": 160,
    "neighbors": 12,
    "null_tokens": 32,
    "resamples": 100,
}

#: Of every included token and every unit; controls belong to the first protocol.
MEASURES = ("relative_error", "cos_residual_tokenwise", "angle_full_tokenwise", "proj_full", "proj_residual",
            "state_norm", "update_norm", "residual_norm", "kl_single", "kl_all")  # fmt: skip
CONTROLS = ("kl_single_random", "kl_single_shuffled", "kl_residual_only", "kl_skip")


def saved(hf: Any, folder: Path) -> Path:
    """A folder as people have them: weights, config and tokenizer."""
    hf.save_pretrained(folder)
    shutil.copytree(TOKENIZER_FOLDER, folder, dirs_exist_ok=True)
    return folder


def assert_finite(table: pd.DataFrame, columns: tuple[str, ...]) -> None:
    figures = table[list(columns)].to_numpy(dtype=float)
    assert len(figures) > 0
    assert np.isfinite(figures).all(), table[list(columns)].describe().to_string()


@pytest.mark.parametrize("name", FAMILIES)
def test_run_on_a_folder_of_each_family_ends_with_finite_figures(name: str, tmp_path: Path) -> None:
    run = dl.run(saved(tiny_model(name, vocab_size=2048), tmp_path / "model"), out=tmp_path / "run", **SIZES)
    assert run.manifest["interventions"]["single"]["path"] == OTHER_SCHEMES.get(name, "cached_keys")
    assert run.manifest["warnings"] == []
    summary, tokens = run.summary(), run.tokens()
    included = tokens[~tokens["excluded"]]
    assert len(summary) == len(SIZES["maps"]) * 2
    assert_finite(summary, (*MEASURES, "kl_single_lo", "kl_single_hi", "spearman"))
    assert_finite(included, MEASURES)
    assert_finite(included[included["protocol"] == "held_out"], CONTROLS)
    assert (summary["kl_single"] > 0).all()


def test_run_on_a_folder_of_a_refused_family_says_why(tmp_path: Path) -> None:
    folder = saved(from_config("gemma3n_text", MULTI_STREAM | {"vocab_size": 2048}), tmp_path / "model")
    with pytest.raises(ModelError, match="several residual streams") as caught:
        dl.run(folder, out=tmp_path / "run", **SIZES)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()
