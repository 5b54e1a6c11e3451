"""Which model goes to which device, which devices there are, and what a process on one of them sees.

Models are placed by longest processing time first, with memory as a constraint.
Graham's rule (Bounds on multiprocessing timing anomalies, 1969) is within 4/3 of the best makespan where
memory binds nobody. Devices that stay empty then get further copies of whatever is the bottleneck.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ortprep.bundle.figures import PlanFigures
from ortprep.bundle.loader_config import Variant, listed_files, read_loader_config
from ortprep.bundle.manifest import MANIFEST_FILE, VariantRecord, read_manifest
from ortprep.errors import PoolError
from ortprep.runtime.loading.variant_selection import FASTEST, serves
from ortprep.runtime.machine.hardware import Hardware

_MB = 2**20
_PORTABLE = "portable"
_FORKED = "forked"  # figures of forked workers, which share the memory of the process that loaded


@dataclass(frozen=True)
class Device:
    """A place for workers.

    Attributes:
        kind: `cpu` or `cuda`.
        ordinal: CUDA ordinal as this process sees it; 0 for the CPU.
        memory_bytes: What models may take there: of the GPU, or of the machine; None for no limit.
    """

    kind: Literal["cpu", "cuda"]
    ordinal: int = 0
    memory_bytes: int | None = None

    @property
    def name(self) -> str:
        """As users write it."""
        return "cpu" if self.kind == "cpu" else f"cuda:{self.ordinal}"


@dataclass(frozen=True)
class ModelLoad:
    """What a model takes of a device.

    Attributes:
        name: Name of the model.
        cost_ms: What one request takes, or any other measure of work, as long as all use the same.
        memory_bytes: What one copy takes on the device.
    """

    name: str
    cost_ms: float
    memory_bytes: int


@dataclass(frozen=True)
class Assignment:
    """What a device serves.

    Attributes:
        device: Its name.
        models: Names, in the order they were placed.
        cost_ms: Work per round of one request of every model, copies sharing theirs.
        memory_bytes: What its models take.
    """

    device: str
    models: tuple[str, ...]
    cost_ms: float
    memory_bytes: int


@dataclass(frozen=True)
class Placement:
    """Where every model is, and why.

    Attributes:
        assignments: One per device, in the order they were given.
        makespan_ms: Work of the busiest device: what a round takes at least.
        reasons: A sentence per decision, in order.
    """

    assignments: tuple[Assignment, ...]
    makespan_ms: float
    reasons: tuple[str, ...]


def place_models(models: Sequence[ModelLoad], devices: Sequence[Device]) -> Placement:
    """Places every model on a device, and on more where devices would stay empty.

    Args:
        models: Names are unique.
        devices: Devices of equal speed.

    Raises:
        PoolError: A model fits nowhere beside those placed before it.
    """
    on: list[list[ModelLoad]] = [[] for _ in devices]
    reasons: list[str] = []

    def share(model: ModelLoad) -> float:
        return model.cost_ms / max(1, sum(model in placed for placed in on))

    def cost(at: int) -> float:
        return sum(map(share, on[at]))

    def fits(model: ModelLoad, at: int) -> bool:
        limit = devices[at].memory_bytes
        return limit is None or _sum_memory(on[at]) + model.memory_bytes <= limit

    for model in sorted(models, key=lambda model: (-model.cost_ms, -model.memory_bytes, model.name)):
        fitting = [at for at in range(len(devices)) if fits(model, at)]
        if not fitting:
            raise _no_room(model, devices, on)
        # The device with least to do, of equals the one with most memory left.
        at = min(fitting, key=lambda at: (cost(at), _sum_memory(on[at]), at))
        why = ", which was least loaded" if len(devices) > 1 else ""
        reasons.append(f"{model.name} ({_ms(model.cost_ms)}) to {devices[at].name}{why}")
        on[at].append(model)
    for at in [at for at, placed in enumerate(on) if not placed]:
        candidates = [model for model in models if fits(model, at)]
        if candidates:
            model = max(candidates, key=lambda model: (share(model), model.name))
            copy = f"another copy of {model.name} ({_ms(share(model))} per copy)"
            reasons.append(f"{copy} to {devices[at].name}, which was empty")
            on[at].append(model)
    assignments = tuple(
        Assignment(device.name, tuple(one.name for one in on[at]), round(cost(at), 6), _sum_memory(on[at]))
        for at, device in enumerate(devices)
    )
    makespan_ms = max((assignment.cost_ms for assignment in assignments), default=0.0)
    return Placement(assignments, makespan_ms, tuple(reasons))


def _sum_memory(models: Sequence[ModelLoad]) -> int:
    return sum(model.memory_bytes for model in models)


def _no_room(model: ModelLoad, devices: Sequence[Device], on: Sequence[Sequence[ModelLoad]]) -> PoolError:
    """Returns the error for a model that no device has room for."""
    lines = "".join(
        f"\n  {device.name}: {_mb(_sum_memory(placed))} of {_mb(device.memory_bytes or 0)} taken"
        for device, placed in zip(devices, on, strict=True)
    )
    return PoolError(
        f"no device has room for {model.name}\n  expected {_mb(model.memory_bytes)} free{lines}",
        hint="give the pool more devices, or fewer models",
    )


def _mb(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:.0f} MB"


def _ms(value: float) -> str:
    return f"{value:.3g} ms"


def resolve_devices(requested: str | Sequence[str], hardware: Hardware) -> tuple[Device, ...]:
    """Returns the devices that were named.

    Args:
        requested: `all` (every GPU, or the CPU where there is none), one device, or several.
        hardware: The machine.

    Raises:
        PoolError: A name is not a device, is named twice, or is not on this machine.
    """
    gpus = tuple(Device("cuda", n, gpu.memory_bytes) for n, gpu in enumerate(hardware.gpus))
    cpu = Device("cpu", 0, hardware.memory_bytes)
    names = (requested,) if isinstance(requested, str) else tuple(requested)
    if names == ("all",):
        return gpus or (cpu,)
    by_name = {device.name: device for device in (cpu, *gpus)}
    offered = ", ".join(by_name)
    if not names or len(set(names)) != len(names):
        raise PoolError(
            f"bad devices: {list(names)}\n  expected each once, of {offered}",
            hint="PoolConfig(workers_per_device=2) for several workers on one",
        )
    for name in names:
        if name not in by_name:
            raise PoolError(
                f"no such device on this machine: {name!r}\n  expected all, or some of {offered}",
                hint="nvidia-smi -L",
            )
    return tuple(by_name[name] for name in names)


def device_variables(device: Device, visible: str | None) -> dict[str, str]:
    """Returns variables of the environment of a process that works on one device and sees no other GPU.

    Args:
        device: The device. In the process, a GPU has CUDA ordinal 0.
        visible: `CUDA_VISIBLE_DEVICES` of this process; None if it is not set.
    """
    if device.kind == "cpu":
        return {"CUDA_VISIBLE_DEVICES": ""}  # else a bundle that prefers CUDA would have it
    names = [name.strip() for name in visible.split(",")] if visible else []
    token = names[device.ordinal] if device.ordinal < len(names) else str(device.ordinal)
    return {"CUDA_VISIBLE_DEVICES": token, "CUDA_MODULE_LOADING": "LAZY"}


def read_load(
    name: str,
    bundle: Path,
    target: str | None,
    *,
    copies: int = 1,
    precision: str = FASTEST,
) -> ModelLoad:
    """Returns what a model costs on devices of a kind: a run's measured milliseconds, and its memory.

    Memory is what `copies` processes took beyond the files they map, and those files once. Where nothing was
    measured, the size of the weights stands for all of it, which is good enough to divide models among
    devices.
    """
    config = read_loader_config(bundle)
    variant = next((v for v in config.variants if serves(v, target, precision)), None)
    if variant is None:
        weights = sum(entry.size_bytes for entry in listed_files(config))
        return ModelLoad(name, weights / _MB, weights)
    figures = read_figures(bundle).get(variant.name)
    cost = _weights_bytes(variant) / _MB if figures is None else figures.steady_ms.median
    return ModelLoad(name, cost, _memory(variant, figures, copies))


def place_bundles(
    bundles: Mapping[str, Path],
    devices: Sequence[Device],
    *,
    copies: int = 1,
    precision: str = FASTEST,
) -> tuple[tuple[ModelLoad, ...], Placement]:
    """Returns what each bundle's model takes, and the device it goes to.

    Raises:
        BundleError: A bundle cannot be read.
        PoolError: A model fits nowhere.
    """
    kinds = {device.kind for device in devices}
    kind = kinds.pop() if len(kinds) == 1 else None
    loads = tuple(
        read_load(name, path, kind, copies=copies, precision=precision) for name, path in bundles.items()
    )
    return loads, place_models(loads, devices)


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
            if plan.plan == shipped and measurement.cache != _FORKED:
                return plan
    return None
