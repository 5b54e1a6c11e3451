"""What mkdocs.yml cannot say: pages link to raw figures and examples, which lie beside `docs/`."""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

_ROOT = Path(__file__).resolve().parent.parent
_LINK = re.compile(r"\]\(\.\./((?:bench/results|examples)/[^)#]+)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the files beside `docs/` that its pages link to, in a folder `files/` of the site."""
    pages = [page.content_string for page in files.documentation_pages()]
    for name in sorted({name for text in pages for name in _LINK.findall(text)}):
        if (_ROOT / name).is_file():
            files.append(File.generated(config, f"files/{name}", abs_src_path=str(_ROOT / name)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001
    """Leads links to where the site has those files."""
    return _LINK.sub(r"](files/\1", markdown)
