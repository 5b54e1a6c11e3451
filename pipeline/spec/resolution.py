"""A spec as it is recorded: in keys that decide what is up to date, and in the manifest."""

from __future__ import annotations

from typing import Any

from pipeline.spec.models import ModelSpec
from pipeline.spec.redaction import redact_url


def resolved_spec(spec: ModelSpec) -> dict[str, Any]:
    """Returns everything a spec says that decides what is built, defaults written out, as JSON types.

    Equal specs give equal results whatever their files' order, comments or folder, so its digest can be part
    of a key. Secrets of the source's URL are redacted: it is published with the bundle.
    """
    # Where it is published makes no other bundle: the same model from two places is one version.
    data = spec.model_dump(mode="json", exclude={"publish"})
    if spec.source.url is not None:
        data["source"]["url"] = redact_url(spec.source.url)
    return data
