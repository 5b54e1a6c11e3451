"""Selection of the part with the best variant that a machine can run. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from ortprep.bundle.loader_config import LoaderConfig, Variant
from ortprep.errors import NotPublishedError, RegistryError
from ortprep.quoting import quoted
from ortprep.registry.documents import Part
from ortprep.registry.part_bundle import PORTABLE
from ortprep.registry.references import VersionRef
from ortprep.runtime.loading.variant_selection import Machine, find_reasons, needs_gpu
from ortprep.runtime.machine.hardware import Hardware


def choose_part(
    parts: Sequence[tuple[Part, LoaderConfig]],
    reference: VersionRef,
    hardware: Hardware,
    *,
    onnxruntime: str | None,
    digest: str | None = None,
) -> Part:
    """Returns the best part for a machine.

    It has a variant for the GPU, else one for the processor, else the portable one, which every part has.
    Among equals it is the one prepared last. `onnxruntime` is the installed version, None to check none;
    `digest` names a part for another machine.

    Raises:
        NotPublishedError: The named part is not there.
        RegistryError: None fits this machine; every part is named with the reason.
    """
    if digest is not None:
        named = next((part for part, _ in parts if part.digest == digest), None)
        if named is None:
            digests = ", ".join(part.digest for part, _ in parts)
            raise NotPublishedError(f"no such part of {reference}: {digest}\n  expected one of {digests}")
        return named
    fitting: list[tuple[list[int], Part]] = []
    lines = []
    newest_first = sorted(parts, key=lambda pair: (pair[0].summary.created_at, pair[0].digest), reverse=True)
    for part, config in newest_first:
        reasons = [(variant, _reasons(variant, hardware, onnxruntime)) for variant in config.variants]
        ranks = sorted(_rank(variant) for variant, lacks in reasons if not lacks)
        if ranks:
            fitting.append((ranks, part))
        why = "; ".join(f"{variant.name}: {', '.join(lacks)}" for variant, lacks in reasons)
        lines.append(f"  {part.digest}: {why}")
    if not fitting:
        raise RegistryError(
            "\n".join((f"no part of {reference} fits this machine", *lines)),
            hint=f"ortprep pull {quoted(reference)} --part DIGEST --out DIR   (for another machine)",
        )
    return min(fitting, key=lambda ranked: ranked[0])[1]


def _rank(variant: Variant) -> int:
    if variant.bucket:
        return 3
    if needs_gpu(variant.requirements):
        return 0
    return 2 if variant.name == PORTABLE else 1


def _reasons(variant: Variant, hardware: Hardware, onnxruntime: str | None) -> tuple[str, ...]:
    """Returns what this machine lacks for a variant; on a machine with several GPUs, for the best of them."""
    machine, devices = Machine(hardware, onnxruntime), (None, *range(len(hardware.gpus)))
    return min((find_reasons(variant, machine, device_id=device) for device in devices), key=len)
