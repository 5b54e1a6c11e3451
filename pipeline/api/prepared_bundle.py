"""A prepared bundle in Python: load it, read its manifest, show it in a notebook."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ortprep.bundle.manifest import MANIFEST_FILE, Manifest, read_manifest
from ortprep.errors import MissingExtraError
from ortprep.spec.models import ModelSpec
from ortprep.spec.python_spec import write_spec

if TYPE_CHECKING:
    import onnxruntime


@dataclass(frozen=True)
class PreparedBundle:
    """A bundle that is up to date.

    It can be used wherever a path is accepted, as in `SessionPool(bundle)`.

    Attributes:
        folder: The bundle's folder.
        spec: What it was prepared from.
    """

    folder: Path
    spec: ModelSpec = field(repr=False)

    def __fspath__(self) -> str:
        return os.fspath(self.folder)

    @property
    def name(self) -> str:
        """Name of the model."""
        return self.spec.name

    @property
    def manifest(self) -> Manifest:
        """The bundle's record: source, environment, files, and per variant all figures and trials.

        Raises `BundleError` if the bundle was removed or changed.
        """
        return read_manifest(self.folder)

    def load(self, **options: Any) -> onnxruntime.InferenceSession:
        """Returns a session of the bundle; options and errors are those of `ortprep.runtime.load`."""
        from ortprep.runtime import load

        return load(self.folder, **options)

    def report(self, out: str | os.PathLike[str] | None = None) -> Path:
        """Writes the HTML report of this bundle, unless it is up to date, and returns its path.

        Args:
            out: The file; by default `report-NAME.html` beside the bundle.

        Raises:
            MissingExtraError: The packages of the extra `report` are not installed.
            BundleError: The bundle was removed or changed.
        """
        from ortprep.graph.report_file import is_report_current, write_report

        path = self.folder.parent / f"report-{self.name}.html" if out is None else Path(out)
        manifests = (self.folder / MANIFEST_FILE,)
        if not is_report_current(manifests, path):
            write_report(manifests, path)
        return path

    def write_spec(self, path: str | os.PathLike[str]) -> Path:
        """Writes the spec as YAML, so that the command line finds this bundle up to date; returns the path.

        Args:
            path: The file, such as `configs/net.yaml`; an existing one is replaced.
        """
        place = Path(path)
        write_spec(self.spec, place)
        return place

    def _repr_html_(self) -> str | None:
        """Shows the bundle in a notebook: its figures as a table and a picture."""
        from ortprep.report.notebook_view import render_summary

        try:
            return render_summary(self.manifest)
        except MissingExtraError:
            return None  # the notebook shows the text form
