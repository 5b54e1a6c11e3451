"""The first load of a bundle on a machine: read it, select a variant, check everything of that variant."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import TYPE_CHECKING

from ortprep.bundle import LOADER_FILE
from ortprep.bundle.file_memory import find_stamp, is_settled
from ortprep.bundle.loader_config import (
    PRECISIONS,
    SOURCE_PRECISION,
    FirstPhase,
    LoaderConfig,
    Variant,
    read_loader_config,
)
from ortprep.bundle.paths import resolve_inside
from ortprep.bundle.session_record import SessionPlan
from ortprep.errors import IntegrityError, LoadError, NoVariantError
from ortprep.runtime.loading.load_options import DIGEST_POLICIES, check_choice
from ortprep.runtime.loading.resolved_variant import ResolvedVariant, is_usual, read_compute_capabilities
from ortprep.runtime.loading.session import CPU, CUDA, import_onnxruntime, with_device
from ortprep.runtime.loading.variant_files import check_external_data, check_files
from ortprep.runtime.loading.variant_selection import (
    FASTEST,
    Selection,
    find_candidates,
    needs_gpu,
    read_machine,
    select_variant,
)

if TYPE_CHECKING:
    import onnxruntime

    from ortprep.bundle.file_memory import StrPath
    from ortprep.bundle.loader_config import FileEntry
    from ortprep.runtime.loading.load_options import LoadOptions, Phases


_MAX_PROBLEMS = 20
_DEVICE = "device_id"


def resolve(root: str, options: LoadOptions) -> ResolvedVariant:
    """Decides which variant is loaded, and checks its files and its options; large files meanwhile.

    Raises:
        NoVariantError: No variant fits.
        LoadError: No such precision is known.
        LoadTimeoutError: The deadline passed.
        BundleError: The bundle cannot be read.
        IntegrityError: A file is not as it was written, or the variant sets what no bundle may.
    """
    # Before anything is read, so that a change meanwhile shows.
    began_ns = time.time_ns()
    loader = find_stamp(f"{root}/{LOADER_FILE}")
    signed = None if options.require_signature is None else _read_signed(root, options.require_signature)
    config = read_loader_config(root) if signed is None else _read_signed_config(root, signed)
    _require_source(root, config, options)
    check_choice("precision", options.precision, (FASTEST, *PRECISIONS))
    check_choice("digests", options.digests, DIGEST_POLICIES)
    uses_gpus = any(needs_gpu(variant.requirements) for variant in find_candidates(config, options))
    selection = select_variant(config, options, read_machine(gpus=uses_gpus))
    variant = selection.variant
    if variant is None:
        raise _nothing_fits(root, config, selection, options)
    _check_options(root, variant)
    files, comparison = check_files(root, config, variant, options, signed)
    return ResolvedVariant(
        root=root,
        loader=loader,
        bundle=config.name,
        name=variant.name,
        steady=plan_of(root, variant, "steady"),
        first=None if variant.first_phase is None else plan_of(root, variant, "first"),
        files=files,
        passed_over=tuple((passed.name, passed.reasons) for passed in selection.passed_over),
        compute_capabilities=read_compute_capabilities() if uses_gpus else None,
        config=config,
        comparison=comparison,
        is_settled=all(is_settled(stamp, began_ns) for stamp in (loader, *(stamp for _, stamp in files))),
    )


def _require_source(folder: str, config: LoaderConfig, options: LoadOptions) -> None:
    """Raises unless a bundle is of the model that it is to stand for, as its signed bytes say if they are."""
    if options.source is not None and config.source != tuple(options.source):
        raise IntegrityError(
            f"bundle of another model: {folder}\n  expected the one that it was listed for",
            hint="start the application again, if the bundle was replaced meanwhile",
        )


def _read_signed(folder: StrPath, require_signature: StrPath) -> tuple[FileEntry, ...]:
    from ortprep.runtime.loading.sources import read_signed_files

    return read_signed_files(folder, require_signature)


def _read_signed_config(folder: StrPath, signed: tuple[FileEntry, ...]) -> LoaderConfig:
    """Returns the loader config, of the very bytes that were signed."""
    digest = next((entry.sha256 for entry in signed if entry.path == LOADER_FILE), "")
    return read_loader_config(folder, sha256=digest)


def read_trusted_config(folder: StrPath, require_signature: StrPath | None) -> LoaderConfig:
    """Returns the loader config of a bundle: of the bytes that were signed, where a signature is required.

    Raises:
        BundleError: It cannot be read.
        SignatureError: It is not signed as required.
    """
    if require_signature is None:
        return read_loader_config(folder)
    return _read_signed_config(folder, _read_signed(folder, require_signature))


def read_config(resolved: ResolvedVariant) -> LoaderConfig:
    """Returns the loader config of a resolved bundle, read once; raises `LoadError` if it was replaced."""
    if resolved.config is None:
        config = read_loader_config(resolved.root)
        if find_stamp(f"{resolved.root}/{LOADER_FILE}")[:4] != resolved.loader[:4]:
            raise LoadError(
                f"bundle was replaced by another build: {resolved.root}\n  expected the one that was opened",
                hint="load it again",
            )
        resolved.config = config
    return resolved.config


def read_variant(resolved: ResolvedVariant) -> Variant:
    """Returns all that the bundle records of the variant; raises as `read_config`."""
    return next(variant for variant in read_config(resolved).variants if variant.name == resolved.name)


def check_resolved(resolved: ResolvedVariant, session: onnxruntime.InferenceSession, root: str) -> None:
    """Runs the golden sample in a folder on a session of a variant; raises as `check_answers`."""
    from pathlib import Path

    from ortprep.runtime.loading.golden import check_answers

    check_answers(session, read_config(resolved), Path(root), variant=read_variant(resolved))


def build_plan(
    root: StrPath, variant: Variant, *, device_id: int | None = None, choice: Phases = "steady"
) -> SessionPlan:
    """Returns how a session of a variant is made.

    Raises:
        IntegrityError: The model lies outside the bundle or refers to data that the variant does not list, or
            an option is one that no bundle may set, or has a value that ONNX Runtime cannot take.
    """
    _check_options(root, variant)
    check_external_data(root, variant)
    plan = plan_of(root, variant, choice)
    return plan if device_id is None else with_device(plan, device_id)


def plan_of(root: StrPath, variant: Variant, choice: Phases) -> SessionPlan:
    """Returns what a variant records of a session of it, unchecked; raises if its model leaves the bundle."""
    phase = variant if choice == "steady" or variant.first_phase is None else variant.first_phase
    return SessionPlan(resolve_inside(root, variant.model), phase.session_options, phase.providers)


def _check_options(root: StrPath, variant: Variant) -> None:
    """Raises `IntegrityError` for options that no bundle may set."""
    if all(map(is_usual, _plans(variant))):
        return  # without the table, whose import takes longer than all else
    invalid = find_invalid_options(variant)
    if invalid:
        from ortprep.versions import upgrade_command

        lines = "\n".join(f"  {problem}" for problem in invalid)
        raise IntegrityError(
            f"variant {variant.name!r} of {root} sets options that no bundle may set\n{lines}",
            hint=f"prepare it again; or {upgrade_command()}, if a newer ortprep wrote it",
        )


def _nothing_fits(
    root: str, config: LoaderConfig, selection: Selection, options: LoadOptions
) -> NoVariantError:
    """Returns the error for a bundle without a variant for this machine or these arguments."""
    from ortprep.quoting import quoted

    target, precision = options.target, options.precision
    hint = f"ortprep prepare {quoted(config.name)} --target {quoted(target or config.variants[0].target)}"
    if selection.passed_over:
        lines = "\n".join(f"  {variant}" for variant in selection.passed_over)
        return NoVariantError(f"no variant of {config.name} runs on this machine: {root}\n{lines}", hint=hint)
    if precision == FASTEST and options.replacement is not None:
        precision = SOURCE_PRECISION  # what an application did not judge never stands for its source
    criteria = [] if target is None else [f"target {target!r}"]
    if precision != FASTEST:
        criteria.append(f"precision {precision!r}")
        hint = f"convert: {{precision: {quoted(precision)}}}   # in the spec of {quoted(config.name)}"
    targets = ", ".join(dict.fromkeys(variant.target for variant in config.variants))
    variants = ", ".join(f"{variant.name} ({variant.precision})" for variant in config.variants)
    return NoVariantError(
        f"bundle was not prepared for {' in '.join(criteria)}: {root}\n"
        f"  expected one of the targets {targets} or of the variants {variants}",
        hint=hint,
    )


# What a bundle may set: how a session is made and run. Options of ONNX Runtime can write files, read others
# than the bundle's own, load libraries and call addresses (F18 of docs/format.md).


def find_invalid_options(variant: Variant) -> tuple[str, ...]:
    """Returns what a variant or its first phase sets and must not, one phrase each, the first 20 at most.

    That is every option the table keeps from users or does not know, and every value it does not accept: ONNX
    Runtime takes most invalid values silently, but some end the whole process (a word where `mlas.…`
    entries expect a number aborts, measured on 1.31.1), which no caller of `load` could catch.
    """
    problems = (problem for plan in _plans(variant) for problem in _problems(plan))
    return tuple(dict.fromkeys(islice(problems, _MAX_PROBLEMS)))


def _plans(variant: Variant) -> tuple[Variant | FirstPhase, ...]:
    return (variant,) if variant.first_phase is None else (variant, variant.first_phase)


def _problems(plan: Variant | FirstPhase) -> Iterator[str]:
    """Yields the providers and options of a plan that no bundle may set."""
    options = plan.session_options
    for provider in plan.providers:
        if provider.name not in (CPU, CUDA):
            yield f"the execution provider {provider.name[:80]}, where {CPU} or {CUDA} is expected"
    if options.attributes or options.config_entries or any(provider.options for provider in plan.providers):
        from ortprep.options import NEWEST, check_options, version_parts

        # Which of the listed versions has an option is the affair of the variant's requirements.
        version = max(NEWEST, import_onnxruntime().__version__, key=version_parts)
        yield from check_options("attribute", options.attributes, version=version)
        yield from check_options("session", options.config_entries, version=version)
        for provider in plan.providers:
            chosen = _without_device(provider.options)
            yield from check_options(provider.name, chosen, version=version)


def _without_device(chosen: Mapping[str, str]) -> dict[str, str]:
    """Returns a provider's options without the device, which builds write, if it has a value as theirs."""
    is_sound = re.fullmatch("[0-9]{1,9}", chosen.get(_DEVICE, "")) is not None
    return {key: value for key, value in chosen.items() if not (is_sound and key == _DEVICE)}
