"""What a job calls: `load`.

ONNX Runtime takes longer to import than everything else here, so a thread of its own does it from the first
moment on, while this package's other modules are imported, the bundle is read, its digests are compared, and
the kernel reads the weights ahead.
"""

from __future__ import annotations

import numbers
import os
from typing import TYPE_CHECKING, Literal

from pipeline.errors import LoadError
from pipeline.runtime.background_import import BackgroundImport
from pipeline.runtime.deadline import Deadline
from pipeline.runtime.sources import locate

if TYPE_CHECKING:
    import onnxruntime

    from pipeline.runtime.opening import OpenedBundle

DigestPolicy = Literal["changed", "full", "off"]
"""`changed`: hash the variant's files that changed since they were last hashed on this machine; `full`: hash
every file of the bundle and look for added ones; `off`: trust the disk."""

CheckPolicy = Literal["none", "golden"]
"""`golden`: run the bundle's golden sample and compare, which is a warm-up run as well."""

PlanChoice = Literal["steady", "first"]
"""`steady`: the variant's own options, the fastest per run; `first`: those of its first phase, which is
sooner ready, where it records one."""


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
) -> onnxruntime.InferenceSession:
    """Opens a bundle as a session on the first variant whose requirements this machine meets.

    A variant that is passed over is logged with its reasons, at WARNING. A variant whose requirements are met
    and that cannot be loaded all the same is an error, never passed over.

    Args:
        bundle: The bundle's folder; or `registry://NAME@VERSION` or `REGISTRY/NAME@VERSION`, which is pulled
            into the local cache first.
        target: Load only what was prepared for this target (`cpu`, `cuda`), or the variant of this name;
            None for the bundle's first that fits.
        device_id: CUDA ordinal of the GPU; None for what the bundle records, else the first.
        digests: Which files are hashed and compared with their records before they are used.
        check: `golden` also compares the answers to the bundle's golden sample with the recorded ones.
        timeout_s: Seconds after which the load is given up; pulling comes before.
        require_signature: A public key's file, or what else `ortprep pull --verify` takes: a bundle that is
            not signed so is refused.
        precision: `fastest-within-gate` takes the variant that was the fastest when the bundle was made, of
            those whose answers are as near to the source's as its spec asks; `fp32`, `fp16`, `bf16`, `mixed`,
            `int8` or `int4` takes that one.

    Raises:
        SignatureError: The bundle is not signed as is required.
        RegistryError: The registry has no such version, or failed.
        LoadError: No variant fits, ONNX Runtime refused one, or the golden sample was answered wrongly.
        LoadTimeoutError: The deadline passed.
        ProviderError: The session did not get its execution provider.
        BundleError: The bundle cannot be read.
        IntegrityError: A file is not as it was written.
        UnsupportedVersionError: The bundle is of a newer format.
        MissingExtraError: ONNX Runtime is not installed.
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
) -> OpenedBundle:
    """Does what `load` does, with its arguments and errors, and also returns what was decided.

    With `plan="first"` the session is that of the variant's first phase, where the variant records one.
    """
    check_choice("digests", digests, ("changed", "full", "off"))
    check_choice("check", check, ("none", "golden"))
    check_choice("plan", plan, ("steady", "first"))
    _check_number("device_id", device_id, example=0, whole=True)
    _check_number("timeout_s", timeout_s, example=30)
    path = locate(bundle, require_signature=require_signature)
    deadline = Deadline(timeout_s, bundle=path)
    importing = BackgroundImport()
    # Imported now, so that ONNX Runtime's thread does not have to wait for it.
    from pipeline.runtime import opening
    from pipeline.runtime.selection import FASTEST, PRECISIONS

    check_choice("precision", precision, (FASTEST, *PRECISIONS))
    wishes = opening.Wishes(target, device_id, digests, check, deadline, plan, precision=precision)
    return opening.open_bundle(path, wishes, importing)


def _check_number(name: str, value: object, *, example: int, whole: bool = False) -> None:
    """Raises unless an argument is None or a number; True and False are none.

    Raises:
        LoadError: It is neither.
    """
    kind = numbers.Integral if whole else (int, float)  # numpy's ordinals are integers too
    if value is not None and (isinstance(value, bool) or not isinstance(value, kind)):
        expected = "an integer" if whole else "a number"
        raise LoadError(
            f"bad argument of load: {name}={value!r}\n  expected {expected} or None",
            hint=f"load(…, {name}={example})",
        )


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Raises unless an argument is one of the choices.

    Raises:
        LoadError: It is none of them.
    """
    if value not in choices:
        raise LoadError(
            f"bad argument of load: {name}={value!r}\n  expected one of {', '.join(choices)}",
            hint=f"load(…, {name}={choices[0]!r}), which is the default",
        )
