"""A variant's files in an export: copied, and tried there.

A child makes the session as the server will, so that nothing heavy happens in the caller's process.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from ortprep.bundle.digest import DigestCache
from ortprep.bundle.file_links import copy_file
from ortprep.bundle.loader_config import (
    FileEntry,
    LoaderConfig,
    TensorSpec,
    Variant,
    find_variant,
    read_loader_config,
)
from ortprep.bundle.manifest import Manifest, read_manifest
from ortprep.bundle.paths import is_safe_path, resolve_inside
from ortprep.bundle.session_record import SessionPlan
from ortprep.bundle.verification import check_bundle, compare_files, raise_differences
from ortprep.children.answers import describe_tensors
from ortprep.children.child import run_child
from ortprep.errors import ChildError, ExportError
from ortprep.export.options import MappedOptions
from ortprep.runtime.loading.variant_resolver import build_plan

Interface = tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]
"""Inputs and outputs as a session lists them; symbolic sizes by name or None."""

TIMEOUT_S = 3600.0
"""Timeout of one trial, the same as an optimisation's default."""


@dataclass(frozen=True)
class SourceBundle:
    """A bundle's folder, free of links, with its loader config and manifest."""

    root: Path
    config: LoaderConfig
    manifest: Manifest


def read_source(bundle: Path) -> SourceBundle:
    """Reads a bundle after every file of it was compared with its record.

    Raises:
        BundleError: The bundle cannot be read.
        IntegrityError: Something differs from what was written.
    """
    root = Path(os.path.realpath(bundle))
    check_bundle(root, DigestCache().digest)
    return SourceBundle(root, read_loader_config(root), read_manifest(root))


def place_files(
    source: SourceBundle, variant: Variant, export: Path, folder: str, model: str
) -> tuple[FileEntry, ...]:
    """Places a variant's files in an export, and returns them by their new paths.

    Args:
        source: Bundle of the variant.
        variant: Variant to place.
        export: The export's folder.
        folder: Relative POSIX path of the variant's folder in it.
        model: File name of the model in that folder.

    Raises:
        ExportError: A file is not beside the model, or has a name that the layout cannot have.
        IntegrityError: A file is not what the bundle records.
    """
    home = PurePosixPath(variant.model).parent
    placed: list[FileEntry] = []
    for entry in variant.files:
        path = PurePosixPath(entry.path)
        # Files beside the model keep their names, since the model refers to them.
        inner = model if entry.path == variant.model else entry.path.removeprefix(f"{home}/")
        name = f"{folder}/{inner}"
        if not path.is_relative_to(home) or not is_safe_path(name):
            raise ExportError(
                f"cannot lay out variant {variant.name!r}\n  expected its files in {home}, got {entry.path}"
            )
        copy_file(Path(resolve_inside(source.root, entry.path)), export / name)
        placed.append(entry._replace(path=name))
    files = tuple(placed)
    raise_differences(export, compare_files(export, files, DigestCache().digest))
    return files


def try_model(root: Path, variant: Variant, options: MappedOptions, model: Path) -> Interface:
    """Makes the session of an exported model, compares its answers with the golden sample, and describes it.

    Args:
        root: The bundle's folder.
        variant: The exported variant.
        options: The options that remain.
        model: The model in the export.

    Raises:
        ExportError: This machine cannot run the variant.
        LoadError: It does not load, or does not answer as recorded.
        ChildError: The process died, or its deadline passed.
        BundleError: The bundle cannot be read.
    """
    plan = build_plan(root, variant)._replace(
        model=str(model.absolute()), session_options=options.session_options, providers=options.providers
    )
    try:
        return run_child(run_trial, (os.path.realpath(root), variant.name, plan), timeout_s=TIMEOUT_S).value
    except ChildError as error:
        raise type(error)(f"export of variant {variant.name!r}: {error.message}", hint=error.hint) from error


def run_trial(request: tuple[str, str, SessionPlan]) -> Interface:
    """Makes a session in a child process, checks its answers, and lists its inputs and outputs.

    The request is the bundle's folder, the variant's name, and how the exported model's session is made.
    """
    from ortprep.runtime.loading.golden import check_answers
    from ortprep.runtime.loading.session import build_session
    from ortprep.runtime.loading.variant_selection import find_reasons_here

    folder, name, plan = request
    root = Path(folder)
    config = read_loader_config(root)
    variant = find_variant(config, name)
    assert variant is not None  # the caller has it from the same file
    if missing := find_reasons_here(variant):
        raise ExportError(
            f"cannot try variant {name!r}\n  expected a machine that can run it, got {'; '.join(missing)}",
            hint="export it on a machine that can run it, as the one that prepared it",
        )
    session = build_session(plan)
    check_answers(session, config, root, variant=variant)
    return describe_tensors(session.get_inputs()), describe_tensors(session.get_outputs())
