"""Loading with shape buckets: batches of sizes that a variant was prepared for are run on that variant."""

from __future__ import annotations

import dataclasses
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Unpack

from ortprep.bundle.loader_config import LoaderConfig, Variant
from ortprep.errors import LoadError
from ortprep.runtime.buckets.selection import find_buckets
from ortprep.runtime.buckets.session import BucketedSession
from ortprep.runtime.loading.bundle_loader import OpenedBundle, open_bundle, open_folder
from ortprep.runtime.loading.load_options import Deadline, LoadOptions, check_choice
from ortprep.runtime.loading.variant_selection import FASTEST, PassedOver, find_reasons_here

if TYPE_CHECKING:
    import onnxruntime

    from ortprep.runtime.loading.load_options import LoadArguments

log = logging.getLogger(__name__)

BucketStart = Literal["first_use", "now"]
"""`first_use`: a bucket's session is made by the first run that needs it, which waits for it; `now`: all are
made before the load returns."""


def load_bucketed(
    bundle: str | os.PathLike[str],
    *,
    make: BucketStart = "first_use",
    **options: Unpack[LoadArguments],
) -> BucketedSession:
    """Opens a bundle as `load` does, and runs each batch on the bucket for its sizes, if there is one.

    The buckets are those of the target and precision of the variant that `load` takes. If this machine does
    not meet a bucket's requirements, the reasons are logged at WARNING. If the requirements are met but the
    bucket cannot be loaded, the run that needs it raises the error.

    Args:
        bundle: As for `load`.
        make: When to create the sessions of buckets: each at its `first_use`, or all `now`.
        **options: Every other argument of `load`, for all sessions; `timeout_s` applies to each.
            If `target` names a variant for all shapes, its buckets are used too.

    Raises:
        PipelineError: As `load` does.
    """
    check_choice("make", make, ("first_use", "now"))
    opened = open_bundle(bundle, **options)
    root, config, load_options = opened.root, opened.config, opened.options  # `opened` holds its session

    def open_session(bucket: Variant) -> onnxruntime.InferenceSession:
        deadline = Deadline(options.get("timeout_s"), subject=str(root))
        return open_bucket(root, config, bucket, load_options.replace(deadline=deadline)).session

    buckets = with_runnable_buckets(opened, device_id=load_options.device_id)
    session = BucketedSession(buckets, opened.variant, opened.session, open_session)
    if make == "now":
        session.make_sessions()
    return session


def with_runnable_buckets(opened: OpenedBundle, *, device_id: int | None) -> LoaderConfig:
    """Returns the bundle with the variant taken and those of its buckets that this machine can run."""
    buckets = find_buckets(opened.config, opened.variant)
    runnable = [bucket for bucket in buckets if _is_runnable(opened.config, bucket, device_id)]
    return dataclasses.replace(opened.config, variants=(opened.variant, *runnable))


def open_bucket(root: Path, config: LoaderConfig, bucket: Variant, options: LoadOptions) -> OpenedBundle:
    """Opens one bucket of a bundle, as `load` opens a variant by its name.

    Raises:
        PipelineError: As `load`; `LoadError` if the bundle was replaced, whose answers must not be mixed.
    """
    # The bundle's other files were compared when it was opened.
    named = options.replace(target=bucket.name, precision=FASTEST, plan="steady", whole_bundle=False)
    opened = open_folder(str(root), named)
    if opened.config != config:
        raise LoadError(
            f"bundle was replaced by another build: {root}\n"
            f"  expected the build loaded first, since answers of two builds must not mix",
            hint="load it again",
        )
    return opened


def _is_runnable(config: LoaderConfig, bucket: Variant, device_id: int | None) -> bool:
    reasons = find_reasons_here(bucket, device_id=device_id)
    if reasons:
        log.warning("%s: bucket passed over: %s", config.name, PassedOver(bucket.name, reasons))
    return not reasons
