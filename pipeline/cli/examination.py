"""What a user names a model by, as something the doctor can examine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.bundle.manifest import MANIFEST_FILE
from pipeline.cli.console import BuildObserver, say
from pipeline.diagnose.sampling import examine_bundle, examine_source
from pipeline.diagnose.subject import Subject
from pipeline.errors import SpecError
from pipeline.measuring.device_lock import working


@dataclass(frozen=True)
class Locations:
    """Where things are.

    Attributes:
        folder: For inputs that are made; gone after the examination.
        configs: Folder of specs.
        artifacts: Folder of bundles.
    """

    folder: Path
    configs: Path
    artifacts: Path


def examine_all(
    names: Sequence[str], locations: Locations, *, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[Subject, ...]:
    """Returns the models that a user names: by an ONNX file, a bundle's folder, or a spec.

    Args:
        names: What the user wrote.
        locations: Where things are.
        shapes: By input, for ONNX files.

    Raises:
        SpecError: There is no such model, or shapes are given for what has its own.
        PipelineError: It cannot be read.
    """
    subjects = []
    for number, name in enumerate(names):
        own = locations.folder / str(number)
        own.mkdir()
        subject = _examine(name, Locations(own, locations.configs, locations.artifacts), shapes)
        for remark in subject.remarks:
            say(f"{subject.name}: {remark}")
        subjects.append(subject)
    return tuple(subjects)


def _examine(name: str, locations: Locations, shapes: Mapping[str, tuple[int, ...]]) -> Subject:
    path, bundle = Path(name), locations.artifacts / name
    if path.is_file() and path.name != MANIFEST_FILE:
        with working():
            return examine_source(path, locations.folder, shapes=shapes)
    if shapes:
        raise SpecError(f"--shape is for ONNX files\n  expected one, got {name}, which has shapes of its own")
    found = next((one for one in (path, bundle) if (one / MANIFEST_FILE).is_file()), None)
    if found is not None and not (found == bundle and _is_spec(name, locations.configs)):
        with working():
            return examine_bundle(found, locations.folder)
    spec = locations.configs / f"{name}.yaml"
    if not _is_spec(name, locations.configs):
        raise SpecError(
            f"no such model: {name}\n  expected an ONNX file, a bundle's folder, or a spec {spec}, got none",
            hint="ortprep doctor --help",
        )
    # Imported here: who examines a file or a bundle need not have what builds need.
    from pipeline.graph.examination import examine_spec

    return examine_spec(
        name,
        locations.folder,
        configs=locations.configs,
        artifacts=locations.artifacts,
        observer=BuildObserver(),
    )


def _is_spec(name: str, configs: Path) -> bool:
    return any((configs / f"{name}{suffix}").is_file() for suffix in (".yaml", ".yml"))
