"""The page in headless Chromium, opened from disk: it is clicked, walked by keyboard, and its numbers are read back."""

import contextlib
import shutil

import numpy as np
import pytest

from experiments.model_report.page import write_report
from experiments.model_report.safe import visible, visible_token
from tests.experiments.report_subjects import HOSTILE, NAME, subject

pytestmark = pytest.mark.slow

CHROMIUM = shutil.which("chromium")
MEASURES = ("normalized_entropy", "normalized_entropy_no_sink", "sink_mass")  # the first maps

SHIFTED = """new Promise(done => {
  let sum = 0;
  const add = list => list.getEntries().forEach(entry => { sum += entry.value; });
  new PerformanceObserver(add).observe({ type: "layout-shift", buffered: true });
  setTimeout(() => done(sum), 200);
})"""


@pytest.fixture(scope="module")
def browser():
    if CHROMIUM is None:
        pytest.skip("no chromium is installed: apt-get install chromium")
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright drives the browser")
    with playwright.sync_playwright() as started:
        chromium = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@contextlib.contextmanager
def opened(browser, path, *, width=1600, scheme="light", at=""):
    """The page at a path. Whatever it says on the console, asks for, or pops up fails."""
    context = browser.new_context(viewport={"width": width, "height": 1000}, color_scheme=scheme)
    page, wrong = context.new_page(), []
    page.on("console", lambda message: wrong.append(f"console: {message.type} {message.text}"))
    page.on("pageerror", lambda error: wrong.append(f"error: {error}"))
    page.on("dialog", lambda dialog: (wrong.append(f"dialog: {dialog.message}"), dialog.dismiss()))
    page.on("request", lambda request: wrong.append(request.url) if not request.url.startswith("file:") else None)
    page.set_default_timeout(20_000)
    page.goto(path.as_uri() + at)
    yield page
    assert page.evaluate("document.querySelectorAll('script').length") == 4  # ours, and plotly.js once it started
    assert page.evaluate("document.querySelectorAll('img, iframe, figure b, figure a').length") == 0
    context.close()
    assert wrong == []


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    found = subject()
    return found, write_report(tmp_path_factory.mktemp("one") / "a <b>'\".html", [found])


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    found = subject(), subject(1, name="b" + NAME)
    return found, write_report(tmp_path_factory.mktemp("two") / "index.html", found)


def drawn(page, figure):
    """The area of a figure, once it is drawn."""
    page.locator(f"#{figure} .canvas").scroll_into_view_if_needed()
    area = page.locator(f"#{figure} .nsewdrag")
    area.wait_for()
    page.wait_for_timeout(100)
    return area.bounding_box()


def cell(page, figure, at, shape):
    """The middle of a cell on the screen."""
    box = drawn(page, figure)
    i, j = at
    return box["x"] + box["width"] * (j + 0.5) / shape[1], box["y"] + box["height"] * (i + 0.5) / shape[0]


def table(page, figure):
    """Caption, column names, row names and numbers of a figure's table; – is NaN."""
    details = page.locator(f"#{figure} details.table")
    if details.get_attribute("open") is None:
        details.locator("summary").click()
    details.locator("table").wait_for()
    rows = details.locator("table").evaluate(
        "table => [...table.rows].map(row => [...row.cells].map(cell => cell.textContent))"
    )
    numbers = [[float("nan") if x == "–" else float(x) for x in row[1:]] for row in rows[1:]]
    caption = details.locator("caption").text_content()
    return caption, rows[0][1:], [row[0] for row in rows[1:]], np.array(numbers)


def title(page):
    return page.locator("#head-title").text_content()


def test_it_opens_at_once(browser, tmp_path):
    """Times are told, not judged: other work on the machine would decide."""
    large = subject(layers=30, heads=9, width=64, length=256, tokens=(*HOSTILE, *(f" {i}" for i in range(43))))
    path = write_report(tmp_path / "index.html", [large])
    with opened(browser, path) as page:
        page.locator("#map-0 .canvas").scroll_into_view_if_needed()
        page.locator("#map-0 .nsewdrag").wait_for()
        first = page.evaluate("performance.now()")
        (timing,) = page.evaluate(
            "performance.getEntriesByType('navigation').map(x => [x.domInteractive, x.loadEventEnd])"
        )
        for figure in ("map-5", "pattern", "spectrum"):
            drawn(page, figure)
        assert page.evaluate(SHIFTED) == 0
        print(
            f"\n{path.stat().st_size / 1e6:.1f} MB; readable after {timing[0]:.0f} ms, loaded after {timing[1]:.0f} ms, "
            f"first map drawn after {first:.0f} ms"
        )


def test_tables_hold_the_numbers_that_were_measured(browser, one):
    found, path = one
    with opened(browser, path) as page:
        for i, measure in enumerate(MEASURES):
            _, columns, rows, numbers = table(page, f"map-{i}")
            np.testing.assert_allclose(numbers, found.diagnosis.measures[measure], rtol=1e-3)
            assert columns == ["head 0", "head 1"]
            assert rows == ["layer 0", "layer 1", "layer 2"]
        caption, columns, rows, numbers = table(page, "pattern")
        shown = len(HOSTILE)
        np.testing.assert_allclose(numbers, found.look.pattern[0, 0, :, :shown], atol=0.5 / 254 + 1e-4)
        texts = [f"{i} {visible_token(token)}" for i, token in enumerate(HOSTILE)]
        assert rows == texts
        assert columns == texts
        assert caption == f"Pattern of L0 H0, {visible(NAME)}"
        *_, numbers = table(page, "entropy")
        np.testing.assert_allclose(numbers[:, 0], found.look.entropy[0, 0], atol=1e-4)
        *_, numbers = table(page, "spectrum")
        np.testing.assert_allclose(numbers[:, 0], found.look.spectrum[0, 0], rtol=1e-3)
        for i in range(8):  # one of them knows nothing
            drawn(page, f"map-{i}")
        assert np.isnan(table(page, "map-7")[-1]).all()
        page.get_by_text("Other measures").click()
        last = page.locator("figure.map").last.get_attribute("id")
        *_, numbers = table(page, last)
        np.testing.assert_allclose(numbers[:, 0], found.diagnosis.measures["token_cosine"], rtol=1e-3)


def test_a_click_on_a_cell_opens_the_head(browser, one):
    found, path = one
    with opened(browser, path) as page:
        page.mouse.click(*cell(page, "map-0", (2, 1), (3, 2)))
        page.wait_for_url("**#L2H1")
        assert title(page) == "Layer 2, head 1"
        assert page.evaluate("document.activeElement.id") == "head-title"
        numbers = table(page, "pattern")[-1]
        np.testing.assert_allclose(numbers, found.look.pattern[2, 1, :, : len(HOSTILE)], atol=0.5 / 254 + 1e-4)
        rows = page.locator("#numbers tbody tr").evaluate_all(
            "rows => rows.map(row => [...row.cells].map(x => x.textContent))"
        )
        label, value, median, rank = rows[0]
        values = found.diagnosis.measures["normalized_entropy"]
        assert label == "Entropy"
        np.testing.assert_allclose([float(value), float(median)], [values[2, 1], values[2].mean()], rtol=1e-3)
        assert rank == f"{(values > values[2, 1]).sum() + 1} of 6"
        page.mouse.click(*cell(page, "map-2", (1, 1), (3, 2)))  # which has no number
        page.wait_for_url("**#L1H1")
        page.go_back()
        page.wait_for_function("document.getElementById('head-title').textContent === 'Layer 2, head 1'")


def test_a_finding_leads_to_its_head(browser, one):
    _, path = one
    with opened(browser, path) as page:
        page.locator("#findings a").first.click()
        assert title(page) == "Layer 2, head 1"
        page.locator("#findings .more summary").click()
        page.locator("#findings .more a").last.click()
        assert title(page) == "Layer 1, head 0"
        page.locator("#findings a", has_text="layer 0").first.click()
        assert title(page) == "Layer 0, head 0"


def test_an_address_leads_to_a_head(browser, one):
    _, path = one
    for at, expected in (("#L1H1", "Layer 1, head 1"), ("#L9H9", "Layer 2, head 1"), ("#Lx", "Layer 0, head 0")):
        with opened(browser, path, at=at) as page:
            assert title(page) == expected


def test_hovering_shows_hostile_text_as_it_is(browser, one):
    _, path = one
    shown = len(HOSTILE)
    with opened(browser, path) as page:
        for i, j in ((3, 0), (9, 8), (shown - 1, 4)):
            page.mouse.move(*cell(page, "pattern", (i, j), (shown, shown)))
            label = page.locator("#pattern .hoverlayer .hovertext text")
            label.wait_for()
            (text,) = label.all_text_contents()
            assert text.startswith(f"query {i} {visible_token(HOSTILE[i])}, key {j} {visible_token(HOSTILE[j])}: ")
            page.mouse.move(0, 0)
        ticks = page.locator("#pattern .ytick text").all_text_contents()
        assert len(ticks) == shown
        for tick, token in zip(ticks, HOSTILE, strict=True):
            assert tick.removesuffix("…") == visible_token(token)[: 13 if tick.endswith("…") else None]


def test_by_keyboard_alone(browser, one):
    found, path = one
    with opened(browser, path) as page:
        said = page.locator("#spoken")
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.textContent") == "Skip to the findings"
        page.keyboard.press("Tab")
        page.keyboard.press("Enter")
        page.keyboard.press("Tab")  # from the maps on
        assert page.evaluate("document.activeElement.closest('figure').id") == "map-0"
        outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert outline == "solid"
        for key in ("ArrowRight", "ArrowRight", "ArrowDown", "ArrowDown", "ArrowDown", "ArrowUp", "Home", "End"):
            page.keyboard.press(key)
        name, number = said.text_content().split(": ")
        assert name == "layer 1, head 1"
        np.testing.assert_allclose(float(number), found.diagnosis.measures["normalized_entropy"][1, 1], rtol=1e-3)
        page.keyboard.press("Enter")
        page.wait_for_url("**#L1H1")
        assert title(page) == "Layer 1, head 1"
        page.locator("#next").focus()
        page.keyboard.press("Space")
        assert title(page) == "Layer 2, head 0"
        page.locator("#pattern .canvas").focus()
        page.keyboard.press("ArrowDown")
        assert said.text_content().startswith(f"query 1 {visible_token(HOSTILE[1])}, key 0 {HOSTILE[0]}: ")
        page.locator("#layer").focus()
        page.keyboard.press("ArrowUp")
        page.wait_for_function("document.getElementById('head-title').textContent === 'Layer 1, head 0'")
        page.locator("#pattern summary").focus()
        page.keyboard.press("Enter")
        page.locator("#pattern table").wait_for()


def colours(page):
    return page.evaluate(
        "[getComputedStyle(document.body).backgroundColor, document.querySelector('#map-0 .ytick text').style.fill]"
    )


def test_light_and_dark(browser, one):
    _, path = one
    light, dark = ("rgb(255, 255, 255)", "rgb(26, 29, 35)"), ("rgb(20, 22, 26)", "rgb(230, 232, 236)")
    for scheme, before in (("light", light), ("dark", dark)):
        with opened(browser, path, scheme=scheme) as page:
            drawn(page, "map-0")
            assert tuple(colours(page)) == before
            for wanted, after in (("light", light), ("dark", dark), ("auto", before)):
                page.locator("#theme").click()
                assert page.locator("#theme").text_content() == f"Theme: {wanted}"
                page.locator("#map-0 .canvas").scroll_into_view_if_needed()
                page.wait_for_timeout(100)
                assert tuple(colours(page)) == after
            page.emulate_media(color_scheme="light" if scheme == "dark" else "dark")
            page.wait_for_timeout(200)
            assert tuple(colours(page)) == (light if scheme == "dark" else dark)


def test_two_models_and_their_difference(browser, two):
    (first, second), path = two
    measure, shown = "normalized_entropy", len(HOSTILE)
    with opened(browser, path, at="#L1H0") as page:
        np.testing.assert_allclose(table(page, "map-0")[-1], first.diagnosis.measures[measure], rtol=1e-3)
        page.locator("#show input").first.focus()
        page.keyboard.press("ArrowRight")
        np.testing.assert_allclose(table(page, "map-0")[-1], second.diagnosis.measures[measure], rtol=1e-3)
        page.keyboard.press("ArrowRight")
        caption, _, _, numbers = table(page, "map-0")
        assert caption == f"Entropy, {visible('b' + NAME)} minus {visible(NAME)}"
        expected = second.diagnosis.measures[measure] - first.diagnosis.measures[measure]
        np.testing.assert_allclose(numbers, expected, atol=1e-3)
        expected = (second.look.pattern - first.look.pattern)[1, 0, :, :shown]
        np.testing.assert_allclose(table(page, "pattern")[-1], expected, atol=1 / 254 + 1e-4)
        drawn(page, "map-0")
        drawn(page, "pattern")
        expected = np.stack([first.look.entropy[1, 0], second.look.entropy[1, 0]], axis=1)
        np.testing.assert_allclose(table(page, "entropy")[-1], expected, atol=1e-4)
        cells = page.locator("#numbers tbody tr").first.locator("td").all_text_contents()
        values = [x.diagnosis.measures[measure][1, 0] for x in (first, second)]
        np.testing.assert_allclose([float(x) for x in cells], [*values, values[1] - values[0]], atol=1e-3)


def test_models_that_differ_in_size_have_no_difference(browser, tmp_path):
    path = write_report(tmp_path / "index.html", [subject(), subject(1, layers=2, tokens=("t",) * len(HOSTILE))])
    with opened(browser, path, at="#L2H1") as page:
        assert page.locator("#show input").last.is_disabled()
        assert page.locator("#no-difference").is_visible()
        assert title(page) == "Layer 2, head 1"
        page.locator("#show input").nth(1).check()
        assert title(page) == "Layer 1, head 1"


def test_texts_of_other_lengths_share_their_curves(browser, tmp_path):
    pair = subject(length=40), subject(1, length=25)
    path = write_report(tmp_path / "index.html", pair)
    with opened(browser, path) as page:
        page.locator("#show input").last.check()
        _, columns, rows, numbers = table(page, "entropy")
        assert rows == [str(i) for i in range(40)]
        assert columns == [visible(NAME)] * 2
        np.testing.assert_allclose(numbers[:, 0], pair[0].look.entropy[0, 0], atol=1e-4)
        np.testing.assert_allclose(numbers[:25, 1], pair[1].look.entropy[0, 0], atol=1e-4)
        assert np.isnan(numbers[25:, 1]).all()
        drawn(page, "entropy")


def test_other_tokens_have_no_difference(browser, tmp_path):
    path = write_report(tmp_path / "index.html", [subject(), subject(1, tokens=("t",) * len(HOSTILE))])
    with opened(browser, path) as page:
        drawn(page, "pattern")
        page.locator("#show input").last.check()
        assert "choose one of them" in page.locator("#pattern .canvas").text_content()
        page.locator("#show input").first.check()
        drawn(page, "pattern")


@pytest.mark.parametrize("width", [400, 1600])
def test_nothing_overflows(browser, two, width):
    _, path = two
    with opened(browser, path, width=width) as page:
        for figure in ("map-0", "pattern", "entropy", "spectrum"):
            drawn(page, figure)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
