"""Bundles of plans that are not packaged yet, so that what a job pays is measured: `load`, checks and all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipeline.bundle.digest import DigestCache, digest_bytes
from pipeline.bundle.linking import share_model
from pipeline.bundle.loader_config import (
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
from pipeline.bundle.session_record import SessionPlan
from pipeline.bundle.verification import describe_files
from pipeline.runtime.child import run_child
from pipeline.runtime.loading.session import CUDA

_NAME = "staged"
_NO_GOLDEN = Golden(FileEntry("golden.npz", 0, digest_bytes(b"")), Tolerance(0.0, 0.0))


class StagedBundles:
    """Bundles of one variant, one for every model file; another plan for it replaces its `loader.json`."""

    def __init__(self, folder: Path, inputs: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...]) -> None:
        """Begins without any.

        Args:
            folder: Where they are written, on the disk of the models: their files are linked.
            inputs: Of the model.
            outputs: Likewise.
        """
        self._folder, self._inputs, self._outputs = folder, inputs, outputs
        self._files: dict[Path, tuple[FileEntry, ...]] = {}
        self._staged: dict[Path, Variant] = {}

    def stage(
        self, plan: SessionPlan, requirements: Requirements, *, io_binding: bool, timeout_s: float
    ) -> Path:
        """Returns the folder of a bundle that records a plan.

        A model's bundle is loaded once before it is returned first, in a process that is not measured: what
        `load` remembers of files is then there, as it is from a job's second start on.

        Args:
            plan: How its session is made.
            requirements: What a machine needs for it, which `load` compares with this one.
            io_binding: Whether runs bind inputs and outputs.
            timeout_s: Deadline of that first load.

        Raises:
            PipelineError: It cannot be loaded.
            OSError: The disk is full.
        """
        model = Path(plan.model)
        bundle = self._folder / digest_bytes(plan.model.encode())[-16:]
        if bundle not in self._files:
            share_model(model, bundle / _NAME / model.name)
            files = describe_files(bundle / _NAME, DigestCache().digest)
            self._files[bundle] = tuple(replace(one, path=f"{_NAME}/{one.path}") for one in files)
        variant = Variant(
            name=_NAME,
            target="cuda" if any(one.name == CUDA for one in plan.providers) else "cpu",
            model=f"{_NAME}/{model.name}",
            files=self._files[bundle],
            session_options=plan.session_options,
            providers=plan.providers,
            requirements=requirements,
            io_binding=io_binding,
        )
        if self._staged.get(bundle) != variant:
            config = LoaderConfig(
                LOADER_SCHEMA_VERSION, _NAME, self._inputs, self._outputs, _NO_GOLDEN, (variant,)
            )
            write_loader_config(bundle, config)
            if bundle not in self._staged:
                run_child(f"{__name__}:load_once", {"bundle": str(bundle)}, timeout_s=timeout_s)
            self._staged[bundle] = variant
        return bundle


def load_once(request: Mapping[str, Any]) -> dict[str, Any]:
    """Child function: loads the `bundle` as a job does.

    Raises:
        PipelineError: As `load` does.
    """
    from pipeline.runtime import load

    load(request["bundle"])
    return {}
