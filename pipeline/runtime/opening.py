"""From a bundle to a session: pick a variant, check its bytes, build it, say what was decided."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.bundle.loader_config import LOADER_FILE, LoaderConfig, Variant, read_loader_config
from pipeline.bundle.paths import resolve_inside
from pipeline.errors import IntegrityError, LoadError, PipelineError
from pipeline.runtime.hardware import read_hardware
from pipeline.runtime.permissions import find_forbidden, find_junk
from pipeline.runtime.selection import FASTEST, PassedOver, Selection, needs_gpu, select_variant, serves
from pipeline.runtime.session import SessionPlan, build_session, with_device
from pipeline.runtime.variant_files import VariantFiles, fetch_files, identify

if TYPE_CHECKING:
    import onnxruntime

    from pipeline.runtime.background_import import BackgroundImport
    from pipeline.runtime.cancellation import Cancellation
    from pipeline.runtime.deadline import Deadline
    from pipeline.runtime.loading import CheckPolicy, DigestPolicy, PlanChoice

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Chosen:
    """What sessions are made of: a variant that fits this machine, its files compared with their records.

    Attributes:
        root: The bundle's folder, free of links.
        config: The bundle's loader config.
        variant: The one that was taken.
        passed_over: Those the bundle prefers to it, and why they were not.
        files: What tells whether its files are still the same.
    """

    root: Path
    config: LoaderConfig
    variant: Variant
    passed_over: tuple[PassedOver, ...]
    files: VariantFiles


@dataclass(frozen=True)
class OpenedBundle:
    """A session with what was decided on the way to it.

    Attributes:
        session: Ready to run.
        chosen: What it was made of.
        plan: How it was made.
    """

    session: onnxruntime.InferenceSession
    chosen: Chosen
    plan: SessionPlan

    @property
    def config(self) -> LoaderConfig:
        """The bundle's loader config."""
        return self.chosen.config

    @property
    def variant(self) -> Variant:
        """The variant that was taken."""
        return self.chosen.variant

    @property
    def passed_over(self) -> tuple[PassedOver, ...]:
        """Those the bundle prefers to it, and why they were not taken."""
        return self.chosen.passed_over


@dataclass(frozen=True)
class Wishes:
    """What the caller of `load` asked for; its arguments of the same names.

    Attributes:
        adapt: Changes the plan that the bundle records, for whoever shares the machine with others.
    """

    target: str | None
    device_id: int | None
    digests: DigestPolicy
    check: CheckPolicy
    deadline: Deadline
    plan: PlanChoice = "steady"
    adapt: Callable[[SessionPlan], SessionPlan] | None = None
    precision: str = FASTEST


def open_bundle(bundle: Path, wishes: Wishes, importing: BackgroundImport) -> OpenedBundle:
    """Opens a bundle while ONNX Runtime is being imported; a bundle that is replaced meanwhile, once more.

    Raises:
        PipelineError: As `pipeline.runtime.load` does.
    """
    opened = _open_unless_replaced(bundle, wishes, importing)
    if opened is None:
        log.info("%s: replaced by another build while it was loaded; starting over", bundle)
        opened = _open_unless_replaced(bundle, wishes, importing)
    if opened is None:
        raise LoadError(
            f"bundle was replaced twice while it was loaded: {bundle}\n  expected it to stand still"
        )
    return opened


def _open_unless_replaced(bundle: Path, wishes: Wishes, importing: BackgroundImport) -> OpenedBundle | None:
    """Opens the bundle, or returns None if another build took its place meanwhile.

    A session made of files of two builds could answer wrongly, so what came out does not count then, be it a
    session or an error.
    """
    before = identify(bundle / LOADER_FILE)
    try:
        # Not `Path.resolve`, which fails on links that lead in a circle.
        opened = _open(Path(os.path.realpath(bundle)), wishes, importing)
    except PipelineError:
        if identify(bundle / LOADER_FILE) != before:
            return None
        raise
    return opened if identify(bundle / LOADER_FILE) == before else None


def _open(root: Path, wishes: Wishes, importing: BackgroundImport) -> OpenedBundle:
    chosen = _choose(root, wishes, importing)
    plan = build_plan(root, chosen.variant, device_id=wishes.device_id, choice=wishes.plan)
    if wishes.adapt is not None:
        plan = wishes.adapt(plan)
    session = make_session(chosen, plan, check=wishes.check, timeout_s=wishes.deadline.remaining_s())
    wishes.deadline.remaining_s()
    return OpenedBundle(session, chosen, plan)


def _choose(root: Path, wishes: Wishes, importing: BackgroundImport) -> Chosen:
    config = read_loader_config(root)
    candidates = [v for v in config.variants if serves(v, wishes.target, wishes.precision)]
    hardware = read_hardware(gpus=any(needs_gpu(variant.requirements) for variant in candidates))

    def select(version: str | None, providers: list[str] | None) -> Selection:
        return select_variant(
            config,
            target=wishes.target,
            hardware=hardware,
            onnxruntime_version=version,
            available_providers=providers,
            device_id=wishes.device_id,
            precision=wishes.precision,
        )

    def fetch(variant: Variant) -> VariantFiles:
        golden = wishes.check == "golden"
        return fetch_files(
            root, config, variant, digests=wishes.digests, with_golden=golden, deadline=wishes.deadline
        )

    # Until ONNX Runtime's version is known this is a guess, so what is found wrong with it may not matter.
    probable = select(None, None).variant
    files = None if probable is None else fetch(probable)
    onnxruntime = importing.wait(wishes.deadline)
    selection = select(onnxruntime.__version__, onnxruntime.get_available_providers())
    variant = selection.variant
    if variant is None:
        raise _nothing_fits(root, config, selection.passed_over, wishes)
    if files is None or variant != probable:
        files = fetch(variant)
    files.check()
    _report(config, variant, selection.passed_over, wishes.device_id)
    return Chosen(root, config, variant, selection.passed_over, files)


def make_session(
    chosen: Chosen,
    plan: SessionPlan,
    *,
    check: CheckPolicy,
    timeout_s: float | None = None,
    cancellation: Cancellation | None = None,
) -> onnxruntime.InferenceSession:
    """Makes a session of a chosen variant, of files that are still those that were compared.

    Args:
        chosen: The variant.
        plan: One of its plans, as `build_plan` returns it.
        check: `golden` compares its answers with the recorded ones.
        timeout_s: Seconds after which ONNX Runtime's part is given up.
        cancellation: Ends ONNX Runtime's part when asked to.

    Raises:
        LoadError: ONNX Runtime refused the plan, or the golden sample was answered wrongly.
        LoadTimeoutError: The deadline passed.
        ProviderError: The session did not get its execution provider.
        BundleError: The golden sample cannot be read.
        IntegrityError: A file was exchanged or written to since it was compared.
    """
    session = build_session(plan, timeout_s=timeout_s, cancellation=cancellation)
    if check == "golden":
        # Imported here, since it brings in numpy, which most loads leave to ONNX Runtime's thread.
        from pipeline.runtime.golden import check_answers

        check_answers(session, chosen.config, chosen.root, variant=chosen.variant)
    chosen.files.check_unchanged()
    return session


def build_plan(
    root: Path, variant: Variant, *, device_id: int | None = None, choice: PlanChoice = "steady"
) -> SessionPlan:
    """Returns how a session of a variant is made.

    Args:
        root: The bundle's folder.
        variant: One of its variants.
        device_id: CUDA ordinal that replaces the recorded one; None leaves it.
        choice: `first` for the variant's first phase, where it records one.

    Raises:
        IntegrityError: The model lies outside the bundle, or an option is one that no bundle may set, or
            has a value that ONNX Runtime cannot take.
    """
    forbidden = find_forbidden(variant)
    if forbidden:
        raise IntegrityError(
            f"variant {variant.name!r} of {root} asks for what no bundle may\n"
            f"  expected none of {', '.join(forbidden)} among its options"
        )
    junk = find_junk(variant)
    if junk:
        raise IntegrityError(
            f"variant {variant.name!r} of {root} sets what ONNX Runtime cannot take\n  got {'; '.join(junk)}"
        )
    way = variant if choice == "steady" or variant.first_phase is None else variant.first_phase
    model = resolve_inside(root, way.model or variant.model)
    plan = SessionPlan(str(model), way.session_options, way.providers)
    return plan if device_id is None else with_device(plan, device_id)


def _nothing_fits(
    root: Path, config: LoaderConfig, passed_over: tuple[PassedOver, ...], wishes: Wishes
) -> LoadError:
    target = wishes.target
    hint = f"ortprep prepare {config.name} --target {target or config.variants[0].target}"
    if not passed_over:
        names = ", ".join(dict.fromkeys(variant.target for variant in config.variants))
        asked, expected = repr(target), names
        if wishes.precision != FASTEST:
            asked = f"{wishes.precision}{f' on {target}' if target else ''}"
            expected = ", ".join(f"{v.name} ({v.precision})" for v in config.variants if not v.bucket)
            hint = f"convert: {{precision: {wishes.precision}}}   # in the spec of {config.name}"
        return LoadError(
            f"bundle was not prepared for {asked}: {root}\n  expected one of {expected}", hint=hint
        )
    lines = "\n".join(f"  {variant}" for variant in passed_over)
    return LoadError(f"no variant of {config.name} runs on this machine: {root}\n{lines}", hint=hint)


def _report(
    config: LoaderConfig, variant: Variant, passed_over: tuple[PassedOver, ...], device_id: int | None
) -> None:
    if device_id is not None and not needs_gpu(variant.requirements):
        log.warning("%s: device_id=%d has no effect on variant %s", config.name, device_id, variant.name)
    if passed_over:
        reasons = " | ".join(map(str, passed_over))
        log.warning("%s: taking variant %s; passed over: %s", config.name, variant.name, reasons)
    else:
        log.info("%s: taking variant %s", config.name, variant.name)
