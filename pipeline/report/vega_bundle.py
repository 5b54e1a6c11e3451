"""The JavaScript that draws the charts: Vega, Vega-Lite and vega-embed, as vl-convert-python ships them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ortprep.errors import MissingExtraError
from ortprep.runtime.probing.child import run_child
from ortprep.versions import install_command

_TIMEOUT_S = 120


def bundle_vega(request: Mapping[str, Any]) -> dict[str, Any]:  # noqa: ARG001 - child functions take one
    """Child function: returns the library as one script.

    Raises:
        MissingExtraError: vl-convert-python is not installed.
    """
    try:
        import vl_convert
    except ImportError as error:
        raise MissingExtraError(
            "charts need vl-convert-python, which is not installed", hint=install_command("report")
        ) from error
    script = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")
    # A script element ends at the first `</script`, wherever in a text that is.
    return {"script": script.replace("</script", "<\\/script").replace("<!--", "<\\!--")}


def read_vega() -> str:
    """Returns the library as one script, made by a child: the engine that makes it would stay in memory."""
    reply = run_child(f"{__name__}:bundle_vega", {}, timeout_s=_TIMEOUT_S)
    return str(reply.value["script"])
