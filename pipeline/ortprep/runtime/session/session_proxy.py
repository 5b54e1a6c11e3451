"""What every class answers that jobs use as if it were an `onnxruntime.InferenceSession`."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from ortprep.errors import LoadError

if TYPE_CHECKING:
    import onnxruntime

_OWNER = "_ortprep_session"


class TensorInfo(NamedTuple):
    """An input or output of a model, with the attributes of `onnxruntime.NodeArg`.

    ONNX Runtime's own keep their session alive, and with it the first session's memory.

    Attributes:
        type: Its type as ONNX Runtime writes it (`tensor(float)`).
        shape: One item per axis: a size, a symbolic name, or None.
    """

    name: str
    type: str
    shape: list[int | str | None]


class ModelInfo(NamedTuple):
    """The metadata of a model, with the attributes of `onnxruntime.ModelMetadata`, which are ONNX's."""

    producer_name: str
    graph_name: str
    domain: str
    description: str
    graph_description: str
    version: int
    custom_metadata_map: Mapping[str, str]


class SessionProxy(abc.ABC):
    """Answers for one session, or for one at a time, all that is neither a run nor changes a session.

    What is not offered: `run_async`, which calls back on a thread of the session's own, from where no session
    can be freed (use an executor), and whatever changes a session. Once it is closed, every method raises
    `LoadError`.
    """

    @abc.abstractmethod
    def _current(self) -> onnxruntime.InferenceSession:
        """Returns the session that is answered for."""

    @abc.abstractmethod
    def close(self) -> None:
        """Takes the session out of service: running calls finish, later ones raise `LoadError`."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def io_binding(self) -> onnxruntime.IOBinding:
        """Returns a binding of the session in service now; it keeps and runs that session for ever."""
        session = self._current()
        binding = session.io_binding()
        # ONNX Runtime before 1.31 lets a session go while a binding points into it.
        setattr(binding, _OWNER, session)
        return binding

    def run_with_iobinding(self, iobinding: onnxruntime.IOBinding, run_options: Any = None) -> None:
        """Runs as `InferenceSession.run_with_iobinding` does, on the session that the binding was made from.

        A binding that is not of `io_binding` is a `LoadError`.
        """
        self._current()
        owner = getattr(iobinding, _OWNER, None)
        if owner is None:
            raise LoadError(
                "binding of another session\n  expected one returned by this session's io_binding"
            )
        owner.run_with_iobinding(iobinding, run_options)

    def get_inputs(self) -> list[TensorInfo]:
        """Returns the model's inputs, in order."""
        return [_describe(node) for node in self._current().get_inputs()]

    def get_outputs(self) -> list[TensorInfo]:
        """Returns the model's outputs, in order."""
        return [_describe(node) for node in self._current().get_outputs()]

    def get_overridable_initializers(self) -> list[TensorInfo]:
        """Returns the model's weights that an input may replace."""
        return [_describe(node) for node in self._current().get_overridable_initializers()]

    def get_modelmeta(self) -> ModelInfo:
        """Returns the model's metadata."""
        meta = self._current().get_modelmeta()
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
        """Returns the execution providers of the session in service."""
        return list(self._current().get_providers())

    def get_provider_options(self) -> dict[str, dict[str, str]]:
        """Returns the options of the execution providers of the session in service."""
        return dict(self._current().get_provider_options())

    def get_session_options(self) -> onnxruntime.SessionOptions:
        """Returns the options of the session in service."""
        return self._current().get_session_options()


def _describe(node: Any) -> TensorInfo:
    return TensorInfo(node.name, node.type, list(node.shape))
