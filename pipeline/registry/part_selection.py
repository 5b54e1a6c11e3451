"""Selection of the part with the best variant that a machine can run. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ortprep.bundle.loader_config import LoaderConfig, Variant
from ortprep.errors import NotPublishedError, RegistryError
from ortprep.registry.documents import Part
from ortprep.registry.part_bundle import PORTABLE
from ortprep.registry.references import VersionRef
from ortprep.runtime.loading.variant_selection import find_reasons, needs_gpu
from ortprep.runtime.machine.hardware import Hardware


def choose_part(
    parts: Sequence[tuple[Part, LoaderConfig]],
    reference: VersionRef,
    hardware: Hardware,
    *,
    onnxruntime: str | None,
    wanted: str | None = None,
) -> tuple[Part, Mapping[str, str]]:
    """Returns the best part for a machine, and by digest why the others are not.

    It has a variant for the GPU, else one for the processor, else the portable one, which every part has.
    Among equals it is the one prepared last. `onnxruntime` is the installed version, None to check none;
    `wanted` is the digest of a part for another machine.

    Raises:
        NotPublishedError: The wanted part is not there.
        RegistryError: None fits this machine.
    """
    if wanted is not None:
        found = [part for part, _ in parts if part.digest == wanted]
        if not found:
            known = ", ".join(part.digest for part, _ in parts)
            raise NotPublishedError(f"no such part of {reference}: {wanted}\n  expected one of {known}")
        return found[0], {part.digest: "not asked for" for part, _ in parts if part is not found[0]}
    fitting: list[tuple[list[int], Part]] = []
    left_out: dict[str, str] = {}
    for part, config in sorted(
        parts, key=lambda one: (one[0].summary.created_at, one[0].digest), reverse=True
    ):
        reasons = {one.name: _reasons(one, hardware, onnxruntime) for one in config.variants}
        ranks = sorted(_rank(one) for one in config.variants if not reasons[one.name])
        if ranks:
            fitting.append((ranks, part))
            left_out[part.digest] = "another part fits this machine better"
        else:
            left_out[part.digest] = "; ".join(f"{name}: {', '.join(why)}" for name, why in reasons.items())
    if not fitting:
        lines = "\n".join(f"  {digest}: {why}" for digest, why in left_out.items())
        raise RegistryError(
            f"no part of {reference} fits this machine\n{lines}",
            hint=f"ortprep pull {reference} --part DIGEST --out DIR   (for another machine)",
        )
    _, chosen = min(fitting, key=lambda one: one[0])
    del left_out[chosen.digest]
    return chosen, left_out


def _rank(variant: Variant) -> int:
    if variant.bucket:
        return 3
    if needs_gpu(variant.requirements):
        return 0
    return 2 if variant.name == PORTABLE else 1


def _reasons(variant: Variant, hardware: Hardware, onnxruntime: str | None) -> tuple[str, ...]:
    """Returns what this machine lacks for a variant; on a machine with several GPUs, for the best of them."""
    found = [
        find_reasons(
            variant,
            hardware=hardware,
            onnxruntime_version=onnxruntime,
            available_providers=None,
            device_id=device,
        )
        for device in (None, *range(len(hardware.gpus)))
    ]
    return min(found, key=len)
