"""The page in a real browser: Debian's Chromium, headless, from file:// and without a network."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass, field

import pytest
from report_runs import CHAIN, HOSTILE, META, METHODS, TOKENS, bench_run, study_run, wide_rows

from draftsmith.eval.report.benchmark import DRAWINGS as OF_A_BENCH
from draftsmith.eval.report.command import ReportConfig, run
from draftsmith.eval.report.drawing import chart
from draftsmith.eval.report.page import Section, render
from draftsmith.eval.report.sections import TABLE_RUNS

INSTALL = "no chromium on PATH: apt-get install chromium (Debian), or any Chromium under that name"


@dataclass
class Seen:
    """The page, and all that it should not do."""

    page: object
    trouble: list[str] = field(default_factory=list)


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    chromium = shutil.which("chromium")
    if chromium is None and (os.environ.get("CI") or os.environ.get("DRAFTSMITH_BROWSER") == "required"):
        pytest.fail(INSTALL)
    if chromium is None:
        pytest.skip(INSTALL)  # laptops without a browser run the rest of the tests; .ci/run demands one
    from playwright.sync_api import sync_playwright

    directory = tmp_path_factory.mktemp("page")
    output = directory / "report.html"
    run(ReportConfig(runs=(bench_run(directory / "bench"), study_run(directory / "study")), output=output))
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        context = browser.new_context(viewport={"width": 1200, "height": 900}, color_scheme="light")
        context.grant_permissions(["clipboard-read", "clipboard-write"])
        context.set_default_timeout(180_000)  # a machine whose cores all run tests is slow, not broken
        page = context.new_page()
        found = Seen(page)
        page.on("console", lambda message: found.trouble.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: found.trouble.append(f"page error: {error}"))
        page.on("dialog", lambda dialog: (found.trouble.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        page.on(
            "request",
            lambda request: request.url.startswith(("file:", "data:", "blob:")) or found.trouble.append(request.url),
        )
        page.goto(output.as_uri())
        drawn(page)
        yield found
        browser.close()


@pytest.fixture(autouse=True)
def quiet(seen):
    """No console message, error, dialog or request, whatever a test does."""
    yield
    assert seen.trouble == []


def drawn(page):
    page.wait_for_selector("html[data-charts=ready]")


def choose_method(page, method):
    page.locator("[data-choose=temperature]").select_option("0")
    page.locator("[data-choose=method]").select_option(label=method)


def test_every_chart_is_drawn_and_every_table_filled(seen):
    charts = seen.page.locator("[data-chart]")
    assert charts.count() == 3 + 3  # three of the benchmark, three of the training
    for index in range(charts.count()):
        box = charts.nth(index).locator("svg.marks").bounding_box()
        assert box["width"] > 100 and box["height"] > 40
    assert seen.page.locator("#bench-bench-methods-t0 tbody tr").count() == len(METHODS)
    assert seen.page.locator("figure .empty").all_inner_texts() == ["No rows.", "Nothing to draw."]


def test_nothing_is_wider_than_its_page(seen):
    for width in (1200, 390):
        seen.page.set_viewport_size({"width": width, "height": 900})
        assert seen.page.evaluate("document.documentElement.scrollWidth") == width
    seen.page.set_viewport_size({"width": 1200, "height": 900})


@pytest.fixture(scope="module")
def every_chart(seen, tmp_path_factory):
    """A page of every drawing that a report has, of wide rows."""
    drawings = [item for own in (OF_A_BENCH, *(own for _, own in TABLE_RUNS.values())) for item in own.items()]
    charts = [chart(name, drawing, wide_rows()) for name, drawing in drawings]
    path = tmp_path_factory.mktemp("charts") / "report.html"
    path.write_text(render("Charts", "today", [Section("all", "All", "", charts)]))
    page = seen.page.context.browser.new_page()
    page.goto(path.as_uri())
    drawn(page)
    yield page
    page.close()


@pytest.mark.parametrize("width", [390, 768, 1280])
def test_every_chart_is_as_wide_as_there_is_room(every_chart, width):
    every_chart.set_viewport_size({"width": width, "height": 900})
    every_chart.reload()
    drawn(every_chart)
    over = "chart => [chart.dataset.chart, chart.parentElement.scrollWidth - chart.parentElement.clientWidth]"
    sizes = every_chart.locator("[data-chart]").evaluate_all(f"charts => charts.map({over})")
    assert len(sizes) == len(OF_A_BENCH) + sum(len(own) for _, own in TABLE_RUNS.values())
    assert [(name, over) for name, over in sizes if over > 0] == []


def test_a_command_is_copied_or_selected_to_be_copied(seen):
    page, button = seen.page, seen.page.locator("#bench-bench-commands [data-copy]")
    button.click()
    page.wait_for_function("document.querySelector('[data-copy]').textContent === 'Copied'")
    assert page.evaluate("navigator.clipboard.readText()") == META["command"]
    page.evaluate("() => { navigator.clipboard.writeText = () => Promise.reject(new Error('not here')); }")
    button.click()
    page.wait_for_function("document.querySelector('[data-copy]').textContent === 'Selected'")
    assert page.evaluate("getSelection().toString()") == META["command"]


def test_a_clicked_token_opens_its_round(seen):
    page = seen.page
    choose_method(page, METHODS[1])
    shown = page.locator(".text .token[role=button]")
    expected = [
        (TOKENS[token], kind) for item in CHAIN for token, kind in zip(item["emitted"], item["kinds"], strict=True)
    ]
    assert shown.count() == len(expected)
    for index, (text, kind) in enumerate(expected):
        assert shown.nth(index).text_content() == text.replace("\n", "⏎\n")
        assert kind in shown.nth(index).get_attribute("class").split()
    shown.nth(3).click()
    panel = page.locator("[data-role=round]")
    assert panel.locator("h4").inner_text() == "Round 1"
    rows = [row.all_inner_texts() for row in (panel.locator("tbody tr").nth(i).locator("td") for i in range(3))]
    assert rows[0] == ["1", "␣x", "accepted", "0.9", "0.1", "0.95", "1"]
    assert rows[2] == ["3", "␣a", "rejected", "0.123", "1.5", "", "0"]
    assert "12.3 ms" in panel.inner_text() and "4 ms in 2 calls" in panel.inner_text()


def test_the_keyboard_does_the_same(seen):
    page = seen.page
    choose_method(page, METHODS[1])
    page.locator("[data-choose=discarded]").focus()
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")  # the prompt unfolds
    assert page.locator("[data-role=prompt]").inner_text() == f"{HOSTILE} 0"
    page.keyboard.press("Tab")
    focused = page.locator(":focus")
    assert "Token 1, def" in focused.get_attribute("aria-label")
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    for key in ("ArrowDown", "ArrowDown", "ArrowRight", "Enter"):
        page.keyboard.press(key)
    assert "Token 6" in page.locator(":focus").get_attribute("aria-label")
    assert page.locator("[data-role=round] h4").inner_text() == "Round 2"
    page.locator("[data-role=round] button", has_text="Next").press("Enter")
    assert page.locator("[data-role=round] h4").inner_text() == "Round 3"
    page.locator("[data-role=text] [tabindex='0']").press("Home")
    page.keyboard.press("ArrowLeft")  # there is none before the first
    assert "Token 1," in page.locator(":focus").get_attribute("aria-label")
    page.evaluate("document.activeElement.blur()")
    page.locator(".skip").focus()
    assert page.locator(".skip").bounding_box()["x"] >= 0


def test_a_tree_round_is_drawn_as_a_tree(seen):
    page = seen.page
    choose_method(page, METHODS[2])
    page.locator(".text .token.bonus").first.click()
    tree = page.locator("[data-role=round] .tree svg")
    tree.wait_for()
    texts = [text for text in tree.locator("text").all_text_contents() if text]
    assert sorted(texts) == sorted(["␣x", "␣a", "⏎", "␣b"])
    assert tree.locator("g.mark-path[aria-roledescription], g.mark-path").first.locator("path").count() == 4


def test_hostile_text_is_text(seen):
    page = seen.page
    choose_method(page, METHODS[1])
    assert page.locator(".text .token.correction").first.text_content() == HOSTILE
    assert HOSTILE in page.locator("#training-study-best").inner_text()
    assert HOSTILE in page.locator("[data-choose=prompt] option").nth(1).text_content()
    assert page.locator("main script:not([type='application/json'])").count() == 0


def colors(page):
    """Of the page's ground and of an axis label."""
    background = "getComputedStyle(document.documentElement).backgroundColor"
    label = "getComputedStyle(document.querySelector('[data-chart] .role-axis-label text')).fill"
    return page.evaluate(f"[{background}, {label}]")


def colors_once(page, right):
    """The colors as soon as they are right: the browser tells a page of another theme, and of another medium, later."""
    for _ in range(600):
        drawn(page)
        if right(found := colors(page)):
            return found
        page.wait_for_timeout(100)
    pytest.fail(f"the page stays {found}")


def test_the_theme_is_the_systems_until_the_reader_chooses_and_paper_is_light(seen):
    page = seen.page
    light = colors(page)
    assert light[0] == "rgb(255, 255, 255)"
    page.emulate_media(color_scheme="dark")
    dark = colors_once(page, lambda found: not set(light) & set(found))
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    page.emulate_media(color_scheme="dark", media="print")
    colors_once(page, light.__eq__)
    assert not page.locator("nav").is_visible() and page.locator("#bench-bench-details dl").first.is_visible()
    assert page.pdf(format="A4").startswith(b"%PDF")
    page.emulate_media(color_scheme="dark", media="screen")
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    colors_once(page, dark.__eq__)
    page.locator("#theme").click()
    colors_once(page, light.__eq__)
    page.locator("#theme").click()
    colors_once(page, dark.__eq__)
