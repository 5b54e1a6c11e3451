"""What a bundle's model takes of a device, as its manifest measured it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from ortprep.bundle.figures import PlanFigures
from ortprep.bundle.loader_config import Variant, listed_files, read_loader_config
from ortprep.bundle.manifest import MANIFEST_FILE, VariantRecord, read_manifest
from ortprep.runtime.loading.buckets import find_buckets
from ortprep.runtime.loading.variant_selection import FASTEST, serves
from ortprep.runtime.placement.assignment import ModelLoad, Placement, Room, place_models
from ortprep.runtime.placement.devices import Device

_MB = 2**20
_PORTABLE = "portable"


def read_load(
    name: str,
    bundle: Path,
    target: str | None,
    *,
    copies: int = 1,
    precision: str = FASTEST,
    buckets: bool = True,
) -> ModelLoad:
    """Returns what a model costs on devices of a kind: a run's measured milliseconds, and its memory.

    Memory is what `copies` processes took beyond the files they map, and those files once, for the variant
    that takes batches of any shapes and for each of its buckets. Where nothing was measured, the size of the
    weights stands for all of it, which is good enough to divide models among devices.
    """
    config = read_loader_config(bundle)
    general = next((v for v in config.variants if serves(v, target, precision)), None)
    if general is None:
        weights = sum(entry.size_bytes for entry in listed_files(config))
        return ModelLoad(name, weights / _MB, weights)
    measured = read_figures(bundle)
    figures = measured.get(general.name)
    bucket_variants = find_buckets(config, general) if buckets else ()
    memory = sum(
        _memory(variant, measured.get(variant.name), copies) for variant in (general, *bucket_variants)
    )
    cost = _weights_bytes(general) / _MB if figures is None else figures.steady_ms.median
    return ModelLoad(name, cost, memory)


def place_bundles(
    bundles: Mapping[str, Path],
    devices: Sequence[Device],
    *,
    copies: int = 1,
    precision: str = FASTEST,
    buckets: bool = True,
) -> tuple[tuple[ModelLoad, ...], Placement]:
    """Returns what each bundle's model takes, and the device it goes to.

    Raises:
        BundleError: A bundle cannot be read.
        PoolError: A model fits nowhere.
    """
    kinds = {device.kind for device in devices}
    kind = kinds.pop() if len(kinds) == 1 else None
    loads = tuple(
        read_load(name, path, kind, copies=copies, precision=precision, buckets=buckets)
        for name, path in bundles.items()
    )
    return loads, place_models(loads, [Room(device.name, device.memory_bytes) for device in devices])


def read_figures(bundle: Path) -> dict[str, PlanFigures]:
    """Returns what was measured of variants, by name; the portable one is measured with those of a target."""
    if not (bundle / MANIFEST_FILE).exists():
        return {}
    by_variant: dict[str, PlanFigures] = {}
    for record in read_manifest(bundle).variants:
        figures = _shipped_figures(record)
        if figures is not None:
            by_variant.setdefault(_PORTABLE if figures.plan == _PORTABLE else record.name, figures)
    return by_variant


def _memory(variant: Variant, figures: PlanFigures | None, copies: int) -> int:
    weights = _weights_bytes(variant)
    if figures is None:
        return weights
    memory_mb = figures.gpu_mb or figures.private_mb
    mapped = 0 if figures.gpu_mb else weights
    return int(memory_mb.median * _MB) * copies + mapped


def _weights_bytes(variant: Variant) -> int:
    return sum(entry.size_bytes for entry in variant.files)


def _shipped_figures(record: VariantRecord) -> PlanFigures | None:
    shipped = "prepared" if record.decision is None else record.decision.shipped
    for measurement in record.measurements:
        for plan in measurement.plans:
            if plan.plan == shipped:
                return plan
    return None
