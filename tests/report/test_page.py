import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from memory import large_run, run_of, summary_rows
from synthetic import HOSTILE, Recipe, SyntheticRun, write_run

from deltalens.errors import StoreError
from deltalens.report import compare_report, notebook_html, write_report
from deltalens.report.html import content_hash, joined_script, render
from deltalens.report.payload import page_payload

VARIANTS = {
    "no controls": Recipe(controls=False, nulls=False),
    "no neighbours": Recipe(neighbors=False),
    "pool without text": Recipe(pool_text=False),
    "all NaN": Recipe(nan_share=1.0),
    "some NaN": Recipe(nan_share=0.3),
    "one map": Recipe(maps=("linear",)),
    "one layer": Recipe(layers=(3,)),
    "one protocol": Recipe(protocols=("in_sample",)),
    "leave one out": Recipe(protocols=("leave_one_out",)),
    "few windows": Recipe(windows=2),
    "one window": Recipe(windows=1),
    "no KL": Recipe(drop=("kl_single", "kl_all", "spearman", "spearman_all")),
    "no geometry": Recipe(drop=("angle_residual_tokenwise", "proj_residual", "proj_full")),
    "two fits": Recipe(fits=("local", "global"), maps=("linear",)),
    "identity and isolated": Recipe(maps=("identity", "isolated")),
    "hybrid": Recipe(block_kind="hybrid"),
}


class Page(HTMLParser):
    """Elements, attributes and the text of scripts, as a browser's parser sees them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self.tags.append((f"/{tag}", {}))

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1][0] == "script":
            self.scripts[-1] += data


def small(recipe: Recipe) -> Recipe:
    return Recipe(**{**vars(recipe), "layers": recipe.layers[:3], "window": 16, "pool_windows": 4})


@pytest.mark.parametrize("name", VARIANTS)
def test_a_page_is_written_whatever_the_run_lacks(tmp_path: Path, name: str) -> None:
    run = write_run(tmp_path / "run", small(VARIANTS[name]))
    page = Page(write_report(run, tmp_path / "r.html").read_text(encoding="utf-8"))
    light, heavy = json.loads(page.scripts[0]), json.loads(page.scripts[1])
    assert len(light["summary"]["layer"]) == len(run.summary())
    assert len(heavy["text"]["token"]) == len(run.tokens().drop_duplicates(["window", "position"]))
    assert notebook_html(run).count("<li") == 9


def test_the_page_asks_nothing_of_the_network(run: SyntheticRun) -> None:
    text = render(run)
    page = Page(text)
    assert not [t for t in page.tags if t[0] in {"img", "iframe", "object", "embed", "base", "form"}]
    addresses = [a[key] for _, a in page.tags for key in ("src", "href", "action", "srcset") if a.get(key)]
    assert all(address.startswith(("#", "data:,")) for address in addresses)
    assert not re.findall(r"url\(|@import|https?://(?!www\.w3\.org/2000/svg)", text)


def test_the_security_policy_allows_this_script_and_no_other(run: SyntheticRun) -> None:
    page = Page(render(run))
    policy = next(a["content"] for t, a in page.tags if t == "meta" and a.get("http-equiv"))
    assert policy is not None
    assert "default-src 'none'" in policy
    assert f"script-src '{content_hash(joined_script())}'" in policy
    assert page.scripts[2] == joined_script()


def test_hostile_strings_stay_data(hostile_run: SyntheticRun) -> None:
    page = Page(render(hostile_run))
    assert [t for t, _ in page.tags].count("script") == 3
    assert "pwned" not in " ".join(str(a) for t, a in page.tags if t != "script")
    tokens = json.loads(page.scripts[1])["text"]["token"]
    assert tokens[1 : 1 + len(HOSTILE)] == list(HOSTILE)
    assert json.loads(page.scripts[0])["name"] == hostile_run.manifest["model"]["name"]


def test_hostile_names_stay_text_in_the_notebook_and_the_comparison(hostile_run: SyntheticRun, tmp_path: Path) -> None:
    assert "<script>" not in notebook_html(hostile_run)
    page = Page(compare_report([hostile_run, hostile_run], tmp_path / "c.html").read_text(encoding="utf-8"))
    assert [t for t, _ in page.tags].count("script") == 2


def test_a_page_of_30_layers_2048_tokens_and_four_maps_is_under_8_megabytes() -> None:
    run = large_run(30, 8, 256, ("diagonal", "low_rank:8", "orthogonal", "mlp:32"))
    text = render(run)
    assert len(text.encode("utf-8")) < 8_000_000
    assert "2,048 of 2,048 tokens are shown" in text


def test_what_is_too_much_for_a_page_is_sampled_by_windows_and_said() -> None:
    run = large_run(24, 40, 128, ("diagonal", "linear", "low_rank:8", "orthogonal", "affine", "mlp:32"))
    text = render(run)
    assert len(text.encode("utf-8")) < 8_000_000
    shown = re.search(r"([\d,]+) of 5,120 tokens are shown", text)
    assert shown is not None
    assert 0 < int(shown.group(1).replace(",", "")) < 5120


def test_the_summary_on_the_page_is_the_run_s(run: SyntheticRun) -> None:
    light, _ = page_payload(run)
    shown = np.array(light["summary"]["columns"]["cos_full_tokenwise"], dtype=float)
    assert np.allclose(shown, run.summary()["cos_full_tokenwise"], rtol=1e-4)


def test_histograms_count_every_included_token(run: SyntheticRun) -> None:
    light, _ = page_payload(run)
    counts = light["histograms"]["angle_residual_tokenwise"]["counts"]
    included = (~run.tokens(layer=0, map="diagonal", protocol="held_out")["excluded"]).sum()
    assert {sum(by_layer[0]) for by_layer in counts.values()} == {included}


def test_provenance_and_warnings_are_on_the_page(run: SyntheticRun) -> None:
    text = render(run)
    for fact in ("deltalens run synthetic-30", "cached_keys", "41% of the neighbours", "sdpa", "2.13.0"):
        assert fact in text


def test_a_failed_check_is_a_warning(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", Recipe(layers=(0,), windows=2, window=16))
    content = run.manifest
    content["checks"][0] |= {"holds": False, "name": "chain of blocks"}
    (run.folder / "run.json").write_text(json.dumps(content), encoding="utf-8")
    assert "Check failed: chain of blocks" in render(run)


def test_an_empty_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no finished unit"):
        write_report(run_of(summary_rows("held_out", 0)), tmp_path / "r.html")


def test_a_path_that_cannot_be_written_is_named(run: SyntheticRun, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="choose another path"):
        write_report(run, tmp_path / "missing" / "r.html")


def test_equal_runs_give_equal_pages(run: SyntheticRun) -> None:
    assert render(run) == render(run)


def test_importing_the_report_loads_no_drawing_library() -> None:
    code = "import sys, deltalens.report; print(*sorted({'matplotlib', 'plotly', 'transformers'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
