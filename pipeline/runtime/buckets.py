"""Loading with shape buckets: batches of sizes that a variant was prepared for are run on that variant.

As `pipeline.runtime.loading`, this imports next to nothing before ONNX Runtime's thread has begun.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Literal

from pipeline.runtime.loading import CheckPolicy, DigestPolicy, check_choice, open_bundle

if TYPE_CHECKING:
    import onnxruntime

    from pipeline.bundle.loader_config import Variant
    from pipeline.runtime.bucketed_session import BucketedSession

BucketStart = Literal["first_use", "now"]
"""`first_use`: a bucket's session is made by the first run that needs it, which waits for it; `now`: all are
made before the load returns."""


def load_bucketed(
    bundle: str | os.PathLike[str],
    *,
    target: str | None = None,
    device_id: int | None = None,
    digests: DigestPolicy = "changed",
    check: CheckPolicy = "none",
    timeout_s: float | None = None,
    require_signature: str | os.PathLike[str] | None = None,
    precision: str = "fastest-within-gate",
    make: BucketStart = "first_use",
) -> BucketedSession:
    """Opens a bundle as `load` does, and runs batches for whose sizes it has a bucket on that.

    The buckets are those for the target and in the precision of the variant that `load` takes; one whose
    requirements this machine does not meet is logged with its reasons, at WARNING. One whose requirements are
    met and that cannot be loaded all the same is an error of the run that needs it, never passed over.

    Args:
        bundle: As for `load`.
        target: As for `load`; a variant for all shapes that is named has its buckets beside it.
        device_id: As for `load`, of all sessions.
        digests: As for `load`, of the files of every variant when it is loaded.
        check: `golden` checks every session before it serves.
        timeout_s: Seconds after which the making of a session is given up, for each of them.
        require_signature: As for `load`.
        precision: As for `load`.
        make: When the sessions of buckets are made: each at its `first_use`, or all `now`.

    Raises:
        PipelineError: As `load` does.
    """
    check_choice("make", make, ("first_use", "now"))
    opened = open_bundle(
        bundle,
        target=target,
        device_id=device_id,
        digests=digests,
        check=check,
        timeout_s=timeout_s,
        require_signature=require_signature,
        precision=precision,
    )
    from pipeline.runtime.bucket_opening import open_bucket, with_runnable_buckets
    from pipeline.runtime.bucketed_session import BucketedSession
    from pipeline.runtime.deadline import Deadline
    from pipeline.runtime.opening import Wishes

    chosen = opened.chosen

    def open_session(bucket: Variant) -> onnxruntime.InferenceSession:
        wishes = Wishes(None, device_id, digests, check, Deadline(timeout_s, bundle=chosen.root))
        return open_bucket(chosen, bucket, wishes).session

    runnable = with_runnable_buckets(chosen, device_id=device_id)
    session = BucketedSession(runnable, chosen.variant, opened.session, open_session)
    if make == "now":
        session.make_sessions()
    return session
