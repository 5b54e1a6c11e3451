"""A session that is exchanged for a better one while it is in use."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from pipeline.errors import PipelineError
from pipeline.runtime.stand_in import StandIn

if TYPE_CHECKING:
    import onnxruntime

    from pipeline.runtime.succession import Phase, Succession


class ProgressiveSession(StandIn):
    """What jobs use of an `onnxruntime.InferenceSession`, on a first session and then on a steady one.

    It may be used from many threads. A run ends on the session that it began on, and a session is freed as
    soon as its last run has ended. What is not offered: `run_async`, which calls back on a thread of the
    session's own, from where no session can be freed (use an executor), and whatever changes a session.

    Args:
        succession: The sessions. It is closed when nobody holds this any more.
    """

    def __init__(self, succession: Succession[Any]) -> None:
        self._succession = succession
        # The building thread holds the succession and not this, so that this can be collected meanwhile.
        weakref.finalize(self, succession.abandon).atexit = False

    @property
    def phase(self) -> Phase:
        """`first`; `steady`; or `failed`: no steady session could be made, the first stays in service."""
        return self._succession.phase

    @property
    def error(self) -> PipelineError | None:
        """Why the steady session could not be made, else None."""
        return self._succession.error

    def wait_steady(self, timeout_s: float | None = None) -> None:
        """Waits until the steady session is in service, and has it made if no run did yet.

        Args:
            timeout_s: Seconds to wait at most; None waits as long as it takes.

        Raises:
            LoadTimeoutError: The time passed; the steady session is still being made.
            PipelineError: It could not be made, or this was closed (`LoadError`).
        """
        self._succession.wait(timeout_s)

    def close(self) -> None:
        """Takes the session out of service: running calls finish, later ones raise `LoadError`.

        A steady session that is being made is cancelled; this waits until ONNX Runtime has noticed.
        """
        self._succession.close()

    def __enter__(self) -> ProgressiveSession:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def run(
        self, output_names: Sequence[str] | None, input_feed: Mapping[str, Any], run_options: Any = None
    ) -> Any:
        """Runs as `InferenceSession.run` does.

        Raises:
            LoadError: This was closed.
        """
        outputs = self._current().run(output_names, input_feed, run_options)
        self._succession.start()
        return outputs

    def run_with_ort_values(
        self,
        output_names: Sequence[str] | None,
        input_dict_ort_values: Mapping[str, Any],
        run_options: Any = None,
    ) -> Any:
        """Runs as `InferenceSession.run_with_ort_values` does.

        Raises:
            LoadError: This was closed.
        """
        session = self._current()
        outputs = session.run_with_ort_values(output_names, input_dict_ort_values, run_options)
        self._succession.start()
        return outputs

    def run_with_iobinding(self, iobinding: onnxruntime.IOBinding, run_options: Any = None) -> None:
        """Runs as `InferenceSession.run_with_iobinding` does, on the session that the binding was made from.

        Raises:
            LoadError: This was closed, or the binding is not of `io_binding`.
        """
        super().run_with_iobinding(iobinding, run_options)
        self._succession.start()

    def _current(self) -> onnxruntime.InferenceSession:
        session: onnxruntime.InferenceSession = self._succession.current()
        return session
