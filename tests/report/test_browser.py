import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from browser import CHROMIUM, chromium, opened, settle
from synthetic import HOSTILE, Recipe, SyntheticRun, write_run
from test_page import VARIANTS, small

from deltalens.report import compare_report, write_report
from deltalens.report.encode import LEVELS

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Debian's chromium: apt-get install chromium")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as started:
        yield started


@pytest.fixture(scope="module")
def page_file(run: SyntheticRun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(run, tmp_path_factory.mktemp("page") / "report.html")


def set_layer(page: Any, index: int) -> None:
    page.locator("#layer").evaluate(
        "(node, value) => { node.value = value; node.dispatchEvent(new Event('input')); }", str(index)
    )
    settle(page)


def choose_map(page: Any, name: str = "diagonal") -> None:
    page.select_option("#text-map", label=name)
    settle(page)


def shown_values(page: Any) -> dict[int, float]:
    pairs = page.eval_on_selector_all("#tokens .token", "nodes => nodes.map(n => [+n.dataset.slot, n.dataset.value])")
    return {slot: float(value) if value else math.nan for slot, value in pairs}


def true_values(run: SyntheticRun, layer: int, map: str, protocol: str, measure: str) -> pd.Series:
    rows = run.tokens(layer=layer, map=map, protocol=protocol).sort_values(["window", "position"])
    return rows[measure].reset_index(drop=True)


def assert_shows(page: Any, values: pd.Series) -> None:
    shown = shown_values(page)
    assert len(shown) > 100
    positive = values[values > 0]
    step = math.log(positive.max() / positive.min()) / (LEVELS - 3) if len(positive) else 0
    for slot, value in shown.items():
        assert value == pytest.approx(values[slot], rel=max(2e-3, step), nan_ok=True)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_loads_in_silence_and_asks_for_nothing_else(browser: Any, page_file: Path, scheme: str) -> None:
    with opened(browser, page_file, scheme=scheme) as (page, record):
        page.locator("#more-profiles summary").click()
        settle(page)
        assert record.console == []
        assert record.requests == [page_file.as_uri()]
        assert page.locator("#profiles .card").count() == 10
        assert page.locator(".card path.line").count() > 100


@pytest.mark.parametrize("width", [1440, 768, 390])
def test_nothing_sticks_out_at_any_width(browser: Any, page_file: Path, tmp_path: Path, width: int) -> None:
    with opened(browser, page_file, width=width) as (page, record):
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.locator("#tokens .token").first.is_visible()
        assert len(page.screenshot(path=str(tmp_path / f"{width}.png"), full_page=True)) > 50_000
        assert record.console == []


def test_the_text_shows_each_layer_s_own_values(browser: Any, run: SyntheticRun, page_file: Path) -> None:
    with opened(browser, page_file) as (page, _):
        choose_map(page)
        for layer in (0, 5, 2):
            set_layer(page, layer)
            assert page.locator("#layer-name").inner_text() == f"{layer}→{layer + 1}"
            assert_shows(page, true_values(run, layer, "diagonal", "held_out", "relative_update_error"))


def test_the_text_opens_with_the_map_that_explains_most(browser: Any, run: SyntheticRun, page_file: Path) -> None:
    medians = run.summary().query("protocol == 'held_out'").groupby("map")["relative_update_error"].median()
    with opened(browser, page_file) as (page, _):
        assert page.locator("#text-map option:checked").inner_text() == medians.idxmin()


def test_map_measure_and_protocol_change_what_the_text_shows(browser: Any, run: SyntheticRun, page_file: Path) -> None:
    with opened(browser, page_file) as (page, _):
        set_layer(page, 3)
        page.select_option("#text-map", label="mlp:32")
        page.select_option("#text-measure", "kl_single")
        settle(page)
        assert_shows(page, true_values(run, 3, "mlp:32", "held_out", "kl_single"))
        page.locator("#protocols span", has_text="in sample").click()
        settle(page)
        assert_shows(page, true_values(run, 3, "mlp:32", "in_sample", "kl_single"))


def test_effect_over_random_is_the_ratio_of_both_columns(browser: Any, run: SyntheticRun, page_file: Path) -> None:
    with opened(browser, page_file) as (page, _):
        set_layer(page, 1)
        choose_map(page)
        page.select_option("#text-measure", "kl_over_random")
        settle(page)
        kl, control = (true_values(run, 1, "diagonal", "held_out", name) for name in ("kl_single", "kl_single_random"))
        assert_shows(page, kl / control)


def test_a_map_is_switched_off_everywhere_at_once(browser: Any, page_file: Path) -> None:
    with opened(browser, page_file) as (page, _):

        def count() -> list[int]:
            places = (".card[data-measure=relative_update_error] path.line", ".ridge-cell", ".scatter-cell")
            return [page.locator(p).count() for p in places] + [
                page.locator("#text-map option").count(), page.locator("#table tbody tr").count(),
                page.locator("#story .values thead svg").count(),
            ]  # fmt: skip

        before = count()
        page.locator(".chip", has_text="orthogonal").click()
        settle(page)
        assert page.locator(".chip", has_text="orthogonal").get_attribute("aria-pressed") == "false"
        assert count() == [n * 3 // 4 for n in before]
        page.locator(".chip", has_text="orthogonal").click()
        settle(page)
        assert count() == before


def test_all_maps_off_is_said_and_survived(browser: Any, page_file: Path) -> None:
    with opened(browser, page_file) as (page, record):
        for chip in page.locator(".chip").all():
            chip.click()
        settle(page)
        assert "no map is switched on" in page.locator("#profiles").inner_text()
        assert record.console == []


def test_windows_are_paged_through(browser: Any, run: SyntheticRun, page_file: Path) -> None:
    with opened(browser, page_file) as (page, _):
        assert page.locator("#window-previous").is_disabled()
        first = shown_values(page)
        page.locator("#window-next").click()
        settle(page)
        second = shown_values(page)
        assert not set(first) & set(second)
        assert len(first) + len(second) == 320
        assert page.locator("#window-next").is_disabled()


def test_a_click_on_a_token_tells_its_story(browser: Any, run: SyntheticRun, page_file: Path) -> None:
    with opened(browser, page_file) as (page, _):
        set_layer(page, 2)
        page.locator("#tokens .token[data-slot='40']").click()
        settle(page)
        story = page.locator("#story")
        row = run.tokens(layer=2, map="diagonal", protocol="held_out").query("window == 1 and position == 8").iloc[0]
        assert f"position 8 · id {row['token_id']}" in story.inner_text()
        near = run.neighbors().query("layer == 2 and protocol == 'held_out' and window == 1 and position == 8")
        place = near.sort_values("rank").iloc[0]
        title = f"window {place['pool_window']}, position {place['pool_position']}"
        assert story.locator(".neighbors li").first.get_attribute("title") == title
        pool = run.pool().query(f"window == {place['pool_window']} and position == {place['pool_position']}").iloc[0]
        assert story.locator(".neighbors li").first.locator("mark").text_content().strip() == pool["token"].strip()
        assert story.locator(".neighbors li").count() == 8


def test_the_keyboard_walks_along_tokens_and_layers(browser: Any, page_file: Path) -> None:
    with opened(browser, page_file) as (page, _):
        page.locator("#tokens .token").nth(3).focus()
        page.keyboard.press("ArrowRight")
        settle(page)
        assert page.evaluate("document.activeElement.dataset.index") == "4"
        before = page.locator("#layer-name").inner_text()
        page.keyboard.press("ArrowUp")
        settle(page)
        assert page.locator("#layer-name").inner_text() != before
        page.locator(".card svg.plot").first.focus()
        settle(page)
        page.keyboard.press("ArrowLeft")
        settle(page)
        assert page.locator("#layer-name").inner_text() == before
        assert page.locator("#tip").is_visible()


def test_hover_gives_the_exact_value_with_its_interval(browser: Any, run: SyntheticRun, page_file: Path) -> None:
    with opened(browser, page_file) as (page, _):
        plot = page.locator(".card[data-measure=cos_full_tokenwise] svg.plot")
        plot.scroll_into_view_if_needed()
        plot.hover(position={"x": 60, "y": 80})
        row = run.summary().query("layer == 0 and map == 'diagonal' and protocol == 'held_out'").iloc[0]
        text = page.locator("#tip").inner_text()
        assert "Layer 0→1" in text
        for name in ("cos_full_tokenwise", "cos_full_tokenwise_lo", "cos_full_tokenwise_hi"):
            assert f"{row[name]:.3f}" in text


def test_a_column_head_sorts_the_table(browser: Any, run: SyntheticRun, page_file: Path) -> None:
    with opened(browser, page_file) as (page, _):
        head = page.locator("#table th button", has_text="kl single")
        head.click()
        head.click()
        settle(page)
        best = run.summary().sort_values("kl_single").iloc[-1]
        first = page.locator("#table tbody tr").first.inner_text()
        assert f"{best['layer']}→{best['layer'] + 1}" in first
        assert best["map"] in first
        assert page.locator("#table th[aria-sort=descending]").count() == 1


def test_the_table_is_copied_as_csv(browser: Any, run: SyntheticRun, page_file: Path) -> None:
    with opened(browser, page_file) as (page, _):
        page.evaluate("navigator.clipboard.writeText = async text => { window.copied = text; }")
        page.locator("#table-csv").click()
        lines = page.evaluate("window.copied").splitlines()
        assert lines[0].startswith("layer,map,protocol,relative_error")
        assert len(lines) == 1 + len(run.summary())


def test_the_theme_button_turns_the_page_dark(browser: Any, page_file: Path) -> None:
    with opened(browser, page_file) as (page, _):
        background = "getComputedStyle(document.body).backgroundColor"
        assert page.evaluate(background) == "rgb(255, 255, 255)"
        page.locator("#theme").click()
        assert page.evaluate(background) == "rgb(17, 19, 23)"


def test_hostile_text_is_inert_and_visible(browser: Any, hostile_run: SyntheticRun, tmp_path: Path) -> None:
    with opened(browser, write_report(hostile_run, tmp_path / "r.html")) as (page, record):
        for index in range(1, len(HOSTILE) + 1):
            page.locator(f"#tokens .token[data-index='{index}']").dispatch_event("click")
        settle(page)
        assert page.evaluate("typeof window.pwned") == "undefined"
        assert page.evaluate("document.querySelectorAll('script').length") == 3
        assert page.locator("#tokens img, #story img, h1 script").count() == 0
        assert record.console == []
        assert record.requests == [(tmp_path / "r.html").as_uri()]
        texts = page.eval_on_selector_all("#tokens .token", "nodes => nodes.map(n => n.textContent)")
        by_token = dict(zip(HOSTILE, texts[1:], strict=False))
        assert by_token["</script><script>window.pwned=1</script>"] == "</script><script>window.pwned=1</script>"
        assert by_token["שלום"] == "שלום"
        assert by_token["\u202eesrever\u202c"] == "RLOesreverPDF"
        assert by_token["\u0000\u0007\u001b[31m"] == "␀␇␛[31m"
        assert by_token["\n\n"] == "↵\n↵\n"
        assert by_token["   "] == "   "
        assert by_token["\u200b"] == "ZWSP"
        joined = "".join(texts)
        assert not set(joined) & {"\u202e", "\u202c", "\u200b", "\u2028", "\u0000", "\u001b", "\ufeff"}


@pytest.mark.parametrize("name", VARIANTS)
def test_no_variant_of_a_run_breaks_the_page(browser: Any, tmp_path: Path, name: str) -> None:
    run = write_run(tmp_path / "run", small(VARIANTS[name]))
    with opened(browser, write_report(run, tmp_path / "r.html")) as (page, record):
        set_layer(page, 1)
        page.locator("#more-profiles summary").dispatch_event("click")
        settle(page)
        assert record.console == []
        assert page.locator("#tokens .token").count() > 0
        assert "NaN" not in page.locator("body").inner_text()
        assert page.locator("svg [d*='NaN'], svg [x*='NaN'], svg [y*='NaN'], svg [cx*='NaN']").count() == 0


def test_a_comparison_of_models_of_different_depth_works(browser: Any, tmp_path: Path) -> None:
    base = {"windows": 8, "window": 16, "maps": ("diagonal", "linear")}
    shallow = write_run(tmp_path / "a", Recipe(layers=(0, 1, 2), n_layers=3, model="shallow", **base))
    deep = write_run(tmp_path / "b", Recipe(layers=tuple(range(6)), n_layers=6, model="deep", size=1.4, **base))
    path = compare_report([shallow, deep], tmp_path / "c.html")
    with opened(browser, path) as (page, record):
        assert record.requests == [path.as_uri()]
        lines = page.locator(".card[data-measure=relative_error], .card[data-measure=cos_full_tokenwise] path.line")
        assert lines.count() >= 4
        assert page.locator("#difference-table tbody tr").count() == 3
        page.locator(".chip", has_text="deep").click()
        settle(page)
        assert "No difference" in page.locator("#difference-table").inner_text()
        page.locator(".chip", has_text="deep").click()
        page.select_option("#map", label="linear")
        settle(page)
        assert page.locator("#difference-table tbody tr").count() == 3
        set_layer(page, 0)
        assert page.locator("#layer-name").inner_text() == "17%"
        assert page.evaluate("document.documentElement.scrollWidth") <= 1280
        assert record.console == []
