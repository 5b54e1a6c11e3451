"""Kinds of hardware in a fleet: `configs/fleet.yaml`, and which node of a cluster is of which kind.

    hardware:
      cpu-avx512: {target: cpu, labels: {ortprep.io/avx512f: "true"}}
      h100: {target: cuda, labels: {ray.io/accelerator-type: H100}}

Labels are selected as Ray selects them (https://docs.ray.io/en/latest/ray-core/scheduling/labels.html):
`VALUE`, `!VALUE`, `in(A, B)` and `!in(A, B)`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, get_args

from pydantic import AfterValidator, Field, field_validator

from ortprep.spec.fields import Name, Positive, SpecSection, Target
from ortprep.spec.validation import check, locate
from ortprep.spec.yaml_text import build_error, read_yaml

FLEET_FILE = "fleet.yaml"
"""The fleet file, beside the specs."""

_PART = "[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?"
_LABEL_KEY = rf"^([A-Za-z0-9]([A-Za-z0-9.-]{{0,251}}[A-Za-z0-9])?/)?{_PART}\Z"
_SELECTOR = rf"^!?({_PART}|in\({_PART}(, ?{_PART})*\))\Z"
_RAYS_OWN = frozenset({"CPU", "GPU", "memory", "object_store_memory"})


def _check_resources(resources: Mapping[str, float]) -> Mapping[str, float]:
    reserved = [name for name in resources if name in _RAYS_OWN]
    if reserved:
        raise ValueError(f"expected custom resources; {reserved[0]} is reserved by target")
    return resources


def _check_label(text: str, pattern: str) -> str:
    if not re.match(pattern, text):
        raise ValueError(
            "expected a label's key as in ray.io/accelerator-type, and VALUE, !VALUE, in(A, B) or !in(A, B) "
            "of letters, digits, '_', '.' and '-'"
        )
    return text


LabelKey = Annotated[str, AfterValidator(partial(_check_label, pattern=_LABEL_KEY))]
Selector = Annotated[str, AfterValidator(partial(_check_label, pattern=_SELECTOR))]


class HardwareKind(SpecSection):
    """One kind of hardware: what is prepared there, and which nodes are of it."""

    target: Target = Field(description="Execution provider to prepare for.")
    labels: Mapping[LabelKey, Selector] = Field(
        default={}, validate_default=True, description="Labels that a node of the kind has, by key."
    )
    resources: Annotated[Mapping[str, Positive], AfterValidator(_check_resources)] = Field(
        default={},
        validate_default=True,
        description="Custom resources that a build takes on a node, by name.",
    )

    def fits(self, labels: Mapping[str, str], resources: Mapping[str, float]) -> bool:
        """Returns whether a node with these labels and total resources (`CPU`, `GPU`, …) is of this kind."""
        devices = ("CPU", "GPU") if self.target == "cuda" else ("CPU",)
        if any(resources.get(device, 0) < 1 for device in devices):
            return False
        if any(resources.get(name, 0) < amount for name, amount in self.resources.items()):
            return False
        return all(_is_selected(selector, labels.get(key)) for key, selector in self.labels.items())


class Fleet(SpecSection):
    """Every kind of hardware that bundles are prepared on."""

    hardware: Annotated[Mapping[Name, HardwareKind], Field(min_length=1)] = Field(
        description="Kinds, by name."
    )

    @field_validator("hardware")
    @classmethod
    def _no_name_misleads(cls, kinds: Mapping[str, HardwareKind]) -> Mapping[str, HardwareKind]:
        for name, kind in kinds.items():
            if name in get_args(Target) and name != kind.target:
                raise ValueError(f"expected another name: {name!r} is reserved")
        return kinds


DEFAULT_FLEET = Fleet(hardware={target: HardwareKind(target=target) for target in ("cpu", "cuda")})
"""The fleet without a file: any node is a `cpu`, any node with a GPU a `cuda`."""


def _is_selected(selector: str, value: str | None) -> bool:
    negated, inner = selector.startswith("!"), selector.removeprefix("!")
    is_list = inner.startswith("in(")
    values = [part.strip() for part in inner[3:-1].split(",")] if is_list else [inner]
    return (value in values) != negated


def read_fleet(path: Path | None, *, configs: Path) -> Fleet:
    """Reads the kinds of hardware.

    Args:
        path: The file; None for `fleet.yaml` beside the specs, or `DEFAULT_FLEET` if there is none.
        configs: Folder of the specs.

    Raises:
        SpecError: The file cannot be read or is wrong; the message lists every problem.
    """
    file = path or configs / FLEET_FILE
    if path is None and not file.exists():
        return DEFAULT_FLEET
    document = read_yaml(file)
    fleet, faults = check(Fleet, document.data)
    if fleet is None or document.problems:
        raise build_error(document.problems or locate(faults, document), hint="ortprep prepare --fleet FILE")
    return fleet
