"""Which ONNX Runtime lets other threads run while it makes a session, and how to get it. Pure."""

from __future__ import annotations

from pipeline.versions import parse_version

RELEASED_FROM = (1, 31)
"""The version from which it does (microsoft/onnxruntime #27063)."""


def releases_in_creation(version: str) -> bool:
    """Says whether a version does; one that cannot be read is taken for a new one."""
    return (parse_version(version) or RELEASED_FROM) >= RELEASED_FROM


def phrase_upgrade(wheel: str | None) -> str:
    """Returns the command that installs such a version over the one that is there.

    Another distribution than the installed one would own the same files and break both.

    Args:
        wheel: The installed distribution of ONNX Runtime; None where that is not clear.
    """
    if wheel is None:
        return "ortprep doctor env  (which distribution of ONNX Runtime is installed is not clear)"
    return f"pip install '{wheel}>={'.'.join(map(str, RELEASED_FROM))}'"
