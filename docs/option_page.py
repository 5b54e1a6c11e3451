"""Writes the page of ONNX Runtime's options from their table: `python -m docs.option_page`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ortprep.options import CUDA, NEWEST, OLDEST, Option, known_options

PAGE = Path(__file__).with_name("options.md")

_HEAD = f"""\
# Options of ONNX Runtime

For authors of [specs](spec.md) who set `runtime`: the options that ONNX Runtime {OLDEST} to {NEWEST} knows,
and the values that a spec may give them. [On a GPU](gpu.md) says what has been tested on one.
`python -m docs.option_page` writes this page from `pipeline/ortprep/options/options.tsv`.
"""

_SECTIONS = {
    "`runtime`: attributes of `onnxruntime.SessionOptions`": known_options("attribute", NEWEST),
    "`runtime.session_config`: session config entries": known_options("session", NEWEST),
    f"`runtime.cuda`: options of `{CUDA}`": known_options(CUDA, NEWEST),
}


def build_page() -> str:
    """Returns the text of the page."""
    sections = (
        "\n".join(("", f"## {heading}", "", *_build_table(options), ""))
        for heading, options in _SECTIONS.items()
    )
    return _HEAD + "".join(sections)


def _build_table(options: tuple[Option, ...]) -> Iterator[str]:
    yield "| option | since | values | default | effect |"
    yield "|---|---|---|---|---|"
    for option in options:
        since = f"{option.since} or earlier" if option.since == OLDEST else option.since
        owner = f"Not to be set: {option.owner}." if option.owner is not None else ""
        known = (option.expected, option.default) if option.effect else ("", "")  # else it is reserved
        cells = (f"`{option.name}`", since, *known, f"{option.effect} {owner}".strip())
        row = " | ".join(cell.replace("|", r"\|") for cell in cells)
        yield f"| {row} |"


if __name__ == "__main__":
    PAGE.write_text(build_page(), encoding="utf-8")
