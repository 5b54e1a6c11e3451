"""Which variant of a bundle a machine can run: a function of values, with reasons."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ortprep.bundle.loader_config import SOURCE_PRECISION, LoaderConfig, Requirements, Variant, VersionRange
from ortprep.runtime.loading.session import CUDA, import_onnxruntime
from ortprep.runtime.machine.hardware import Hardware, read_hardware
from ortprep.versions import parse_version

if TYPE_CHECKING:
    from ortprep.runtime.loading.load_options import LoadOptions

FASTEST = "fastest-within-gate"
"""Precision of a job that takes any: variants are in order of speed, and all of them passed their gate."""


class PassedOver(NamedTuple):
    """A variant that was not taken.

    Attributes:
        name: The variant.
        reasons: Everything this machine lacks for it.
    """

    name: str
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.name}: {'; '.join(self.reasons)}"


class Selection(NamedTuple):
    """What `select_variant` decided.

    Attributes:
        variant: The first variant whose requirements are met, None if there is none.
        passed_over: Variants before it that serve the target; all that do if there is none.
    """

    variant: Variant | None
    passed_over: tuple[PassedOver, ...]


class Machine(NamedTuple):
    """What requirements are compared with.

    Attributes:
        onnxruntime: Version of the installed ONNX Runtime; None leaves versions unchecked.
        providers: What it offers; None leaves providers unchecked.
    """

    hardware: Hardware
    onnxruntime: str | None
    providers: Sequence[str] | None = None


def read_machine(*, gpus: bool) -> Machine:
    """Returns this machine; its GPUs are read if `gpus`."""
    onnxruntime = import_onnxruntime()
    return Machine(read_hardware(gpus=gpus), onnxruntime.__version__, onnxruntime.get_available_providers())


def select_variant(config: LoaderConfig, options: LoadOptions, machine: Machine) -> Selection:
    """Picks the first variant, in the bundle's order of preference, whose requirements a machine meets."""
    passed_over: list[PassedOver] = []
    for variant in find_candidates(config, options):
        reasons = find_reasons(variant, machine, device_id=options.device_id)
        if not reasons:
            return Selection(variant, tuple(passed_over))
        passed_over.append(PassedOver(variant.name, reasons))
    return Selection(None, tuple(passed_over))


def find_candidates(config: LoaderConfig, options: LoadOptions) -> list[Variant]:
    """Returns the variants that a job requests, in the bundle's order, whatever they require."""
    as_source = options.replacement is not None
    return [v for v in config.variants if serves(v, options.target, options.precision, as_source=as_source)]


def find_reasons(variant: Variant, machine: Machine, *, device_id: int | None = None) -> tuple[str, ...]:
    """Returns everything a machine lacks for a variant.

    Args:
        variant: The variant.
        machine: The machine.
        device_id: CUDA ordinal of the GPU that is to be used; None for what is recorded, else the first.
    """
    return find_lacks(variant.requirements, machine, _choose_device(variant, device_id))


def find_lacks(needs: Requirements, machine: Machine, device_id: int) -> tuple[str, ...]:
    """Returns everything of what is required that a machine lacks, on the GPU with that CUDA ordinal."""
    return (
        *_version_reasons(needs.onnxruntime, machine.onnxruntime),
        *_provider_reasons(needs, machine.providers),
        *_processor_reasons(needs, machine.hardware),
        *_gpu_reasons(needs, machine.hardware, device_id),
    )


def find_reasons_here(variant: Variant, *, device_id: int | None = None) -> tuple[str, ...]:
    """Returns everything this machine lacks for a variant; its GPUs are looked at only if it needs one."""
    machine = read_machine(gpus=needs_gpu(variant.requirements))
    return find_reasons(variant, machine, device_id=device_id)


def serves(
    variant: Variant, target: str | None, precision: str = FASTEST, *, as_source: bool = False
) -> bool:
    """Returns whether a variant is what a job requests: its target, its name, or anything, in that precision.

    With `as_source` it also has to be in the source's precision, or in one that the application itself has
    judged.
    """
    if as_source and variant.precision != SOURCE_PRECISION and not variant.judged:
        return False
    if precision not in (FASTEST, variant.precision):
        return False
    return target in (None, variant.target, variant.name)


def needs_gpu(requirements: Requirements) -> bool:
    """Returns whether a variant runs on a GPU."""
    return CUDA in requirements.providers or requirements.compute_capability is not None


def _version_reasons(needed: VersionRange, version: str | None) -> Iterator[str]:
    """Yields why a version of ONNX Runtime does not do."""
    if version is None:
        return
    installed, minimum = parse_version(version), parse_version(needed.minimum)
    below = None if needed.below is None else parse_version(needed.below)
    too_new = installed is not None and below is not None and installed >= below
    if installed is None or minimum is None or installed < minimum or too_new:
        upper = "" if needed.below is None else f" and < {needed.below}"
        yield f"expected ONNX Runtime >= {needed.minimum}{upper}, got {version}"


def _provider_reasons(needs: Requirements, available: Sequence[str] | None) -> Iterator[str]:
    missing = [] if available is None else [name for name in needs.providers if name not in available]
    if missing:
        yield f"expected ONNX Runtime with {', '.join(missing)}, got {', '.join(available or ())}"


def _processor_reasons(needs: Requirements, hardware: Hardware) -> Iterator[str]:
    """Yields what the processor lacks, or has too much."""
    if needs.machine is not None and needs.machine != hardware.machine:
        yield f"expected a {needs.machine} processor, got {hardware.machine}"
    features = frozenset(hardware.cpu_features)
    missing = [flag for flag in needs.cpu_features if flag not in features]
    if missing:
        yield f"expected a processor with {', '.join(missing)}, got one without"
    unwanted = [flag for flag in needs.cpu_features_absent if flag in features]
    if unwanted:
        yield f"expected a processor without {', '.join(unwanted)}, got one with it"


def _choose_device(variant: Variant, device_id: int | None) -> int:
    """Returns the CUDA ordinal the session will be on, -1 if what the variant records is none."""
    if device_id is not None:
        return device_id
    options = next((provider.options for provider in variant.providers if provider.name == CUDA), {})
    recorded = options.get("device_id", "0")
    return int(recorded) if re.fullmatch("[0-9]{1,9}", recorded) else -1


def _gpu_reasons(needs: Requirements, hardware: Hardware, ordinal: int) -> Iterator[str]:
    """Yields why a CUDA device does not do."""
    if not needs_gpu(needs):
        return
    if not 0 <= ordinal < len(hardware.gpus):
        present = f"{len(hardware.gpus)} CUDA device(s)" if hardware.gpus else "no CUDA device or driver"
        yield f"expected CUDA device {ordinal}, got {present}"
        return
    capability, needed = hardware.gpus[ordinal].compute_capability, needs.compute_capability
    if needed is not None and not needed.minimum <= capability < needed.below:
        low, high, actual = (".".join(map(str, pair)) for pair in (needed.minimum, needed.below, capability))
        yield f"expected compute capability >= {low} and < {high}, got {actual} (CUDA device {ordinal})"
