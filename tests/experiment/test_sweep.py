"""A sweep's points are what runs of their own would give; what they share is computed once; nothing mixes them."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import deltalens as dl
from deltalens.core import neighbors as searching
from deltalens.experiment.functional import FunctionalMeter
from deltalens.experiment.plan import make_plan, read_documents
from deltalens.experiment.store import RunFolder
from deltalens.report.points import at_point

SMALL: dict[str, Any] = {
    "layers": [1], "maps": ["linear", "mean", "identity"], "tokens": 144, "pool_tokens": 192, "window": 24,
    "resamples": 100, "scope": "single",
}  # fmt: skip
SWEEP: dict[str, Any] = {"neighbors": [8, 20], "ridge": [0.1, 0.01], "metric": ["euclidean", "cosine"]}
FIELDS = ["metric", "neighbors", "ridge"]


@pytest.fixture(scope="module")
def model() -> dl.Model:
    return dl.load("tiny-gpt2")


@pytest.fixture(scope="module")
def calls() -> dict[str, int]:
    return {"capture": 0, "search": 0, "patches": 0}


@pytest.fixture(scope="module")
def run(model: dl.Model, calls: dict[str, int], tmp_path_factory: pytest.TempPathFactory) -> dl.Run:
    with pytest.MonkeyPatch.context() as patching:
        search, measure, capture = (
            searching.PoolIndex.neighborhoods,
            FunctionalMeter.measure,
            dl.experiment.states.watch_stream,
        )  # type: ignore[attr-defined]

        def searched(*given: Any, **options: Any) -> searching.Neighborhoods:
            calls["search"] += 1
            return search(*given, **options)

        def measured(self: FunctionalMeter, layer: int, patches: Any, *rest: Any) -> Any:
            calls["patches"] += len(patches)
            return measure(self, layer, patches, *rest)

        def captured(*given: Any) -> Any:
            calls["capture"] += 1
            return capture(*given)

        patching.setattr(searching.PoolIndex, "neighborhoods", searched)
        patching.setattr(FunctionalMeter, "measure", measured)
        patching.setattr("deltalens.experiment.states.watch_stream", captured)
        return dl.run(model, out=tmp_path_factory.mktemp("sweep") / "r", **SMALL, **SWEEP)


def rows_at(table: pd.DataFrame, point: dict[str, Any]) -> pd.DataFrame:
    for name, value in point.items():
        table = table[table[name] == value]
    return table.drop(columns=list(point)).reset_index(drop=True)


POINTS = [
    {"metric": "euclidean", "neighbors": 8, "ridge": 0.1},
    {"metric": "cosine", "neighbors": 20, "ridge": 0.01},
    {"metric": "cosine", "neighbors": 8, "ridge": 0.1},
]


@pytest.mark.parametrize("point", POINTS)
def test_a_point_has_the_numbers_of_a_run_of_its_own(
    model: dl.Model, run: dl.Run, tmp_path: Path, point: dict[str, Any]
) -> None:
    alone = dl.run(model, out=tmp_path / "r", **SMALL, **point)
    pd.testing.assert_frame_equal(rows_at(run.tokens(), point), alone.tokens(), check_exact=True)
    pd.testing.assert_frame_equal(run.tokens(**point).drop(columns=FIELDS), alone.tokens(), check_exact=True)
    pd.testing.assert_frame_equal(rows_at(run.summary(), point), alone.summary(), check_exact=True)
    metric = {"metric": point["metric"]}
    columns = ["protocol", "window", "position", "rank", "pool_window", "pool_position"]
    pd.testing.assert_frame_equal(rows_at(run.neighbors(), metric)[columns], alone.neighbors()[columns])


def test_units_are_keyed_by_the_varied_fields_and_no_others(run: dl.Run) -> None:
    assert list(run.summary())[:7] == ["layer", "map", "fit", "protocol", *FIELDS]
    assert len(run.summary()) == 3 * 2 * 8
    assert not run.summary().duplicated(["layer", "map", "fit", "protocol", *FIELDS]).any()
    assert "01.linear.local.held_out.metric-cosine.neighbors-8.ridge-0.01" in {
        path.name for path in (run.folder / "units").iterdir()
    }


def test_what_points_share_is_computed_once(run: dl.Run, calls: dict[str, int]) -> None:
    windows = run.manifest["corpus"]
    batches = sum(-(-windows[side]["windows"] // 8) for side in ("evaluation", "pool"))
    assert calls["capture"] == batches
    assert calls["search"] == 2 * 2 * 2  # one per protocol and metric, for the tokens and for the nulls' sample
    # linear: 8 points; mean: 4, since no ridge changes it; held out with 6 controls, of the layer skipped once.
    linear, mean = 8 * (1 + 6) + 8, 4 * (1 + 6) + 4
    noise_floor = 1
    identity = 6  # at all its points: itself and what it is not x of
    assert calls["patches"] <= linear + mean + noise_floor + identity + 1


def test_a_swept_pool_is_nested_and_fits_are_those_on_it(model: dl.Model, tmp_path: Path) -> None:
    options = SMALL | {"pool_tokens": [96, 192], "maps": ["linear"], "neighbors": 16, "scope": ""}
    made = dl.run(model, out=tmp_path / "r", keep_states=True, **options)
    spec = dl.RunSpec.parse(**made.manifest["spec"])
    corpus = make_plan(spec, model, read_documents(spec), tmp_path / "unused").corpus
    small, large = (corpus.pool.nested(size) for size in (96, 192))  # type: ignore[union-attr]
    assert bool(large.all())
    assert 96 <= int(corpus.pool.lengths[small].sum()) < 96 + 24  # type: ignore[union-attr]
    assert bool((small & ~large).sum() == 0)
    assert len(torch.unique(corpus.pool.documents[small])) > 1  # type: ignore[union-attr]

    def pairs(windows: Any) -> tuple[torch.Tensor, torch.Tensor]:
        with dl.capture(model, {"input_ids": windows.input_ids, "attention_mask": windows.attention_mask}) as states:
            real = windows.attention_mask.bool()
            real[:, 0] = False
            return states.inputs[1][real], states.outputs[1][real]

    x, y = pairs(corpus.evaluation)
    for size, part in ((96, small), (192, large)):
        pool = pairs(corpus.pool.take(torch.nonzero(part)[:, 0]))  # type: ignore[union-attr]
        wanted = dl.decompose(x, y, pool=pool, map="linear", neighbors=16)
        rows = made.tokens(protocol="held_out", pool_tokens=size)
        rows = rows[~rows["excluded"]]
        error = (wanted.residual.norm(dim=1) / y.norm(dim=1)).numpy()
        np.testing.assert_allclose(rows["relative_error"], error, rtol=2e-3, atol=1e-6)
        other = dl.decompose(x, y, pool=pairs(corpus.pool), map="linear", neighbors=16)  # type: ignore[arg-type]
        if size == 96:
            assert not np.allclose(error, (other.residual.norm(dim=1) / y.norm(dim=1)).numpy(), rtol=0.05)
    in_sample = made.summary().set_index(["protocol", "pool_tokens"])["relative_error"]
    assert in_sample["in_sample", 96] == in_sample["in_sample", 192]


def test_a_sweep_resumes_where_it_was_cut(model: dl.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = SMALL | {"maps": ["linear", "mean"], "scope": "", "neighbors": [8, 16]}
    whole = dl.run(model, out=tmp_path / "whole", **options)
    committed: list[str] = []
    write = RunFolder.write_unit

    def stop_after_three(self: RunFolder, key: Any, *rest: Any) -> None:
        if len(committed) == 3:
            raise KeyboardInterrupt
        committed.append(key.folder_name)
        write(self, key, *rest)

    with monkeypatch.context() as patching:
        patching.setattr(RunFolder, "write_unit", stop_after_three)
        with pytest.raises(KeyboardInterrupt):
            dl.run(model, out=tmp_path / "cut", **options)
    resumed = dl.run(model, out=tmp_path / "cut", resume=True, **options)
    pd.testing.assert_frame_equal(whole.tokens(), resumed.tokens(), check_exact=True)
    pd.testing.assert_frame_equal(whole.summary(), resumed.summary(), check_exact=True)


def test_pages_claims_and_comparisons_show_one_point_and_say_which(
    model: dl.Model, run: dl.Run, tmp_path: Path
) -> None:
    first = {"metric": "euclidean", "neighbors": 8, "ridge": 0.1}
    alone = dl.run(model, out=tmp_path / "alone", **SMALL, **first)
    for ours, theirs in zip(run.claims(), alone.claims(), strict=True):
        assert ours.verdict == theirs.verdict
        assert theirs.evidence in ours.evidence
    assert "At metric euclidean, neighbors 8, ridge 0.1." in run.claims()[0].evidence
    page = (run.folder / "report.html").read_text(encoding="utf8")
    assert "8 points" in page
    assert "metric euclidean, neighbors 8, ridge 0.1" in page
    other = at_point(run, {"ridge": 0.01})
    pd.testing.assert_frame_equal(other.summary(), rows_at(run.summary(), first | {"ridge": 0.01}))
    assert other.manifest["spec"]["ridge"] == 0.01


@pytest.mark.parametrize(
    ("point", "says"),
    [({"ridge": 0.5}, "no point with ridge 0.5"), ({"tokens": 3}, "doesn't sweep 'tokens'")],
)
def test_a_point_that_is_not_there_is_refused(run: dl.Run, point: dict[str, Any], says: str) -> None:
    with pytest.raises(dl.InputError, match=says):
        at_point(run, point)
    with pytest.raises(dl.InputError, match="doesn't sweep 'seed'"):
        run.tokens(seed=3)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"neighbors": []}, "neighbors: no value"),
        ({"neighbors": "8,8"}, "neighbors: 8 is named twice"),
        ({"ridge": [0.1, 0.0]}, "ridge: input should be greater than 0, got 0.0"),
        ({"metric": ["euclidean", "manhattan"]}, "metric: .*manhattan"),
        ({"pool_tokens": [128, None]}, "pool_tokens: .*left out"),
        ({"neighbors": [4, 64], "maps": "low_rank:8"}, "rank 8 from 4 neighbors"),
        ({"fit": "global", "neighbors": [8, 16]}, "neighbors can't be swept"),
        ({"fit": "global", "metric": ["cosine", "euclidean"]}, "metric can't be swept"),
        ({"protocol": "in_sample", "pool_tokens": [128, 256]}, "sweep pool_tokens with it"),
    ],
)
def test_a_sweep_that_cannot_be_meant_is_one_line(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(dl.InputError, match=says) as caught:
        dl.RunSpec.parse(**fields)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"pool_tokens": [256, 10**7]}, "--pool-tokens"),
        ({"pool_tokens": [190, 192]}, "same .* windows"),
        ({"pool_tokens": [24, 192], "neighbors": 32}, "raise pool_tokens"),
    ],
)
def test_a_pool_that_the_text_cannot_give_is_refused_before_long_work(
    model: dl.Model, tmp_path: Path, fields: dict[str, Any], says: str
) -> None:
    with pytest.raises(dl.errors.DeltalensError, match=says):
        dl.run(model, out=tmp_path / "r", **(SMALL | {"neighbors": 8} | fields))
    assert not (tmp_path / "r").exists()


def test_one_value_is_no_sweep() -> None:
    assert dl.RunSpec.parse(neighbors=[64], ridge="0.01") == dl.RunSpec.parse()
    swept = dl.RunSpec.parse(neighbors="16,32", ridge=[0.1, 0.01])
    assert dl.RunSpec.parse(**swept.model_dump(mode="json")) == swept
    assert [(p.neighbors, p.ridge) for p in swept.points()] == [(16, 0.1), (16, 0.01), (32, 0.1), (32, 0.01)]
    assert swept.at(swept.points()[3]) == dl.RunSpec.parse(neighbors=32, ridge=0.01)


def test_any_point_can_be_shown_and_the_sweep_has_its_section(run: dl.Run, tmp_path: Path) -> None:
    page = run.report(tmp_path / "other.html", ridge="0.010", neighbors=20).read_text(encoding="utf8")
    assert "metric euclidean, neighbors 20, ridge 0.01" in page
    assert "Over expressivity" in page
    assert "Over expressivity" in (run.folder / "report.html").read_text(encoding="utf8")
    table = run.sweep()
    assert len(table) == len(run.summary())
    assert list(table)[:8] == ["layer", "map", "family", "fit", "protocol", *FIELDS]
    with pytest.raises(dl.InputError, match="no point with ridge 3"):
        run.report(tmp_path / "none.html", ridge=3)
    assert not (tmp_path / "none.html").exists()
