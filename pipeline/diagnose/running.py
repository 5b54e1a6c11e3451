"""Running a session under examination; its failures are the model's or the input's, and say so."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from pipeline.errors import LoadError

if TYPE_CHECKING:
    import onnxruntime

    from pipeline.runtime.element_types import Array


def run_once(session: onnxruntime.InferenceSession, feeds: Mapping[str, Array], model: str) -> None:
    """Runs a session.

    Raises:
        LoadError: The run failed.
    """
    from pipeline.runtime.session import onnxruntime_errors
    from pipeline.runtime.tensors import run_session

    try:
        run_session(session, feeds)
    except onnxruntime_errors() as error:
        shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in feeds.items())
        raise LoadError(
            f"cannot run {model}\n  with {shapes}: {type(error).__name__}: {error}",
            hint="ortprep doctor … --shape 'INPUT=1,3,224,224'",
        ) from error
