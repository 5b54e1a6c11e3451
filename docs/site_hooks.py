"""What mkdocs.yml cannot say: pages link to `bench/results` and `examples`, which lie beside `docs/`."""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

_ROOT = Path(__file__).resolve().parent.parent
_ADDED = {"results": _ROOT / "bench" / "results", "examples": _ROOT / "examples"}
_SUFFIXES = ("", ".json", ".md", ".py", ".sh", ".yaml")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the raw figures and the examples to the site."""
    for name, folder in _ADDED.items():
        for path in sorted(one for one in folder.rglob("*") if one.is_file() and one.suffix in _SUFFIXES):
            if path.name == "page.md":  # the page is in docs/recipes
                continue
            place = f"{name}/{path.relative_to(folder).as_posix()}"
            files.append(File.generated(config, place, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001
    """Leads links to where the site has those files, and from there back to the pages."""
    if page.file.src_uri.startswith("examples/"):
        return markdown.replace("](../docs/", "](../")
    return re.sub(r"\]\(((?:\.\./)*)\.\./(?:bench/(results)|(examples))/", r"](\1\2\3/", markdown)
