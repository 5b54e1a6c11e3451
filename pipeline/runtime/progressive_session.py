"""A session that is exchanged for a better one while it is in use."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

from pipeline.errors import LoadError, PipelineError

if TYPE_CHECKING:
    import onnxruntime

    from pipeline.runtime.succession import Phase, Succession

_OWNER = "_ortprep_session"


@dataclass(frozen=True)
class TensorInfo:
    """An input or output of a model, with the attributes of `onnxruntime.NodeArg`.

    ONNX Runtime's own keep their session alive, and with it the first session's memory.

    Attributes:
        name: Its name.
        type: Its type as ONNX Runtime writes it (`tensor(float)`).
        shape: One item per axis: a size, a symbolic name, or None.
    """

    name: str
    type: str
    shape: list[int | str | None]


@dataclass(frozen=True)
class ModelInfo:
    """What a model says of itself, with the attributes of `onnxruntime.ModelMetadata`, which are ONNX's."""

    producer_name: str
    graph_name: str
    domain: str
    description: str
    graph_description: str
    version: int
    custom_metadata_map: Mapping[str, str]


class ProgressiveSession:
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
        outputs = self._succession.current().run(output_names, input_feed, run_options)
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
        session = self._succession.current()
        outputs = session.run_with_ort_values(output_names, input_dict_ort_values, run_options)
        self._succession.start()
        return outputs

    def io_binding(self) -> onnxruntime.IOBinding:
        """Returns a binding of the session in service now; it keeps that session, and runs on it, for ever.

        Raises:
            LoadError: This was closed.
        """
        session = self._succession.current()
        binding = session.io_binding()
        # ONNX Runtime before 1.31 lets a session go while a binding points into it.
        setattr(binding, _OWNER, session)
        return binding

    def run_with_iobinding(self, iobinding: onnxruntime.IOBinding, run_options: Any = None) -> None:
        """Runs as `InferenceSession.run_with_iobinding` does, on the session that the binding was made from.

        Raises:
            LoadError: This was closed, or the binding is not of `io_binding`.
        """
        self._succession.current()
        owner = getattr(iobinding, _OWNER, None)
        if owner is None:
            raise LoadError(
                "binding of another session\n  expected one that this session's io_binding returned"
            )
        owner.run_with_iobinding(iobinding, run_options)
        self._succession.start()

    def get_inputs(self) -> list[TensorInfo]:
        """Returns the model's inputs, in order.

        Raises:
            LoadError: This was closed.
        """
        return [_describe(node) for node in self._succession.current().get_inputs()]

    def get_outputs(self) -> list[TensorInfo]:
        """Returns the model's outputs, in order.

        Raises:
            LoadError: This was closed.
        """
        return [_describe(node) for node in self._succession.current().get_outputs()]

    def get_overridable_initializers(self) -> list[TensorInfo]:
        """Returns the model's weights that an input may replace.

        Raises:
            LoadError: This was closed.
        """
        return [_describe(node) for node in self._succession.current().get_overridable_initializers()]

    def get_modelmeta(self) -> ModelInfo:
        """Returns what the model says of itself.

        Raises:
            LoadError: This was closed.
        """
        meta = self._succession.current().get_modelmeta()
        return ModelInfo(
            producer_name=meta.producer_name,
            graph_name=meta.graph_name,
            domain=meta.domain,
            description=meta.description,
            graph_description=meta.graph_description,
            version=meta.version,
            custom_metadata_map=dict(meta.custom_metadata_map),
        )

    def get_providers(self) -> list[str]:
        """Returns the execution providers of the session in service.

        Raises:
            LoadError: This was closed.
        """
        return list(self._succession.current().get_providers())

    def get_provider_options(self) -> dict[str, dict[str, str]]:
        """Returns the options of the execution providers of the session in service.

        Raises:
            LoadError: This was closed.
        """
        return dict(self._succession.current().get_provider_options())

    def get_session_options(self) -> onnxruntime.SessionOptions:
        """Returns the options of the session in service.

        Raises:
            LoadError: This was closed.
        """
        return self._succession.current().get_session_options()


def _describe(node: Any) -> TensorInfo:
    return TensorInfo(node.name, node.type, list(node.shape))
