"""The site of the documentation: built strictly, every link leads somewhere, nothing comes from elsewhere."""

import functools
import http.server
import os
import subprocess
import sys
import threading
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from tests.report.conftest import browser

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[1]


class _Document(HTMLParser):
    """What a page links to, loads, and can be linked to."""

    def __init__(self, path):
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.anchors: set[str] = set()
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


def test_every_page_loads_only_its_own_files(documents):
    loaded = {(path, url) for path, document in documents.items() for url in document.loaded}
    assert len(loaded) > 30
    assert [url for path, url in loaded if not (path.parent / urlsplit(url).path).is_file()] == []


@pytest.mark.parametrize(
    "name", ["runtime.load", "runtime.SessionPool", "prepare", "session", "errors.PipelineError"]
)
def test_the_reference_has_what_jobs_import(documents, name):
    anchors = next(one.anchors for path, one in documents.items() if path.name == "api_classes.html")
    assert f"ortprep.{name}" in anchors


class _QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format, *arguments):
        """Says nothing."""


@pytest.fixture
def address(site):
    handler = functools.partial(_QuietHandler, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def test_the_search_finds_a_page_and_asks_nobody_else(address):
    with browser() as page:
        page.requests()
        page.driver.get(address)
        page.ask(
            "const box = document.querySelector('input.md-search__input');"
            "document.querySelector('#__search').checked = true; box.focus(); box.value = 'requirements.txt';"
            "box.dispatchEvent(new Event('focus'));"
            "box.dispatchEvent(new KeyboardEvent('keyup', {bubbles: true}));"
        )
        page.wait_for("document.querySelector('.md-search-result__link') !== null")
        results = [one.get_attribute("href") or "" for one in page.find_all(".md-search-result__link")]
        assert any("install.html" in link for link in results)
        assert {url for url in page.requests() if not url.startswith((address, "data:", "blob:"))} == set()
