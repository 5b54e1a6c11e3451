"""Bundles of variants that are not packaged yet, so that a measurement includes `load` and its checks."""

from __future__ import annotations

from pathlib import Path

from ortprep.bundle import LOADER_FILE
from ortprep.bundle.codec import encode
from ortprep.bundle.digest import digest_bytes, digest_json
from ortprep.bundle.file_links import share_model
from ortprep.bundle.file_memory import Stamp, read_stamp
from ortprep.bundle.loader_config import (
    LOADER_SCHEMA_VERSION,
    FileEntry,
    Golden,
    LoaderConfig,
    Requirements,
    TensorSpec,
    Tolerance,
    Variant,
    VersionRange,
    write_loader_config,
)
from ortprep.bundle.session_record import SessionPlan
from ortprep.bundle.verification import describe_files
from ortprep.children.child import run_child
from ortprep.runtime.loading.session import CUDA

STAGED_VARIANT = _NAME = "staged"
"""The one variant of a staged bundle, and the bundle."""

_NO_GOLDEN = Golden(FileEntry("golden.npz", 0, digest_bytes(b"")), Tolerance(0.0, 0.0))


class StagedBundles:
    """Bundles of one model, one for every way to load it."""

    def __init__(self, folder: Path, inputs: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...]) -> None:
        self._folder, self._inputs, self._outputs = folder, inputs, outputs
        self._remembered: dict[Path, tuple[Stamp, ...]] = {}

    def stage(self, folder: Path, variant: Variant, *, timeout_s: float) -> Path:
        """Returns the folder of a bundle with one variant.

        It is loaded once in a process that is not measured, and again when a link for another bundle has
        changed its files' stamps: so `load` remembers what it remembers from a job's second start on.

        Args:
            folder: The folder that the variant's model is in, with all files that its session reads.
            variant: The variant; only its model, options, providers and requirements count.
            timeout_s: Deadline of the process that loads it, in seconds.

        Raises:
            PipelineError: It cannot be loaded.
            OSError: The disk is full.
        """
        model = folder / variant.model
        placed = Variant(
            name=_NAME,
            target=variant.target,
            model=f"{_NAME}/{model.name}",
            files=(),
            session_options=variant.session_options,
            providers=variant.providers,
            requirements=variant.requirements,
        )
        bundle = self._folder / digest_json([str(model), encode(placed)])[-16:]
        if not (bundle / LOADER_FILE).exists():  # which is written last
            self._write(bundle, model, placed)
        stamps = tuple(read_stamp(path) for path in sorted(bundle.rglob("*")) if path.is_file())
        if self._remembered.get(bundle) != stamps:
            run_child(load_once, bundle, timeout_s=timeout_s)
            self._remembered[bundle] = stamps
        return bundle

    def stage_judged(self, plan: SessionPlan, source: tuple[FileEntry, ...]) -> Path:
        """Returns the folder of a bundle that an application's sessions of a source come from.

        Raises:
            OSError: The disk is full.
        """
        model, bundle = Path(plan.model), self._folder / _NAME
        placed = Variant(
            name=_NAME,
            target="cuda" if any(one.name == CUDA for one in plan.providers) else "cpu",
            model=f"{_NAME}/{model.name}",
            files=(),
            session_options=plan.session_options,
            providers=plan.providers,
            requirements=Requirements(VersionRange("0"), tuple(one.name for one in plan.providers)),
        )
        self._write(bundle, model, placed, source)
        return bundle

    def _write(self, bundle: Path, model: Path, variant: Variant, source: tuple[FileEntry, ...] = ()) -> None:
        """Writes a bundle that records a variant, and shares its model's files."""
        share_model(model, bundle / _NAME / model.name)
        files = describe_files(bundle / _NAME)
        placed = variant._replace(files=tuple(one._replace(path=f"{_NAME}/{one.path}") for one in files))
        config = LoaderConfig(
            LOADER_SCHEMA_VERSION, _NAME, self._inputs, self._outputs, _NO_GOLDEN, (placed,), source
        )
        write_loader_config(bundle, config)


def load_once(bundle: Path) -> None:
    """Loads a bundle as a job does (child function).

    Raises:
        PipelineError: It cannot be loaded.
    """
    from ortprep.runtime import load

    load(bundle)
