"""An allow-list of URL schemes, for sources, registries and work stores. Pure."""

from __future__ import annotations

import re

OBJECT_STORES = frozenset({"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oss"})
"""Stores where an object appears whole or not at all."""

STORES = OBJECT_STORES | {"file", "hf", "memory"}
"""Schemes of registries and work stores; "memory" is this process's own, for tests.

Web servers are none: fsspec unpacks their answers, lists their pages without end and waits without a limit.
"""

SCHEMES = STORES - {"file"} | {"http", "https"}
"""Schemes of plain files and objects, for sources; a file of this machine is given by its path."""

_IPV6_HOST = re.compile(r"://\[[0-9A-Fa-f:.]*\]")


def check_url(url: str, schemes: frozenset[str] = SCHEMES) -> None:
    """Refuses URLs with which fsspec does more than read and write files.

    fsspec also has filesystems that wrap others (`reference`, `filecache`, `zip`, …), log in to hosts or read
    other programs' data. `::` chains them. Before fsspec 2026.6 a `reference::` URL ran code of its file.

    Raises:
        ValueError: The scheme is not one of `schemes`, or the URL is chained.
    """
    scheme, separator, _ = url.partition("://")
    if not separator or scheme.lower() not in schemes or "::" in _IPV6_HOST.sub("://", url, count=1):
        allowed = ", ".join(f"{name}://" for name in sorted(schemes))
        raise ValueError(f"expected a URL that begins with one of {allowed}, and has no '::'")
