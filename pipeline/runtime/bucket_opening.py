"""From a bundle that was opened to its shape buckets: which this machine can run, and sessions of them."""

from __future__ import annotations

import dataclasses
import logging
from typing import TYPE_CHECKING

from pipeline.errors import LoadError
from pipeline.runtime.bucket_choice import find_buckets
from pipeline.runtime.hardware import read_hardware
from pipeline.runtime.loading.bundle_loader import LoadOptions, OpenedBundle, open_folder
from pipeline.runtime.loading.session import import_onnxruntime
from pipeline.runtime.loading.variant_selection import FASTEST, PassedOver, find_reasons, needs_gpu

if TYPE_CHECKING:
    from pathlib import Path

    from pipeline.bundle.loader_config import LoaderConfig, Variant

log = logging.getLogger(__name__)


def with_runnable_buckets(opened: OpenedBundle, *, device_id: int | None) -> LoaderConfig:
    """Returns the bundle with no variants but the one taken and those of its buckets this machine can run.

    Args:
        opened: The bundle, and the variant that was taken.
        device_id: CUDA ordinal of the GPU; None for what is recorded, else the first.
    """
    buckets = find_buckets(opened.config, opened.variant)
    runnable = [bucket for bucket in buckets if _is_runnable(opened.config, bucket, device_id)]
    return dataclasses.replace(opened.config, variants=(opened.variant, *runnable))


def open_bucket(root: Path, config: LoaderConfig, bucket: Variant, options: LoadOptions) -> OpenedBundle:
    """Opens one bucket of a bundle, as `load` opens a variant by its name.

    Args:
        root: The bundle's folder.
        config: Its loader config.
        bucket: The variant.
        options: As for the variant for all shapes.

    Raises:
        LoadError: The bundle was replaced by another build, whose answers must not be mixed with this one's.
        PipelineError: As `pipeline.runtime.load` does.
    """
    named = options.replace(target=bucket.name, precision=FASTEST, plan="steady")
    found = open_folder(str(root), named)
    if found.config != config:
        raise LoadError(
            f"bundle was replaced by another build: {root}\n"
            f"  expected the one whose answers this one's would be mixed with",
            hint="load it again",
        )
    return found


def _is_runnable(config: LoaderConfig, bucket: Variant, device_id: int | None) -> bool:
    onnxruntime = import_onnxruntime()
    reasons = find_reasons(
        bucket,
        hardware=read_hardware(gpus=needs_gpu(bucket.requirements)),
        onnxruntime_version=onnxruntime.__version__,
        available_providers=onnxruntime.get_available_providers(),
        device_id=device_id,
    )
    if reasons:
        log.warning("%s: bucket passed over: %s", config.name, PassedOver(bucket.name, reasons))
    return not reasons
