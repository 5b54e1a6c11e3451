"""The JavaScript that draws the charts: Vega, Vega-Lite and vega-embed, as vl-convert-python ships them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from pipeline.errors import MissingExtraError
from pipeline.runtime.child import run_child

_TIMEOUT_S = 120


def bundle_library(request: Mapping[str, Any]) -> dict[str, Any]:  # noqa: ARG001 - child functions take one
    """Returns the library as one script; takes a second or two, of one processor.

    Raises:
        MissingExtraError: vl-convert-python is not installed.
    """
    try:
        import vl_convert
    except ImportError as error:
        raise MissingExtraError(
            "charts need vl-convert-python, which is not installed", hint="pip install 'ortprep[report]'"
        ) from error
    script = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")
    # A script element ends at the first `</script`, wherever in a text that is.
    return {"script": script.replace("</script", "<\\/script").replace("<!--", "<\\!--")}


@contextmanager
def bundled_library() -> Iterator[Future[str]]:
    """Yields the script to come: a child makes it while the caller does something else.

    The library holds the interpreter's lock for as long as it takes, so a thread alone would not do.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="ortprep-report") as pool:
        yield pool.submit(_bundle)


def _bundle() -> str:
    reply = run_child(f"{__name__}:bundle_library", {}, timeout_s=_TIMEOUT_S)
    return str(reply.value["script"])
