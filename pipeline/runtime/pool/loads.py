"""What a bundle's model asks of a device, as its manifest measured it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from pipeline.bundle.loader_config import LoaderConfig, listed_files, read_loader_config
from pipeline.bundle.manifest import MANIFEST_FILE, PlanFigures, VariantRecord, read_manifest
from pipeline.runtime.pool.devices import Device
from pipeline.runtime.pool.placement import ModelLoad, Placement, Room, place_models

_MB = 2**20


def read_load(name: str, bundle: Path, target: str | None, *, copies: int = 1) -> ModelLoad:
    """Returns what a model costs on devices of a kind: a run's measured milliseconds, and its memory.

    Memory is what the process took beyond the files it maps, and those files once. Where nothing was
    measured, the size of the weights stands for both, which tells models apart well enough to divide them.

    Args:
        name: What to call it.
        bundle: The bundle's folder.
        target: `cpu` or `cuda`; None for the bundle's first.
        copies: How many processes have it; mapped files are there once.

    Raises:
        BundleError: The bundle cannot be read.
    """
    config = read_loader_config(bundle)
    weights = _weights_bytes(config, target)
    if not (bundle / MANIFEST_FILE).exists():
        return ModelLoad(name, weights / _MB, weights)
    for record in read_manifest(bundle).variants:
        figures = _shipped_figures(record)
        if figures is not None and target in (None, record.target):
            memory_mb = figures.gpu_mb or figures.private_mb
            mapped = 0 if figures.gpu_mb else weights
            return ModelLoad(name, figures.steady_ms.median, int(memory_mb.median * _MB) * copies + mapped)
    return ModelLoad(name, weights / _MB, weights)


def place_bundles(
    bundles: Mapping[str, Path], devices: Sequence[Device], *, copies: int = 1
) -> tuple[tuple[ModelLoad, ...], Placement]:
    """Returns what each bundle's model asks for, and the device it goes to.

    Args:
        bundles: Folders by name.
        devices: The devices.
        copies: How many processes of a device have the model.

    Raises:
        BundleError: A bundle cannot be read.
        PoolError: A model fits nowhere.
    """
    kinds = {device.kind for device in devices}
    kind = kinds.pop() if len(kinds) == 1 else None
    loads = tuple(read_load(name, path, kind, copies=copies) for name, path in bundles.items())
    return loads, place_models(loads, [Room(device.name, device.memory_bytes) for device in devices])


def _weights_bytes(config: LoaderConfig, target: str | None) -> int:
    for variant in config.variants:
        if target in (None, variant.target):
            return sum(entry.size_bytes for entry in variant.files)
    return sum(entry.size_bytes for entry in listed_files(config))


def _shipped_figures(record: VariantRecord) -> PlanFigures | None:
    shipped = "prepared" if record.decision is None else record.decision.shipped
    for measurement in record.measurements:
        for plan in measurement.plans:
            if plan.plan == shipped:
                return plan
    return None
