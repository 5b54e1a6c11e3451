"""From bundles on disk to a page: what is found, what it costs, and that nothing told in it can break it."""

from __future__ import annotations

import base64
import hashlib
import itertools
import re
import shutil
from html.parser import HTMLParser

import pytest

from ortprep.build.execution import run_task
from ortprep.build.report_file import build_history_table, list_manifests, read_subjects, write_report
from ortprep.bundle.digest import DigestCache
from ortprep.errors import BundleError, IntegrityError
from ortprep.quoting import printable
from ortprep.report.html_page import make_environment, render_report
from ortprep.report.report_builder import build_report
from tests.build.fakes import Count, Shout, tasks
from tests.prepare.builders import Project
from tests.report.builders import Story, subject, write_bundles

MAX_BYTES = 5_000_000


@pytest.fixture
def project(tmp_path):
    return Project(tmp_path)


@pytest.mark.slow
def test_the_report_of_fifty_models_with_forty_trials_each_stays_under_five_megabytes(tmp_path):
    stories = [Story(name=f"model-{index:02d}", trials=40, seed=index) for index in range(50)]
    size_bytes = write_report(write_bundles(tmp_path, stories), tmp_path / "report.html")
    assert size_bytes == (tmp_path / "report.html").stat().st_size
    assert size_bytes < MAX_BYTES


def test_every_bundle_of_a_folder_is_listed(tmp_path):
    written = write_bundles(tmp_path, [Story(name="a"), Story(name="b")])
    (tmp_path / ".work").mkdir()
    assert list_manifests(tmp_path) == tuple(written)
    with pytest.raises(BundleError, match="no bundle in"):
        list_manifests(tmp_path / "a")


def test_a_manifest_by_itself_is_a_subject_without_a_loader_config(tmp_path):
    (manifest,) = write_bundles(tmp_path, [Story(name="a")])
    older = shutil.copy(manifest, tmp_path / "older.json")
    subjects = read_subjects((manifest, older))
    assert [one.manifest.name for one in subjects] == ["a", "a"]
    assert [one.loader is not None for one in subjects] == [True, False]


def test_a_changed_manifest_is_refused_and_the_old_report_stays(tmp_path):
    (manifest,) = write_bundles(tmp_path, [Story()])
    out = tmp_path / "report.html"
    out.write_text("old")
    manifest.write_text(manifest.read_text().replace('"plan": "default"', '"plan": "defect"'))
    with pytest.raises(IntegrityError):
        write_report([manifest], out)
    assert out.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".tmp")] == []


# -- what was rebuilt, and why


def test_a_receipt_says_why_its_task_was_run(tmp_path):
    def build(shout):
        for task in tasks(tmp_path, shout, Count()):
            run_task(task, cache=DigestCache(), say=lambda _: None)
        return {str(row[0]): str(row[3]) for row in build_history_table(tmp_path / "m").rows}

    assert build(Shout("hello")) == {"shout": "never done", "count/cpu": "never done"}
    assert build(Shout("hello")) == {"shout": "never done", "count/cpu": "never done"}, "nothing was run"
    changed = build(Shout("goodbye"))
    assert changed["shout"] == "word: was hello, is goodbye"
    assert "upstream.shout.result: was " in changed["count/cpu"]


# -- the command, and the task


def test_the_command_writes_one_file_and_says_where(project):
    write_bundles(project.artifacts, [Story(name="a"), Story(name="b")])
    outcome = project.call("report")
    assert outcome.code == 0, outcome.err
    assert outcome.out == "artifacts/report.html\n"
    assert "2 bundles, " in outcome.err
    twice = ("b", "artifacts/b", "artifacts/b/manifest.json")
    named = project.call("report", *twice, "--out", "elsewhere/b.html")
    assert (named.code, named.out) == (0, "elsewhere/b.html\n")
    assert "<title>b: prepared by ortprep</title>" in (project.root / "elsewhere/b.html").read_text()


def test_the_command_says_what_it_could_not_find(project):
    outcome = project.call("report", "nothing")
    assert outcome.code != 0
    assert "no such bundle: nothing" in outcome.err
    assert "hint: ortprep prepare nothing" in outcome.err


def test_a_version_in_a_registry_is_pulled_before_it_is_reported_on(project):
    outcome = project.call("report", "net@1.0")
    assert outcome.code != 0
    assert "got a version in a registry" in outcome.err
    assert "hint: ortprep pull" in outcome.err


WITHOUT = """\
import sys
for module in {modules!r}:
    sys.modules[module] = None  # importing it fails as where it is not installed
sys.argv = ["ortprep", "report"]
from ortprep.__main__ import main
from ortprep.versions import install_command
main()
"""


def test_a_report_needs_nothing_of_the_build(project):
    write_bundles(project.artifacts, [Story()])
    modules = ("onnx", "onnxruntime", "doit", "yaml", "fsspec", "filelock")
    outcome = project.python("-c", WITHOUT.format(modules=modules))
    assert outcome.code == 0, outcome.err


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
    levels = [int(tag[1]) for tag in page.tags if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1
    assert all(below <= above + 1 for above, below in itertools.pairwise(levels)), "no level is skipped"
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
