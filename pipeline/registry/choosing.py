"""Which variants of a version are pulled: by default those that this machine can run. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.errors import NotPublishedError, RegistryError
from pipeline.registry.composition import Candidate
from pipeline.registry.references import Reference
from pipeline.registry.signatures import Method
from pipeline.runtime.hardware import Hardware
from pipeline.runtime.loading.variant_selection import find_reasons

USABLE = ("usable",)
ALL = ("all",)


@dataclass(frozen=True)
class Wanted:
    """What is to be pulled.

    Attributes:
        reference: The version.
        variants: `USABLE` for those that this machine can run, `ALL`, or names and targets.
        verifier: What signature its parts must have; None asks for none.
    """

    reference: Reference
    variants: tuple[str, ...] = USABLE
    verifier: Method | None = None


def choose(
    candidates: Sequence[Candidate], wanted: Wanted, hardware: Hardware, *, onnxruntime: str | None
) -> tuple[tuple[Candidate, ...], dict[str, str]]:
    """Returns which variants are pulled, and why the others are not.

    Args:
        candidates: Variants of the version.
        wanted: What is to be pulled.
        hardware: The machine.
        onnxruntime: Version of the installed ONNX Runtime; None leaves versions unchecked.

    Raises:
        NotPublishedError: A variant was named that there is none of.
        RegistryError: None fits this machine.
    """
    if wanted.variants == ALL:
        return tuple(candidates), {}
    if wanted.variants == USABLE:
        reasons = {candidate.name: _reasons(candidate, hardware, onnxruntime) for candidate in candidates}
        chosen = tuple(candidate for candidate in candidates if not reasons[candidate.name])
        left_out = {name: "; ".join(why) for name, why in reasons.items() if why}
        if not chosen:
            lines = "\n".join(f"  {name}: {why}" for name, why in left_out.items())
            raise RegistryError(
                f"no variant of {wanted.reference} fits this machine\n{lines}",
                hint=f"ortprep pull {wanted.reference} --variants all --out DIR   (for another machine)",
            )
        return chosen, left_out
    names = {name for candidate in candidates for name in (candidate.name, candidate.variant.target)}
    unknown = [name for name in wanted.variants if name not in names]
    if unknown:
        raise NotPublishedError(
            f"no such variant of {wanted.reference}: {', '.join(unknown)}\n"
            f"  expected some of {', '.join(candidate.name for candidate in candidates)}"
        )
    named = frozenset(wanted.variants)
    chosen = tuple(c for c in candidates if {c.name, c.variant.target} & named)
    return chosen, {c.name: "not asked for" for c in candidates if c not in chosen}


def _reasons(candidate: Candidate, hardware: Hardware, onnxruntime: str | None) -> tuple[str, ...]:
    """Returns what this machine lacks for a variant; on a machine with several GPUs, for the best of them."""
    devices: list[int | None] = [None, *range(len(hardware.gpus))]
    found = [
        find_reasons(
            candidate.variant,
            hardware=hardware,
            onnxruntime_version=onnxruntime,
            available_providers=None,
            device_id=device,
        )
        for device in devices
    ]
    return min(found, key=len)
