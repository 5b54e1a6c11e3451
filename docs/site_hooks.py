"""What mkdocs.yml cannot say: pages link to raw figures in `bench/results`, which lies beside `docs/`."""

from __future__ import annotations

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

_RESULTS = Path(__file__).resolve().parent.parent / "bench" / "results"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the raw figures to the site."""
    for path in sorted(_RESULTS.glob("*.json")):
        files.append(File.generated(config, f"results/{path.name}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001
    """Leads links to where the site has those figures."""
    return markdown.replace("](../bench/results/", "](results/")
