"""A session that is exchanged for a better one while it is in use."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ortprep.errors import PipelineError
from ortprep.runtime.session.session_proxy import SessionProxy

if TYPE_CHECKING:
    import onnxruntime

    from ortprep.runtime.progressive.swapper import Phase, SessionSwapper


class ProgressiveSession(SessionProxy):
    """The methods of `onnxruntime.InferenceSession` that jobs use, on a first and then a steady session.

    It may be used from many threads. A run finishes on the session on which it started, and a session is
    freed when its last run ends. It does not offer methods that change a session, nor `run_async`, whose
    callback runs on a thread of the session, which cannot free sessions (use an executor).

    Args:
        swapper: The sessions. It is closed when nobody holds this any more.
    """

    def __init__(self, swapper: SessionSwapper[Any]) -> None:
        self._swapper = swapper
        # The building thread holds the swapper and not this, so that this can be collected meanwhile.
        weakref.finalize(self, swapper.abandon).atexit = False

    @property
    def phase(self) -> Phase:
        """`first`; `steady`; or `failed`: the steady session could not be created."""
        return self._swapper.phase

    @property
    def error(self) -> PipelineError | None:
        """Why the steady session could not be created, else None."""
        return self._swapper.error

    def wait_steady(self, timeout_s: float | None = None) -> None:
        """Waits until the steady session is in service, and starts creating it if that has not started.

        Args:
            timeout_s: Seconds to wait at most; None waits as long as it takes.

        Raises:
            LoadTimeoutError: The time passed; the steady session is still being created.
            PipelineError: It could not be created, or this was closed (`LoadError`).
        """
        self._swapper.wait(timeout_s)

    def close(self) -> None:
        """Takes the session out of service: running calls finish, later ones raise `LoadError`.

        The creation of a steady session is cancelled; this waits until ONNX Runtime has noticed.
        """
        self._swapper.close()

    def run(
        self, output_names: Sequence[str] | None, input_feed: Mapping[str, Any], run_options: Any = None
    ) -> Any:
        """Runs as `InferenceSession.run` does."""
        outputs = self._current().run(output_names, input_feed, run_options)
        self._swapper.start()
        return outputs

    def run_with_ort_values(
        self,
        output_names: Sequence[str] | None,
        input_dict_ort_values: Mapping[str, Any],
        run_options: Any = None,
    ) -> Any:
        """Runs as `InferenceSession.run_with_ort_values` does."""
        session = self._current()
        outputs = session.run_with_ort_values(output_names, input_dict_ort_values, run_options)
        self._swapper.start()
        return outputs

    def run_with_iobinding(self, iobinding: onnxruntime.IOBinding, run_options: Any = None) -> None:
        """Does what `SessionProxy.run_with_iobinding` does, and has the steady session made."""
        super().run_with_iobinding(iobinding, run_options)
        self._swapper.start()

    def _current(self) -> onnxruntime.InferenceSession:
        session: onnxruntime.InferenceSession = self._swapper.current()
        return session
