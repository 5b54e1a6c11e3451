"""The HTML page, and what a notebook shows of a bundle."""

import base64
import hashlib
from html.parser import HTMLParser

import pytest

from ortprep.quoting import printable
from ortprep.report.html_page import make_environment, render_report
from ortprep.report.report_builder import build_report
from tests.report.builders import Story, subject

# -- one file, well formed, that nothing which is told in it can break

VOID = {"meta", "input", "br", "img", "link", "wbr"}
NASTY = (
    "</script><script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "' onload='x",
    "<!--",
    "]]>",
    "\u2028\u2029",
    "{{ 7 * 7 }}{% raw %}",
    "&lt;b&gt;",
    "</style><style>",
    "javascript:alert(1)",
)


class Reader(HTMLParser):
    """Reads a page as a browser does, and notes what does not fit."""

    def __init__(self):
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.handlers: list[str] = []
        self.tags: list[str] = []
        self.scripts: list[str] = []
        self.styles: list[str] = []
        self.policy = ""
        self.text = ""

    def handle_starttag(self, tag, attrs):
        found = {name: value or "" for name, value in attrs}
        self.tags.append(tag)
        self.ids += [found["id"]] if "id" in found else []
        self.links += [found[name] for name in ("href", "src") if name in found]
        self.handlers += [name for name in found if name.startswith("on")]
        if found.get("http-equiv") == "Content-Security-Policy":
            self.policy = found["content"]
        if tag not in VOID:
            self.open.append(tag)
        if tag == "script" and "type" not in found:
            self.scripts.append("")
        if tag == "style":
            self.styles.append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "style":
            self.styles[-1] += data
        elif self.open and self.open[-1] == "script":
            if self.scripts:
                self.scripts[-1] += data
        else:
            self.text += data


def read(html):
    reader = Reader()
    reader.feed(html)
    reader.close()
    assert reader.open == []
    return reader


def render(*stories):
    report = build_report([subject(story) for story in stories], version="0.1.0")
    return render_report(report)


def test_the_page_is_well_formed_and_its_links_lead_somewhere():
    page = read(render(Story(name="a"), Story(name="b", faster=False)))
    assert len(page.ids) == len(set(page.ids))
    assert page.links
    assert {link.removeprefix("#") for link in page.links} <= set(page.ids)


def test_the_policy_allows_the_pages_own_scripts_and_style_and_nothing_else():
    page = read(render(Story()))
    rules = dict(rule.strip().split(" ", 1) for rule in page.policy.split(";"))
    assert rules["default-src"] == "'none'"
    for texts, rule in ((page.scripts, "script-src"), (page.styles, "style-src")):
        digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts]
        assert rules[rule].split() == [f"'sha256-{digest}'" for digest in digests]


@pytest.mark.parametrize("text", NASTY)
def test_what_a_model_is_called_is_only_ever_text(text):
    page = read(render(Story(name=text, outputs=(text,))))
    plain = read(render(Story(name="net", outputs=("y",))))
    assert page.tags == plain.tags
    assert page.handlers == []
    assert page.links == plain.links
    assert printable(text) in page.text


@pytest.mark.attack
def test_no_control_or_bidirectional_character_stays_in_a_page():
    template = make_environment().from_string("{{ text }}")
    assert template.render(text="\x1b[2J\u202e<b>") == "\ufffd[2J\ufffd&lt;b&gt;"
    breakable = make_environment().from_string("{{ text|breakable }}")
    assert breakable.render(text="\x1b_\u202e<b>") == "\ufffd_<wbr>\ufffd&lt;b&gt;"
