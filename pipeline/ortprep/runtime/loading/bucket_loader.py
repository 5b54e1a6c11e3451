"""The buckets of an opened bundle: which this machine can run, and how their sessions are made."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path

from ortprep.bundle.loader_config import LoaderConfig, Variant
from ortprep.runtime.loading.bucket_selection import find_buckets
from ortprep.runtime.loading.buckets import Buckets, serve_buckets
from ortprep.runtime.loading.load_options import LoadOptions
from ortprep.runtime.loading.opened_bundle import OpenedBundle
from ortprep.runtime.loading.variant_selection import PassedOver, find_reasons_here

log = logging.getLogger(__name__)


def serve_buckets_of(
    opened: OpenedBundle, open_bucket: Callable[[Path, LoaderConfig, Variant, LoadOptions], OpenedBundle]
) -> None:
    """Has the session of an opened bundle run batches of prepared sizes on the variants for them."""
    # Not `opened` itself, which holds the first session.
    root, config, variant, options = opened.root, opened.config, opened.variant, opened.later_options()
    serve_buckets(
        opened.session,
        Buckets(
            lambda: with_runnable_buckets(config, variant, device_id=options.device_id),
            lambda bucket: open_bucket(root, config, bucket, options).session,
        ),
    )


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
