"""What an engine is: it takes what the user ordered and has every stage run, here or elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from pipeline.errors import PipelineError
from pipeline.graph.observer import Observer


@dataclass(frozen=True)
class Order:
    """What is to be prepared.

    Attributes:
        configs: Folder of `NAME.yaml` files and `defaults.yaml`.
        artifacts: Folder that bundles are written to.
        names: Models; all of them if empty.
        only: This target alone.
        skip_unavailable: Prepare the rest where a target cannot be had.
        jobs: How many tasks may run at once where the engine runs them itself.
    """

    configs: Path
    artifacts: Path
    names: tuple[str, ...] = ()
    only: str | None = None
    skip_unavailable: bool = False
    jobs: int = 1


@dataclass(frozen=True)
class Outcome:
    """What came of an order.

    Attributes:
        done: Whether everything is there now.
        errors: Of the tasks that failed.
    """

    done: bool
    errors: tuple[PipelineError, ...]


class Engine(Protocol):
    """Runs the stages of `graph.build.STAGES`; where and in which order is its own affair."""

    def prepare(self, order: Order, observer: Observer) -> Outcome:
        """Builds what is not up to date; when a model fails, the others go on.

        Raises:
            SpecError: A spec is wrong, or a target cannot be had; nothing was begun.
            PipelineError: The engine itself cannot work.
        """
        ...
