"""What a user names a model by, as something the doctor can examine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pipeline.bundle.manifest import MANIFEST_FILE
from pipeline.cli.console import BuildObserver
from pipeline.diagnose.sampling import examine_bundle, examine_source
from pipeline.diagnose.subject import Subject
from pipeline.errors import SpecError


@dataclass(frozen=True)
class Place:
    """Where things are.

    Attributes:
        folder: For inputs that are made; gone after the examination.
        configs: Folder of specs.
        artifacts: Folder of bundles.
    """

    folder: Path
    configs: Path
    artifacts: Path


def examine(name: str, place: Place, *, shapes: Mapping[str, tuple[int, ...]]) -> Subject:
    """Returns the model that a user names: by an ONNX file, a bundle's folder, or a spec.

    Args:
        name: What the user wrote.
        place: Where things are.
        shapes: By input, for an ONNX file.

    Raises:
        SpecError: There is no such model.
        PipelineError: It cannot be read.
    """
    path, bundle = Path(name), place.artifacts / name
    if path.is_file():
        return examine_source(path, place.folder, shapes=shapes)
    if (path / MANIFEST_FILE).is_file():
        return examine_bundle(path, place.folder)
    if not _is_spec(name, place.configs):
        if (bundle / MANIFEST_FILE).is_file():
            return examine_bundle(bundle, place.folder)
        spec = place.configs / f"{name}.yaml"
        raise SpecError(
            f"no such model: {name}\n  expected an ONNX file, a bundle's folder, or a spec {spec}, got none",
            hint="ortprep doctor --help",
        )
    # Imported here: who examines a file or a bundle need not have what builds need.
    from pipeline.graph.examination import examine_spec

    observer = BuildObserver()
    return examine_spec(
        name, place.folder, configs=place.configs, artifacts=place.artifacts, observer=observer
    )


def _is_spec(name: str, configs: Path) -> bool:
    return any((configs / f"{name}{suffix}").is_file() for suffix in (".yaml", ".yml"))
