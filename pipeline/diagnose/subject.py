"""A model under examination."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pipeline.errors import LoadError
from pipeline.measuring.device_lock import CPU_DEVICE
from pipeline.runtime.session import CPU, CUDA, SessionPlan, default_plan


@dataclass(frozen=True)
class Subject:
    """A model under examination: a source, a bundle, or both.

    Attributes:
        name: For people.
        sample: `.npz` file with one array per input, by its name.
        source: Path of the ONNX model; None if there is only a bundle.
        bundle: Folder of what was prepared of it; None if it was not prepared.
        remarks: What was assumed, as sizes that the model leaves open.
    """

    name: str
    sample: str
    source: str | None = None
    bundle: str | None = None
    remarks: tuple[str, ...] = ()

    def require_source(self) -> str:
        """Returns the path of the source.

        Raises:
            LoadError: There is only a bundle.
        """
        if self.source is None:
            raise LoadError(
                f"no source model: {self.name}\n  expected the ONNX file it was prepared from, got a bundle",
                hint="ortprep doctor … model.onnx",
            )
        return self.source


def plan_on(
    model: str,
    device: str,
    *,
    level: str = "ORT_ENABLE_ALL",
    config_entries: Mapping[str, str] | None = None,
    provider_options: Mapping[str, str] | None = None,
) -> SessionPlan:
    """Returns the plan of plain ONNX Runtime on a device.

    Args:
        model: Path of the ONNX file.
        device: `cpu` or `cuda:<ordinal>`.
        level: Name of the graph optimisation level.
        config_entries: Session config entries.
        provider_options: Options of the CUDA provider; ignored on the CPU.
    """
    if device == CPU_DEVICE:
        return default_plan(model, CPU, level=level, config_entries=config_entries)
    options = {"device_id": device.removeprefix("cuda:"), **(provider_options or {})}
    return default_plan(model, CUDA, level=level, config_entries=config_entries, provider_options=options)
