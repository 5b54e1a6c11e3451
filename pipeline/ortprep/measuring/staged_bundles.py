"""Bundles of plans that are not packaged yet, so that a measurement includes `load` and its checks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ortprep.bundle import LOADER_FILE
from ortprep.bundle.codec import encode
from ortprep.bundle.digest import DigestCache, digest_bytes, digest_json
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
    write_loader_config,
)
from ortprep.bundle.session_record import SessionPlan
from ortprep.bundle.verification import describe_files
from ortprep.children.child import run_child
from ortprep.runtime.loading.session import CUDA

_NAME = "staged"
_NO_GOLDEN = Golden(FileEntry("golden.npz", 0, digest_bytes(b"")), Tolerance(0.0, 0.0))


class StagedBundles:
    """Bundles of one variant, one for every plan."""

    def __init__(self, folder: Path, inputs: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...]) -> None:
        self._folder, self._inputs, self._outputs = folder, inputs, outputs
        self._remembered: dict[Path, tuple[Stamp, ...]] = {}

    def stage(
        self, plan: SessionPlan, requirements: Requirements, *, io_binding: bool, timeout_s: float
    ) -> Path:
        """Returns the folder of a bundle that records a plan.

        It is loaded once in a process that is not measured, and again when a link for another plan has
        changed its files' stamps: so `load` remembers what it remembers from a job's second start on.

        Raises:
            PipelineError: It cannot be loaded.
            OSError: The disk is full.
        """
        bundle = self._folder / digest_json(encode([plan, requirements, io_binding]))[-16:]
        if not (bundle / LOADER_FILE).exists():  # which is written last
            self._write(bundle, plan, requirements, io_binding=io_binding)
        stamps = tuple(read_stamp(path) for path in sorted(bundle.rglob("*")) if path.is_file())
        if self._remembered.get(bundle) != stamps:
            run_child(load_once, bundle, timeout_s=timeout_s)
            self._remembered[bundle] = stamps
        return bundle

    def _write(
        self, bundle: Path, plan: SessionPlan, requirements: Requirements, *, io_binding: bool
    ) -> None:
        model = Path(plan.model)
        share_model(model, bundle / _NAME / model.name)
        files = describe_files(bundle / _NAME, DigestCache().digest)
        variant = Variant(
            name=_NAME,
            target="cuda" if any(one.name == CUDA for one in plan.providers) else "cpu",
            model=f"{_NAME}/{model.name}",
            files=tuple(replace(one, path=f"{_NAME}/{one.path}") for one in files),
            session_options=plan.session_options,
            providers=plan.providers,
            requirements=requirements,
            io_binding=io_binding,
        )
        config = LoaderConfig(
            LOADER_SCHEMA_VERSION, _NAME, self._inputs, self._outputs, _NO_GOLDEN, (variant,)
        )
        write_loader_config(bundle, config)


def load_once(bundle: Path) -> None:
    """Loads a bundle as a job does (child function).

    Raises:
        PipelineError: As `load` does.
    """
    from ortprep.runtime import load

    load(bundle)
