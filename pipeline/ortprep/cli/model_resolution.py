"""Resolves the name that a user gives a model to a model that the doctor can examine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ortprep.bundle.manifest import MANIFEST_FILE
from ortprep.bundle.onnx_inputs import read_inputs
from ortprep.bundle.onnx_wire import WireError
from ortprep.cli.command import locate_bundle
from ortprep.cli.console import echo
from ortprep.cli.progress import BuildObserver
from ortprep.doctor.doctor_model import DoctorModel
from ortprep.doctor.sampling import examine_bundle, examine_source
from ortprep.errors import SpecError
from ortprep.measuring.device_lock import working


@dataclass(frozen=True)
class Locations:
    """Folders to look for models in; `folder` takes generated inputs, and is temporary."""

    folder: Path
    configs: Path
    artifacts: Path


def examine_all(
    names: Sequence[str], locations: Locations, *, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[DoctorModel, ...]:
    """Returns the models that a user names: by an ONNX file, a bundle's folder, or a spec.

    Raises:
        SpecError: There is no such model, or shapes are given for what has its own.
        PipelineError: It cannot be read.
    """
    subjects = []
    inputs_of_models = {name: _inputs_of(Path(name)) for name in names}
    for input_name in shapes:
        if not any(inputs is None or input_name in inputs for inputs in inputs_of_models.values()):
            listed = ", ".join(
                sorted({input_name for inputs in inputs_of_models.values() for input_name in inputs or ()})
            )
            raise SpecError(f"no such input: {input_name!r}\n  expected one of {listed or 'an ONNX file'}")
    for number, name in enumerate(names):
        folder = locations.folder / str(number)
        folder.mkdir()
        inputs = inputs_of_models[name]
        fitting = {
            input_name: shape
            for input_name, shape in shapes.items()
            if inputs is None or input_name in inputs
        }
        subject = _examine(name, Locations(folder, locations.configs, locations.artifacts), fitting)
        for remark in subject.remarks:
            echo(f"{subject.name}: {remark}")
        subjects.append(subject)
    return tuple(subjects)


def _examine(name: str, locations: Locations, shapes: Mapping[str, tuple[int, ...]]) -> DoctorModel:
    """Returns a model by its name; raises as `examine_all`."""
    path, bundle = Path(name), locations.artifacts / name
    if path.is_file() and path.name != MANIFEST_FILE:
        with working():
            return examine_source(path, locations.folder, shapes=shapes)
    located = locate_bundle(name, locations.artifacts)
    if located is not None and not (located == bundle and _is_spec(name, locations.configs)):
        with working():
            return examine_bundle(located, locations.folder)
    spec = locations.configs / f"{name}.yaml"
    if not _is_spec(name, locations.configs):
        raise SpecError(
            f"no such model: {name}\n  expected an ONNX file, a bundle's folder, or a spec {spec}, got none",
            hint="ortprep doctor --help",
        )
    return _examine_spec(name, locations)


def _examine_spec(name: str, locations: Locations) -> DoctorModel:
    """Returns the source of a spec, which is fetched if need be, as a model to examine."""
    # Imported here: who examines a file or a bundle need not have what builds need.
    from ortprep.build.queries import examine_spec

    return examine_spec(
        name,
        locations.folder,
        configs=locations.configs,
        artifacts=locations.artifacts,
        observer=BuildObserver(),
    )


def _inputs_of(path: Path) -> frozenset[str] | None:
    """Returns the names of an ONNX file's inputs, none for no file, None if only a session can tell."""
    if not path.is_file() or path.name == MANIFEST_FILE:
        return frozenset()
    try:
        return frozenset(tensor.name for tensor in read_inputs(path))
    except (WireError, OSError):
        return None


def _is_spec(name: str, configs: Path) -> bool:
    return any((configs / f"{name}{suffix}").is_file() for suffix in (".yaml", ".yml"))
