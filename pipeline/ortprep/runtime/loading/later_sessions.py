"""Sessions that follow the one a load returned: the steady one of two phases, and those of buckets."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ortprep.bundle.loader_config import LoaderConfig, Variant
from ortprep.runtime.loading.bucket_selection import find_buckets
from ortprep.runtime.loading.buckets import Buckets, serve_buckets
from ortprep.runtime.loading.caller_options import copy_of_options
from ortprep.runtime.loading.load_options import NO_DEADLINE, LoadOptions
from ortprep.runtime.loading.opened_bundle import OpenedBundle, make_session
from ortprep.runtime.loading.phases import serve_in_phases
from ortprep.runtime.loading.variant_selection import PassedOver, find_reasons_here

if TYPE_CHECKING:
    import onnxruntime

    from ortprep.bundle.session_record import SessionPlan
    from ortprep.runtime.loading.load_options import Cancellation

log = logging.getLogger(__name__)

_PARALLEL_PREPACKING = "session.prepack.enable_parallel"


def serve_later_sessions(
    opened: OpenedBundle,
    open_bucket: Callable[[Path, LoaderConfig, Variant, LoadOptions], OpenedBundle],
    *,
    has_two_phases: bool,
) -> None:
    """Has an opened bundle's session change to its steady phase and use its buckets, as the options say.

    No function here keeps `opened`, which holds the first session.
    """
    resolved, session = opened.resolved, opened.session
    options = opened.options.replace(
        deadline=NO_DEADLINE,
        replacement=None,
        session_options=copy_of_options(opened.options.session_options, session, opened.plan),
    )
    if options.buckets and resolved.has_buckets:
        root, config, variant = opened.root, opened.config, opened.variant
        serve_buckets(
            session,
            Buckets(
                lambda: with_runnable_buckets(config, variant, device_id=options.device_id),
                lambda bucket: open_bucket(root, config, bucket, options).session,
            ),
        )
    if has_two_phases:
        steady = options.replace(phases="steady", adapt=_in_background(options))

        def build(cancellation: Cancellation) -> onnxruntime.InferenceSession:
            _, made = make_session(resolved, steady, cancellation=cancellation)
            return made

        name = f"variant {resolved.name} of {resolved.root}"
        serve_in_phases(session, build, name=name, at_once=options.check == "golden")


def _in_background(options: LoadOptions) -> Any:
    """Returns what adapts a plan so that its session is created by one thread, beside runs."""
    adapt = options.adapt

    def adapt_in_background(plan: SessionPlan) -> SessionPlan:
        plan = plan if adapt is None else adapt(plan)
        entries = {**plan.session_options.config_entries}
        entries.pop(_PARALLEL_PREPACKING, None)
        return plan._replace(session_options=plan.session_options._replace(config_entries=entries))

    return adapt_in_background


def with_runnable_buckets(config: LoaderConfig, variant: Variant, *, device_id: int | None) -> LoaderConfig:
    """Returns a bundle with one variant and those of its buckets that this machine can run.

    The reasons against the others are logged at WARNING.
    """
    runnable = []
    for bucket in find_buckets(config, variant):
        reasons = find_reasons_here(bucket, device_id=device_id)
        if reasons:
            log.warning("%s: bucket passed over: %s", config.name, PassedOver(bucket.name, reasons))
        else:
            runnable.append(bucket)
    return dataclasses.replace(config, variants=(variant, *runnable))
