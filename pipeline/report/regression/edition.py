"""A variant as one manifest tells of it, and its counterpart in another one. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.bundle.digest import PREFIX
from pipeline.bundle.manifest import Manifest, PartOrigin, VariantRecord
from pipeline.measuring.shipped import shipped_plan

PORTABLE = "portable"

_LEAST_DIGITS = 8
"""Of a part's digest, in the name of a variant that has another one's name."""


@dataclass(frozen=True)
class Edition:
    """A variant of a bundle.

    Attributes:
        record: How it was made.
        base: Its name where it was prepared; in a bundle from several machines it may be called otherwise.
        environment: Versions and hardware it was made with.
        size_bytes: Of the files that a session of it reads; None if there are none.
    """

    record: VariantRecord
    base: str
    environment: Mapping[str, Any]
    size_bytes: int | None


def list_editions(manifest: Manifest) -> tuple[Edition, ...]:
    """Returns the variants of a bundle, in its order."""
    return tuple(_edition(manifest, record) for record in manifest.variants)


def _edition(manifest: Manifest, record: VariantRecord) -> Edition:
    part = next((part for part in manifest.parts if record.name in part.variants), None)
    # Where the portable variant was faster, its files are all there is.
    folder = PORTABLE if shipped_plan(record) == PORTABLE else record.name
    sizes = [entry.size_bytes for entry in manifest.files if entry.path.startswith(f"{folder}/")]
    return Edition(
        record=record,
        base=record.name if part is None else _name_in(part, record.name),
        environment=manifest.environment if part is None else part.environment,
        size_bytes=sum(sizes) if sizes else None,
    )


def _name_in(part: PartOrigin, name: str) -> str:
    stem, _, digits = name.rpartition("-")
    is_added = len(digits) >= _LEAST_DIGITS and part.digest.startswith(PREFIX + digits)
    return stem if stem and is_added else name


def read_hardware_facts(edition: Edition) -> dict[str, str]:
    """Returns the hardware that an edition's figures depend on, by what it is; {} if it was not recorded."""
    hardware = edition.environment.get("hardware")
    if not isinstance(hardware, Mapping):
        return {}
    facts = {
        "architecture": str(hardware.get("machine", "?")),
        "processor": str(hardware.get("cpu_model") or "?"),
        "cores": str(hardware.get("cores", "?")),
    }
    if edition.record.target != "cpu":
        gpu = first_gpu(edition.environment)
        facts["GPU"] = f"{gpu.get('name', '?')}, compute capability {_capability(gpu)}" if gpu else "none"
    return facts


def first_gpu(environment: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns what was recorded of the GPU that was measured on; {} if there was none."""
    hardware = environment.get("hardware")
    gpus = hardware.get("gpus") if isinstance(hardware, Mapping) else None
    first = gpus[0] if isinstance(gpus, list | tuple) and gpus else None
    return first if isinstance(first, Mapping) else {}


def _capability(gpu: Mapping[str, Any]) -> str:
    found = gpu.get("compute_capability")
    return ".".join(map(str, found)) if isinstance(found, list | tuple) else "?"


def pair_editions(
    old: Sequence[Edition], new: Sequence[Edition]
) -> Iterator[tuple[Edition | None, Edition | None]]:
    """Yields every variant of both with its counterpart: same target and name, best on the same hardware.

    Yields:
        (old, new); None in the place of a counterpart where there is none. What is old comes first, in order.
    """
    partners: dict[int, int] = {}
    for fits in (_is_same_on_same_hardware, _is_same):
        for index, one in enumerate(old):
            if index not in partners:
                free = _first_free(one, new, set(partners.values()), fits)
                partners |= {} if free is None else {index: free}
    for index, one in enumerate(old):
        yield one, new[partners[index]] if index in partners else None
    for index, other in enumerate(new):
        if index not in partners.values():
            yield None, other


def _first_free(
    one: Edition, new: Sequence[Edition], taken: set[int], fits: Callable[[Edition, Edition], bool]
) -> int | None:
    return next((i for i, other in enumerate(new) if i not in taken and fits(one, other)), None)


def _is_same(one: Edition, other: Edition) -> bool:
    return (one.record.target, one.base) == (other.record.target, other.base)


def _is_same_on_same_hardware(one: Edition, other: Edition) -> bool:
    return _is_same(one, other) and read_hardware_facts(one) == read_hardware_facts(other)
