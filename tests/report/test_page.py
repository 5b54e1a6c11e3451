"""A report in a real browser: sorted, filtered, on a phone, in the dark, and without any network."""

import pytest

from ortprep.quoting import printable
from ortprep.report.html_page import render_report
from ortprep.report.report_builder import build_report
from tests.report.builders import Story, subject
from tests.report.conftest import PHONE_WIDTH

pytestmark = pytest.mark.slow

BACKSPACE = "\ue003"
"""What WebDriver calls the key."""

LONG = "a-rather-long-name-of-a-model-as-people-give-them_v2.1-fp16-opset17"
HOSTILE = '</script><img src=x onerror="window.hacked=1"><script>window.hacked=1</script>\'\u2028&amp;'


@pytest.fixture(scope="module")
def one(pages):
    """The report of one model."""
    return write(pages / "one.html", subject(trials=40))


@pytest.fixture(scope="module")
def many(pages):
    """The report of several models."""
    stories = [
        Story(name=LONG),
        Story(name="b", faster=False),
        Story(name="c", trials=0),
        Story(name="d", sooner=3),
    ]
    return write(pages / "many.html", *(subject(story) for story in stories))


def write(path, *subjects):
    report = build_report(subjects, version="0.1.0")  # type: ignore[arg-type]
    path.write_text(render_report(report), encoding="utf-8")
    return path


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_the_page_asks_for_nothing_but_itself(chromium, one, dark):
    page = chromium.show(one, dark=dark)
    page.open_all()
    assert page.requests() == [one.as_uri()]
    assert page.complaints() == []
    assert page.ask("return performance.getEntriesByType('resource').map(entry => entry.name)") == []


# -- tables

TRIALS = "document.querySelector('.table.sortable:has(tr.marked)')"


def trials(page, column):
    """The texts of a column of the table of trials, in the order they are seen."""
    found: list[str] = page.ask(
        f"return [...{TRIALS}.querySelector('tbody').rows].filter(row => !row.hidden)"
        f".map(row => row.cells[{column}].textContent)"
    )
    return found


def headings(page):
    found: list[str | None] = page.ask(
        f"return [...{TRIALS}.querySelectorAll('th')].map(one => one.getAttribute('aria-sort'))"
    )
    return found


def medians(texts):
    return [float(text.split()[0]) for text in texts if text != "–"]


def test_a_click_on_a_heading_sorts_by_figures_and_a_second_one_turns_it_round(chromium, one):
    page = chromium.show(one)
    button = page.ask(f"return {TRIALS}.querySelectorAll('th button')[2]")
    page.ask("arguments[0].scrollIntoView({block: 'center'})", button)
    button.click()
    rising = trials(page, 2)
    assert medians(rising) == sorted(medians(rising))
    assert len(medians(rising)) == 39
    assert rising[-1] == "–", "what has no figure comes last"
    assert headings(page)[2] == "ascending"
    button.click()
    falling = trials(page, 2)
    assert medians(falling) == sorted(medians(falling), reverse=True)
    assert falling[-1] == "–", "however it is sorted"
    assert headings(page) == [None, None, "descending", *[None] * 4]


def test_the_filter_shows_the_rows_that_have_every_word(chromium, one):
    page = chromium.show(one)
    box = page.ask(f"return {TRIALS}.querySelector('input')")
    assert page.ask(f"return {TRIALS}.querySelector('label').textContent").strip() == "Filter rows"
    box.send_keys("FAILED signal")
    assert trials(page, 0) == ["38"]
    assert page.ask(f"return {TRIALS}.querySelector('output').textContent") == "1 of 40 rows"
    box.clear()
    box.send_keys(BACKSPACE)
    page.ask("arguments[0].dispatchEvent(new Event('input', {bubbles: true}))", box)
    assert len(trials(page, 0)) == 40


# -- screens


@pytest.mark.parametrize("which", ["one", "many"])
@pytest.mark.parametrize("width", [PHONE_WIDTH, 320])
def test_a_phone_never_scrolls_sideways(chromium, which, width, request):
    page = chromium.show(request.getfixturevalue(which), width=width, height=844)
    page.open_all()
    assert page.ask("return document.documentElement.scrollWidth") <= width
    wide = page.ask(
        "return [...document.querySelectorAll('.facts, .scroll, summary, p')]"
        ".filter(one => one.offsetParent !== null)"
        ".filter(one => one.getBoundingClientRect().right > innerWidth + 0.5)"
        ".map(one => one.tagName + '.' + (one.className.baseVal ?? one.className))"
    )
    assert wide == []


def test_a_screen_of_1200_pixels_scrolls_no_table_sideways(chromium, one, many):
    for path in (one, many):
        page = chromium.show(path, width=1200)
        tables = page.ask(
            "return [...document.querySelectorAll('.scroll')].filter(one => one.checkVisibility())"
            ".map(one => [one.getAttribute('aria-label'), one.scrollWidth - one.clientWidth])"
        )
        assert tables
        assert [label for label, excess in tables if excess > 0] == []


CONTRASTS = """
const parse = text => text.match(/[\\d.]+/g).map(Number);
const luminance = ([r, g, b]) => {
  const [x, y, z] = [r, g, b].map(c => (c /= 255) <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
  return 0.2126 * x + 0.7152 * y + 0.0722 * z;
};
const behind = element => {
  for (let one = element; one; one = one.parentElement) {
    const colour = parse(getComputedStyle(one).backgroundColor);
    if (colour.length === 3 || colour[3] > 0.99) return colour;
  }
  return [255, 255, 255];
};
const all = "h1, h2, h3, h4, h5, h6, p, a, summary, th, td, caption, dt, dd strong, dd span, .badge, " +
  "td span, output, label, button";
return [...document.querySelectorAll(all)].filter(one => one.textContent.trim()).map(one => {
  const style = getComputedStyle(one);
  const text = luminance(parse(style.color));
  const back = luminance(behind(one));
  const contrast = (Math.max(text, back) + 0.05) / (Math.min(text, back) + 0.05);
  const name = one.tagName + "." + (one.className.baseVal ?? one.className);
  return [name + ": " + one.textContent.slice(0, 30), contrast];
});
"""


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_every_text_stands_out_from_what_is_behind_it(chromium, many, dark):
    page = chromium.show(many, dark=dark)
    page.open_all()
    found = page.ask(CONTRASTS)
    assert len(found) > 200
    assert {text for text, contrast in found if contrast < 4.5} == set(), "WCAG 2.2, 1.4.3"


# -- strangers


def test_nothing_a_model_or_registry_says_becomes_part_of_the_page(chromium, pages):
    hostile = subject(name=HOSTILE, outputs=(HOSTILE, "$unit", "@bad", "datum.x"))
    page = chromium.show(write(pages / "hostile.html", hostile, subject(name="other")))
    page.open_all()
    assert page.ask("return window.hacked") is None
    assert page.ask("return document.querySelectorAll('img').length") == 0
    assert page.ask("return document.querySelectorAll('script').length") == 1
    names = page.ask("return [...document.querySelectorAll('.model-title')].map(one => one.textContent)")
    assert names == [printable(HOSTILE), "other"]
    assert page.complaints() == []
