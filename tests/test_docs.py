"""Documentation that can be checked is checked, and its site is built."""

import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import jsonschema
import pytest
import yaml

from docs.option_page import PAGE, build_page
from docs.schemas import build_schemas, format_schema
from ortprep.bundle.codec import encode
from tests.registry.builders import write_bundle

ROOT = Path(__file__).resolve().parent.parent
SCHEMAS = build_schemas()


def faults_of(content, schema):
    validator = jsonschema.Draft202012Validator(SCHEMAS[schema])
    return [error.message for error in validator.iter_errors(content)]


@pytest.mark.parametrize("name", sorted(SCHEMAS))
def test_the_schemas_in_docs_are_those_of_the_types(name):
    assert (ROOT / "docs" / name).read_text() == format_schema(SCHEMAS[name]), "run: python -m docs.schemas"


def test_the_page_of_options_is_that_of_the_table():
    assert PAGE.read_text(encoding="utf-8") == build_page(), "run: python -m docs.option_page"


@pytest.mark.parametrize("name", ["loader", "manifest"])
def test_what_is_written_fits_its_schema(tmp_path, name):
    bundle = write_bundle(tmp_path / "m")
    assert faults_of(json.loads((bundle / f"{name}.json").read_text()), f"{name}.schema.json") == []


SPECS = sorted(
    path
    for pattern in ("*/configs/*.yaml", "hub/*.yaml")
    for path in (ROOT / "examples").glob(pattern)
    if path.stem != "defaults"
)


@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.stem)
def test_the_specs_of_examples_fit_their_schema(path):
    assert faults_of(encode(yaml.safe_load(path.read_text())), "spec.schema.json") == []


def test_every_rule_of_the_format_is_in_the_name_of_a_test_and_no_test_names_another():
    rules = re.findall(r"^- \*\*F(\d+)\*\*", (ROOT / "docs/format.md").read_text(), re.MULTILINE)
    tests = [path.read_text() for path in (ROOT / "tests").rglob("test_*.py")]
    tested = {number for text in tests for number in re.findall(r"^def test_f(\d+)_", text, re.MULTILINE)}
    assert len(set(rules)) == len(rules)
    assert set(rules) == tested


def test_links_in_the_documentation_lead_somewhere():
    broken = [
        f"{page.relative_to(ROOT)}: {target}"
        for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("*/README.md")]
        for target in _links(page.read_text())
        if not (page.parent / target).exists()
    ]
    assert broken == []


def _links(text):
    parts = [part.partition(")")[0] for part in text.split("](")[1:]]
    return [part.partition("#")[0] for part in parts if part.partition("#")[0] and "://" not in part]


# -- the site of the documentation: built strictly, every link leads somewhere, nothing comes from elsewhere


class _Document(HTMLParser):
    """What a page links to, loads, and can be linked to."""

    def __init__(self, path):
        super().__init__()
        self.links = []
        self.loaded = []
        self.anchors = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        found = {name: value or "" for name, value in attrs}
        self.anchors.update(value for name, value in attrs if name in ("id", "name") and value)
        if "src" in found or (tag == "link" and "stylesheet" in found.get("rel", "")):
            self.loaded.append(found.get("src") or found["href"])
        elif "href" in found:
            self.links.append(found["href"])


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def documents(site):
    return {path: _Document(path) for path in site.rglob("*.html") if path.name != "404.html"}


@pytest.mark.slow
def test_every_link_leads_to_a_page_and_a_place_in_it(documents):
    assert len(documents) > 30
    broken = []
    for path, document in documents.items():
        for link in document.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            there = documents.get(target)
            anchor = unquote(parts.fragment)
            if not target.is_file() or (anchor and there and anchor not in there.anchors | {"__skip"}):
                broken.append(f"{path.name}: {link}")
    assert broken == []


@pytest.mark.slow
def test_every_page_loads_only_its_own_files(documents):
    loaded = {(path, url) for path, document in documents.items() for url in document.loaded}
    assert len(loaded) > 30
    assert [url for path, url in loaded if not (path.parent / urlsplit(url).path).is_file()] == []
