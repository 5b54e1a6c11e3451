"""What a report is about: one version of one model, and how it came about."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.bundle.loader_config import LoaderConfig
from pipeline.bundle.manifest import Manifest


@dataclass(frozen=True)
class Built:
    """When a task of the build was last run, and why.

    Attributes:
        task: `STAGE` or `STAGE/VARIANT`.
        finished_at: ISO 8601, UTC.
        elapsed_s: How long it took.
        reasons: Why it was run; none where that was not recorded.
    """

    task: str
    finished_at: str
    elapsed_s: float
    reasons: tuple[str, ...]


@dataclass(frozen=True)
class Subject:
    """One version of one model.

    Attributes:
        manifest: Its record.
        loader: What jobs load, None where only the manifest is at hand.
        history: The tasks it is from, where the build's folder is at hand.
    """

    manifest: Manifest
    loader: LoaderConfig | None = None
    history: tuple[Built, ...] = ()
