"""A spec as it is recorded: in keys that decide what is up to date, and in the manifest."""

from __future__ import annotations

from typing import Any

from pipeline.spec.models import ModelSpec
from pipeline.spec.redaction import redact_url


def resolved_spec(spec: ModelSpec) -> dict[str, Any]:
    """Returns everything a spec says, defaults written out, as JSON types.

    Equal specs give equal results whatever their files' order, comments or folder, so its digest can be part
    of a key. Secrets of the source's URL are redacted: it is published with the bundle.
    """
    data = spec.model_dump(mode="json")
    if spec.source.url is not None:
        data["source"]["url"] = redact_url(spec.source.url)
    return data
