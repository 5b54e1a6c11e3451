"""What a job calls: `load`.

A bundle is read, a variant of it selected and checked, a session built, and what came out asserted. The first
three are remembered per machine, so a later process goes straight from the memory to the session.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

from ortprep.bundle import LOADER_FILE
from ortprep.bundle.file_memory import find_stamp
from ortprep.runtime.loading.load_options import (
    DIGEST_POLICIES,
    Deadline,
    LoadOptions,
    check_choice,
    check_number,
)
from ortprep.runtime.loading.opened_bundle import (
    OpenedBundle,
    describe_selection,
    find_threads,
    log_line,
    make_session,
)
from ortprep.runtime.loading.resolved_variant import ResolvedVariant, recall, remember
from ortprep.runtime.loading.session import MODEL_CONFIG_VARIABLE, import_onnxruntime

if TYPE_CHECKING:
    import onnxruntime

    from ortprep.runtime.loading.load_options import CheckPolicy, DigestPolicy, Phases, SessionOptions

_LARGE_BYTES = 4 * 1024 * 1024
"""Files up to this size are read sooner than a thread starts that would read them ahead."""


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
    phases: Phases = "auto",
    workers: int | None = None,
) -> onnxruntime.InferenceSession:
    """Opens a bundle as a session on the first variant whose requirements this machine meets.

    It logs at WARNING why it passes over variants; one that fits but cannot be loaded is an error.

    Args:
        bundle: The bundle's folder, or `registry://NAME@VERSION`, `REGISTRY/NAME@VERSION`: pulled first.
        target: Only what was prepared for this target (`cpu`, `cuda`), or the variant of this name.
        device_id: CUDA ordinal of the GPU; None for the one that the bundle records, else the first.
        digests: Which files are hashed before it returns a session; `full` where a signature is required.
        check: `golden` also compares the answers to the bundle's golden sample with the recorded ones.
        timeout_s: Seconds after which the load is given up, without a pull from a registry; None for never.
        require_signature: A public key's file; bundles that are not signed with it are refused.
        precision: `fastest-within-gate` takes the fastest variant that passed the accuracy gate of the spec;
            `fp32`, `fp16`, `bf16`, `int8` or `int4` takes that precision.
        session_options: The application's own, as an `onnxruntime.SessionOptions` or as values by attribute
            or config key. They take precedence over all but the optimisation level; conflicts are logged.
        phases: `auto` starts on the variant's first phase, if there is one, and changes to the steady one
            after the first run (`wait_steady`; ONNX Runtime 1.31, two cores); `steady` and `first` do not.
        workers: Number of processes that share this machine's cores, which bounds the threads of a session;
            None for `ORTPREP_WORKERS`, else `WEB_CONCURRENCY`, else 1.

    Raises:
        SignatureError: The bundle is not signed as required.
        RegistryError: The registry has no such version, or failed.
        LoadError: No variant fits, ONNX Runtime refused it, or the answers to the golden sample are wrong.
        LoadTimeoutError: The deadline passed.
        BundleError: The bundle cannot be read, or its format is newer.
        IntegrityError: A file has changed since it was written, or the bundle sets a forbidden option.
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
        phases=phases,
        workers=workers,
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
    precision: str = "fastest-within-gate",
    session_options: SessionOptions | None = None,
    phases: Phases = "auto",
    workers: int | None = None,
) -> OpenedBundle:
    """Does what `load` does, with its arguments and errors, and also returns the decisions."""
    check_choice("digests", digests, DIGEST_POLICIES)
    check_choice("check", check, ("none", "golden"))
    check_choice("phases", phases, ("auto", "first", "steady"))
    check_number("device_id", device_id, example=0, whole=True)
    check_number("timeout_s", timeout_s, example=30)
    check_number("workers", workers, example=4, whole=True, minimum=1)
    own = None
    if session_options is not None:
        from ortprep.runtime.loading.caller_options import read_options

        own = read_options(session_options)
    folder = find_folder(bundle, require_signature)
    deadline = Deadline(timeout_s, subject=folder)
    device_id = None if device_id is None else int(device_id)  # numpy's is one of Python's
    options = LoadOptions(
        target=target,
        device_id=device_id,
        digests=digests,
        check=check,
        precision=precision,
        phases=phases,
        deadline=deadline,
        session_options=own,
        require_signature=require_signature,
        threads=find_threads(None if workers is None else int(workers)),
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
                if opened.options.phases == "auto":
                    from ortprep.runtime.loading.phases import serve_in_phases

                    serve_in_phases(opened)
                return opened
        log_line("info", "%s: replaced by another build while it was loaded", folder)
    from ortprep.errors import LoadError

    raise LoadError(
        f"bundle was replaced twice while it was loaded: {folder}\n  expected it to stay the same"
    )


def _open(root: str, options: LoadOptions) -> OpenedBundle:
    """Opens a bundle as it was resolved before, or reads, selects and checks it."""
    import_onnxruntime()
    if os.environ.get(MODEL_CONFIG_VARIABLE) == "1":
        from ortprep.errors import LoadError

        raise LoadError(
            f"{MODEL_CONFIG_VARIABLE} is set\n  expected it unset: a bundle's model could set any option",
            hint=f"unset {MODEL_CONFIG_VARIABLE}",
        )
    resolved = recall(root, options)
    is_new = resolved is None
    if resolved is None:
        # Imported here: a process that finds its bundle as another left it needs none of it.
        from ortprep.runtime.loading.variant_resolver import resolve

        resolved = resolve(root, options)  # reads the bundle, selects a variant, checks it
    _prefetch(resolved)
    _report(resolved, options)
    if options.phases == "auto" and (resolved.first is None or not _pays(options)):
        options = options.replace(phases="steady")
    with resolved.comparison or contextlib.nullcontext():
        plan, session = make_session(resolved, options)
    if is_new:
        remember(resolved, options)
    return OpenedBundle(session, plan, resolved, options)


def _pays(options: LoadOptions) -> bool:
    """Returns whether a second session may follow the first; a profile of the caller's is of one session."""
    from ortprep.runtime.loading.phases import may_swap

    return not (options.session_options or {}).get("enable_profiling") and may_swap()


def _prefetch(resolved: ResolvedVariant) -> None:
    """Has large files that are on disk only read ahead, while ONNX Runtime begins with the first of them."""
    large = [(path, stamp[2]) for path, stamp in resolved.files if stamp[2] > _LARGE_BYTES]
    if large:
        from ortprep.runtime.machine.memory import is_cached, start_prefetch

        cold = [path for path, size_bytes in large if not is_cached(path, size_bytes)]
        if cold:
            start_prefetch(cold)


def _report(resolved: ResolvedVariant, options: LoadOptions) -> None:
    """Logs which variant is taken, and an argument that has no effect on it."""
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
