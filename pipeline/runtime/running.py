"""A session's first run; that it fails is the model's or the input's fault, and is said so."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeVar

from pipeline.errors import LoadError
from pipeline.runtime.loading.session import onnxruntime_errors

if TYPE_CHECKING:
    from pipeline.runtime.element_types import Array

T = TypeVar("T")


def run_first(run: Callable[[], T], feeds: Mapping[str, Array], model: str) -> T:
    """Returns what a run returns.

    Args:
        run: Runs a session.
        feeds: Its inputs.
        model: What the session was made of, for the error.

    Raises:
        LoadError: ONNX Runtime refused the run.
    """
    try:
        return run()
    except onnxruntime_errors() as error:
        shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in feeds.items())
        raise LoadError(
            f"cannot run {model}\n  with {shapes}: {type(error).__name__}: {error}",
            hint="give the shapes that it takes: inputs: in the spec, or --shape NAME=1,3,224,224",
        ) from error
