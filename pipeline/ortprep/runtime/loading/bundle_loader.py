"""What a job calls: `load`.

A bundle is read, a variant of it selected and checked, a session built, and what came out asserted. The first
three are remembered per machine, so a later process goes straight from the memory to the session.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

from ortprep.bundle import LOADER_FILE
from ortprep.bundle.file_memory import find_stamp
from ortprep.runtime.loading.load_options import Deadline, LoadOptions, check_choice, check_number
from ortprep.runtime.loading.resolved_variant import ResolvedVariant, recall, remember
from ortprep.runtime.loading.session import build_session, import_onnxruntime, with_device

if TYPE_CHECKING:
    from pathlib import Path

    import onnxruntime

    from ortprep.bundle.loader_config import LoaderConfig, Variant
    from ortprep.bundle.session_record import SessionPlan
    from ortprep.runtime.loading.load_options import (
        Cancellation,
        CheckPolicy,
        DigestPolicy,
        PlanChoice,
        SessionOptions,
    )
    from ortprep.runtime.loading.variant_selection import PassedOver

_LARGE_BYTES = 4 * 1024 * 1024
"""Files up to this size are read sooner than a thread starts that would read them ahead."""


class OpenedBundle:
    """A session, and the decisions that led to it."""

    def __init__(
        self,
        session: onnxruntime.InferenceSession,
        plan: SessionPlan,
        resolved: ResolvedVariant,
        options: LoadOptions,
    ) -> None:
        self.session = session
        self.plan = plan
        self.resolved = resolved
        self.options = options

    @property
    def root(self) -> Path:
        """The bundle's folder, free of links."""
        from pathlib import Path

        return Path(self.resolved.root)

    @property
    def config(self) -> LoaderConfig:
        """The bundle's loader config, read when it is first used.

        Raises `LoadError` if the bundle was replaced since it was opened.
        """
        from ortprep.runtime.loading.variant_resolver import read_config

        return read_config(self.resolved)

    @property
    def variant(self) -> Variant:
        """The variant that was taken; raises as `config` does."""
        from ortprep.runtime.loading.variant_resolver import read_variant

        return read_variant(self.resolved)

    @property
    def passed_over(self) -> tuple[PassedOver, ...]:
        """Those the bundle prefers to it, and why they were not taken."""
        from ortprep.runtime.loading.variant_selection import PassedOver

        return tuple(PassedOver(name, reasons) for name, reasons in self.resolved.passed_over)


def load(
    bundle: str | os.PathLike[str],
    *,
    target: str | None = None,
    device_id: int | None = None,
    digests: DigestPolicy = "changed",
    check: CheckPolicy = "none",
    timeout_s: float | None = None,
    require_signature: str | os.PathLike[str] | None = None,
    precision: str = "fastest-within-gate",
    session_options: SessionOptions | None = None,
) -> onnxruntime.InferenceSession:
    """Opens a bundle as a session on the first variant whose requirements this machine meets.

    If it passes over variants, it logs the reasons at WARNING. If a variant's requirements are met but it
    cannot be loaded, that is an error; it is never passed over.

    Args:
        bundle: The bundle's folder; or `registry://NAME@VERSION` or `REGISTRY/NAME@VERSION`, which is pulled
            into the local cache first.
        target: Load only what was prepared for this target (`cpu`, `cuda`), or the variant of this name;
            None for the first one that fits.
        device_id: CUDA ordinal of the GPU; None for the one that the bundle records, else the first.
        digests: Which files are hashed and compared with their records before they are used; `full` where
            a signature is required.
        check: `golden` also compares the answers to the bundle's golden sample with the recorded ones.
        timeout_s: Seconds after which the load is given up, not counting a pull from a registry; None for
            as long as it takes.
        require_signature: A public key's file; bundles that are not signed with it are refused.
        precision: `fastest-within-gate` takes the variant that was the fastest when the bundle was prepared,
            among those that passed the accuracy gate of the spec; `fp32`, `fp16`, `bf16`, `mixed`, `int8` or
            `int4` takes that precision.
        session_options: The application's own options, as an `onnxruntime.SessionOptions` or as values by
            attribute or config key. They take precedence over the bundle's, which apply where these are at
            their defaults; the optimisation level is always the bundle's. Conflicts are logged once.

    Raises:
        SignatureError: The bundle is not signed as required.
        RegistryError: The registry has no such version, or failed.
        LoadError: No variant fits, ONNX Runtime refused it, or the answers to the golden sample are wrong.
        LoadTimeoutError: The deadline passed.
        ProviderError: The session did not get its execution provider.
        BundleError: The bundle cannot be read.
        IntegrityError: A file has changed since it was written, or the bundle sets a forbidden option.
        UnsupportedVersionError: The bundle is of a newer format.
        MissingExtraError: ONNX Runtime is not installed.
        CacheError: The cache folder is needed, for a pull or for copies, and cannot be used.
    """
    return open_bundle(
        bundle,
        target=target,
        device_id=device_id,
        digests=digests,
        check=check,
        timeout_s=timeout_s,
        require_signature=require_signature,
        precision=precision,
        session_options=session_options,
    ).session


def open_bundle(
    bundle: str | os.PathLike[str],
    *,
    target: str | None = None,
    device_id: int | None = None,
    digests: DigestPolicy = "changed",
    check: CheckPolicy = "none",
    timeout_s: float | None = None,
    require_signature: str | os.PathLike[str] | None = None,
    plan: PlanChoice = "steady",
    precision: str = "fastest-within-gate",
    session_options: SessionOptions | None = None,
) -> OpenedBundle:
    """Does what `load` does, with its arguments and errors, and also returns the decisions.

    With `plan="first"` the session is that of the variant's first phase, if the variant records one.
    """
    check_choice("digests", digests, ("changed", "full", "off"))
    check_choice("check", check, ("none", "golden"))
    check_choice("plan", plan, ("steady", "first"))
    check_number("device_id", device_id, example=0, whole=True)
    check_number("timeout_s", timeout_s, example=30)
    if session_options is not None and hasattr(session_options, "items"):
        session_options = dict(session_options.items())  # of two phases, the second is made later
    folder = find_folder(bundle, require_signature)
    deadline = Deadline(timeout_s, subject=folder)
    device_id = None if device_id is None else int(device_id)  # numpy's is one of Python's
    options = LoadOptions(
        target,
        device_id,
        digests,
        check,
        precision,
        plan,
        deadline,
        session_options,
        require_signature=require_signature,
    )
    return open_folder(folder, options)


def find_folder(bundle: str | os.PathLike[str], require_signature: str | os.PathLike[str] | None) -> str:
    """Returns the folder of a bundle, pulled first if it is in a registry; raises as `load` does.

    What lies in a folder is verified when it is opened.
    """
    path = os.fspath(bundle) if isinstance(bundle, str | os.PathLike) else None
    if isinstance(path, str) and "://" not in path and "\0" not in path:
        return path
    from ortprep.runtime.loading.sources import locate

    return str(locate(bundle, require_signature=require_signature))


def open_folder(folder: str, options: LoadOptions) -> OpenedBundle:
    """Opens the bundle in a folder; one that is replaced meanwhile, once more. Raises as `load` does.

    A session made of files of two builds could answer wrongly, so what came out does not count then, be it a
    session or an error.
    """
    for _ in range(2):
        before = find_stamp(f"{folder}/{LOADER_FILE}")[:4]  # without the change time, which linking sets
        try:
            opened = _open(os.path.realpath(folder), options)
        except Exception:  # whatever it is, it does not count if the bundle was replaced meanwhile
            if find_stamp(f"{folder}/{LOADER_FILE}")[:4] == before:
                raise
        else:
            if find_stamp(f"{folder}/{LOADER_FILE}")[:4] == before:
                return opened
        log_line("info", "%s: replaced by another build while it was loaded", folder)
    from ortprep.errors import LoadError

    raise LoadError(
        f"bundle was replaced twice while it was loaded: {folder}\n  expected it to stay the same"
    )


def _open(root: str, options: LoadOptions) -> OpenedBundle:
    import_onnxruntime()
    resolved = recall(root, options)
    is_new = resolved is None
    if resolved is None:
        # Imported here: a process that finds its bundle as another left it needs none of it.
        from ortprep.runtime.loading.variant_resolver import resolve

        resolved = resolve(root, options)  # reads the bundle, selects a variant, checks it
    else:
        _prefetch(resolved)
    _report(resolved, options)
    plan, session = make_session(resolved, options)
    if is_new:
        remember(resolved, options)
    return OpenedBundle(session, plan, resolved, options)


def _prefetch(resolved: ResolvedVariant) -> None:
    """Has large files that are on disk only read ahead, while ONNX Runtime begins with the first of them."""
    large = [(path, stamp[2]) for path, stamp in resolved.files if stamp[2] > _LARGE_BYTES]
    if large:
        from ortprep.runtime.machine.page_cache import is_cached, start_prefetch

        cold = [path for path, size_bytes in large if not is_cached(path, size_bytes)]
        if cold:
            start_prefetch(cold)


def make_session(
    resolved: ResolvedVariant, options: LoadOptions, *, cancellation: Cancellation | None = None
) -> tuple[SessionPlan, onnxruntime.InferenceSession]:
    """Makes a session of a resolved variant, of files that are still those that were checked.

    With full digests each session's files are hashed for it, also those of later phases. Returns how it was
    made, and the session; raises as `load` does.
    """
    first = resolved.first if options.plan == "first" else None
    plan = resolved.steady if first is None else first
    if options.digests != "full":
        return _make_session(plan, resolved, options, cancellation, resolved.root)
    from ortprep.runtime.loading.verified_files import verified_files

    with verified_files(resolved, options) as files:
        made = plan._replace(model=files.model)
        are_copies = files.are_copies
        made, session = _make_session(made, resolved, options, cancellation, files.root, are_copies)
    return made._replace(model=plan.model), session


def _make_session(
    plan: SessionPlan,
    resolved: ResolvedVariant,
    options: LoadOptions,
    cancellation: Cancellation | None,
    root: str,
    are_copies: bool = False,
) -> tuple[SessionPlan, onnxruntime.InferenceSession]:
    if options.device_id is not None:
        plan = with_device(plan, options.device_id)
    if options.adapt is not None:
        plan = options.adapt(plan)
    timeout_s = options.deadline.remaining_s()
    if options.session_options is None:
        session = build_session(
            plan, timeout_s=timeout_s, cancellation=cancellation, create=options.replacement
        )
    else:
        from ortprep.runtime.loading.caller_options import build_with_options

        plan, session = build_with_options(
            plan,
            options.session_options,
            deadline=options.deadline,
            cancellation=cancellation,
            create=options.replacement,
        )
    if options.check == "golden":
        from ortprep.runtime.loading.variant_resolver import check_resolved

        check_resolved(resolved, session, root)
    changed = () if are_copies else resolved.find_changed()
    if changed:
        from ortprep.errors import IntegrityError

        raise IntegrityError(
            f"files changed while they were loaded: {resolved.root}\n"
            f"  expected the files that were checked, got different {', '.join(changed)}"
        )
    options.deadline.remaining_s()
    return plan, session


def _report(resolved: ResolvedVariant, options: LoadOptions) -> None:
    bundle = resolved.bundle
    if options.device_id is not None and not resolved.uses_gpu:
        log_line(
            "warning",
            "%s: device_id=%d has no effect on variant %s",
            bundle,
            options.device_id,
            resolved.name,
        )
    if options.replacement is None:  # else the drop-in says so, in its one line
        log_line(*describe_selection(resolved, "%s: taking", bundle))


def describe_selection(resolved: ResolvedVariant, message: str, *values: object) -> tuple[Any, ...]:
    """Returns what `log_line` takes: a line that ends in the variant and why others were passed over."""
    if not resolved.passed_over:
        return "info", f"{message} variant %s", *values, resolved.name
    reasons = " | ".join(f"{passed}: {'; '.join(lacks)}" for passed, lacks in resolved.passed_over)
    return "warning", f"{message} variant %s; passed over: %s", *values, resolved.name, reasons


def log_line(level: str, message: str, *values: object) -> None:
    """Logs a line; one below a warning only if the application has imported `logging`, which takes long."""
    if level == "warning" or "logging" in sys.modules:
        import logging

        from ortprep.quoting import printable

        # Where an application has no handlers, `logging` itself writes to the terminal.
        shown = [value if isinstance(value, int | float) else printable(str(value)) for value in values]
        getattr(logging.getLogger(__name__), level)(message, *shown)
