"""The plan of a fleet: models by kind of hardware, from specs, kinds and nodes. Pure.

Keys and values of labels are those that Ray takes
(https://docs.ray.io/en/latest/ray-core/scheduling/labels.html): up to 63 letters, digits, `-`,
`_` and `.`, and a prefix with a slash.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ortprep.errors import SpecError
from ortprep.runtime.machine.hardware import Hardware
from ortprep.spec.fleet import Fleet, HardwareKind
from ortprep.spec.models import ModelSpec

PREFIX = "ortprep.io"

_INSTRUCTION_SETS = (
    "avx2",
    "avx512f",
    "avx512_vnni",
    "avx512_bf16",
    "avx_vnni",
    "amx_int8",
    "amx_bf16",
    "asimddp",
    "i8mm",
    "bf16",
    "sve",
)
"""Instruction sets that ONNX Runtime's kernels differ by, and that may distinguish the kinds of a fleet."""


@dataclass(frozen=True)
class ClusterNode:
    """A node that is alive.

    Attributes:
        address: Host name or IP address, for people.
        labels: Values of labels, by key.
        resources: All that it has, taken or not: `CPU`, `GPU` and its own.
    """

    address: str
    labels: Mapping[str, str] = field(default_factory=dict)
    resources: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class FleetAssignment:
    """One model on one kind of hardware, where it is prepared for a target: `cpu` or `cuda`."""

    spec: ModelSpec
    kind: str
    target: str


@dataclass(frozen=True)
class Reservation:
    """The share of a node that a build takes, so that it has its device for itself.

    Attributes:
        cpus: Logical processors; all of them where they are the device.
        gpus: Number of GPUs.
        labels: Selectors of the node's labels, by key.
        resources: Amounts of custom resources, by name.
    """

    cpus: float
    gpus: float
    labels: Mapping[str, str]
    resources: Mapping[str, float]

    def fits(self, kind: HardwareKind, node: ClusterNode) -> bool:
        """Says whether a node of a kind has as much, taken or not."""
        has = node.resources
        enough = has.get("CPU", 0) >= self.cpus and has.get("GPU", 0) >= self.gpus
        return enough and kind.fits(node.labels, has)


@dataclass(frozen=True)
class FleetPlan:
    """The models that are prepared on each kind of hardware.

    Attributes:
        assignments: Every model on every kind of hardware that it is prepared for.
        reservations: Share of a node that a build takes, by kind.
        left_out: Reasons of assignments that the user agreed to leave out, by `MODEL on KIND`.
    """

    assignments: tuple[FleetAssignment, ...]
    reservations: Mapping[str, Reservation]
    left_out: Mapping[str, str]


def plan_fleet(
    specs: Sequence[ModelSpec],
    fleet: Fleet,
    nodes: Sequence[ClusterNode],
    *,
    only: str | None = None,
    skip_unavailable: bool = False,
) -> FleetPlan:
    """Decides what is prepared on which kind of hardware.

    A spec with `targets: auto` is prepared on every kind that has a node; one that names targets on every
    kind of these targets, each of which has to have one.
    """
    kinds = _choose_kinds(fleet, only)
    offered = {
        name: any(kind.fits(node.labels, node.resources) for node in nodes) for name, kind in kinds.items()
    }
    assignments: list[FleetAssignment] = []
    left_out: dict[str, str] = {}
    problems: list[str] = []
    for spec in specs:
        needs = {name: spec.targets == "auto" or kind.target in spec.targets for name, kind in kinds.items()}
        needed = [name for name, is_needed in needs.items() if is_needed]
        lacking = [name for name in needed if not offered[name]]
        reported = spec.targets != "auto" and lacking and not skip_unavailable
        if reported:
            problems += [f"{spec.name} on {name}: {_describe(kinds[name])}" for name in lacking]
        problems += [] if only else _targets_of_no_kind(spec, fleet)
        if len(lacking) == len(needed) and not reported:
            problems.append(f"{spec.name}: none of {', '.join(needed) or 'its targets'} has a node")
        assignments += [FleetAssignment(spec, name, kinds[name].target) for name in needed if offered[name]]
        left_out |= {f"{spec.name} on {name}": "no node offers it" for name in lacking}
    if problems:
        raise _not_offered(problems, nodes)
    reservations = {name: reserve(kinds[name], nodes) for name in kinds if offered[name]}
    return FleetPlan(tuple(assignments), reservations, left_out)


def reserve(kind: HardwareKind, nodes: Sequence[ClusterNode]) -> Reservation:
    """Returns what a build on a kind of hardware takes, so that Ray puts nothing else on its device.

    On a CPU that is every processor of the kind's smallest node. (The nodes of a kind should be alike; on a
    larger one a second build may run beside it, and then each waits for the other's measurements.)
    """
    sizes = [node.resources["CPU"] for node in nodes if kind.fits(node.labels, node.resources)]
    is_gpu = kind.target == "cuda"
    alone = float(int(min(sizes)))
    return Reservation(
        cpus=1.0 if is_gpu else alone,
        gpus=1.0 if is_gpu else 0.0,
        labels=dict(kind.labels),
        resources=dict(kind.resources),
    )


def _choose_kinds(fleet: Fleet, only: str | None) -> dict[str, HardwareKind]:
    """Returns all kinds, or those of a name or a target; raises if there is none."""
    kinds = {
        name: kind for name, kind in fleet.hardware.items() if only is None or only in (name, kind.target)
    }
    if not kinds:
        names = [*fleet.hardware, *sorted({kind.target for kind in fleet.hardware.values()})]
        raise SpecError(
            f"no such hardware in the fleet: {only}\n  expected one of {', '.join(dict.fromkeys(names))}",
            hint="ortprep prepare --engine ray --target KIND",
        )
    return kinds


def _targets_of_no_kind(spec: ModelSpec, fleet: Fleet) -> Iterator[str]:
    if spec.targets == "auto":
        return
    there = {kind.target for kind in fleet.hardware.values()}
    for target in spec.targets:
        if target not in there:
            yield f"{spec.name}: no kind of hardware in the fleet offers target {target}"


def _describe(kind: HardwareKind) -> str:
    needs = [f"{key}={value}" for key, value in kind.labels.items()]
    needs += [f"{name}: {amount:g}" for name, amount in kind.resources.items()]
    needs += ["GPU: 1"] if kind.target == "cuda" else []
    return f"expected a node with {', '.join(needs) or 'a CPU'}, got none"


def _not_offered(problems: Sequence[str], nodes: Sequence[ClusterNode]) -> SpecError:
    lines = "\n".join(f"  {problem}" for problem in dict.fromkeys(problems))
    there = "\n".join(f"    {node.address}: {_show(node)}" for node in nodes) or "    none"
    return SpecError(
        f"no node offers the hardware to prepare for\n{lines}\n  nodes:\n{there}",
        hint='ray start --address ADDRESS --labels "$(ortprep node-labels)"   # or --skip-unavailable',
    )


def _show(node: ClusterNode) -> str:
    sizes = [f"{name} {node.resources[name]:g}" for name in ("CPU", "GPU") if name in node.resources]
    labels = [f"{key}={value}" for key, value in sorted(node.labels.items()) if key != "ray.io/node-id"]
    return ", ".join([*sizes, *labels]) or "nothing"


def parse_nodes(listed: Sequence[Mapping[str, Any]]) -> tuple[ClusterNode, ...]:
    """Returns the nodes that are alive, of what `ray.nodes()` lists."""
    return tuple(
        ClusterNode(
            str(node["NodeManagerAddress"]),
            dict(node.get("Labels") or {}),
            dict(node.get("Resources") or {}),
        )
        for node in listed
        if node["Alive"]
    )


def describe_hardware(hardware: Hardware) -> dict[str, str]:
    """Returns a machine's labels.

    Returns:
        Architecture, processor, an instruction set each that it has, and its first GPU's name and compute
        capability (`8.6`).
    """
    labels = {"machine": hardware.machine, "cpu": hardware.cpu_model}
    labels |= {feature: "true" for feature in _INSTRUCTION_SETS if feature in hardware.cpu_features}
    if hardware.gpus:
        major, minor = hardware.gpus[0].compute_capability
        labels |= {"gpu": hardware.gpus[0].name, "compute-capability": f"{major}.{minor}"}
    fitted = {f"{PREFIX}/{key}": _fit(value) for key, value in labels.items()}
    return {key: value for key, value in fitted.items() if value}


def _fit(text: str) -> str:
    """Returns text as a label may be: what does not fit becomes a dash."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text)[:63].strip("-_.")
