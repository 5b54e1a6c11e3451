"""The nodes that a pool uses: which of the cluster's, what they have, and what each gets to serve."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pipeline.bundle.codec import encode
from pipeline.bundle.loader_config import LoaderConfig
from pipeline.cluster.serving.nodes import ClusterNode, NodeChoice
from pipeline.cluster.serving.opened_model import Opening
from pipeline.cluster.serving.placing import place_joining
from pipeline.cluster.serving.posts import Post, Wanted, plan_posts
from pipeline.cluster.serving.survey import Survey, SurveyedModel
from pipeline.errors import PoolError
from pipeline.runtime.pool.placement import Assignment, ModelLoad, Placement, Room


@dataclass(frozen=True)
class Fielded:
    """A node that a pool uses.

    Attributes:
        node: The node.
        survey: What it said.
        posts: Its places for workers.
    """

    node: ClusterNode
    survey: Survey
    posts: tuple[Post, ...]

    @property
    def kind(self) -> str:
        """Of its devices: `cpu` or `cuda`."""
        return self.posts[0].workplace.device.kind

    @property
    def loads(self) -> tuple[ModelLoad, ...]:
        """What models ask for there."""
        return self.survey.loads(self.kind)

    def room(self, post: Post) -> Room:
        """Returns the device of a place, as placement sees it."""
        device = post.workplace.device
        return Room(f"{self.node.name}/{device.name}", device.memory_bytes)


def field_node(node: ClusterNode, survey: Survey, wanted: Wanted) -> Fielded:
    """Returns a node with its places.

    Raises:
        PoolError: It lacks what they need.
    """
    on_gpu = wanted.devices != "cpu" and node.gpus > 0
    memory = survey.memory_of("cuda" if on_gpu else "cpu")
    if not on_gpu:
        known = [size for size in (memory, node.memory_bytes) if size is not None]
        memory = min(known) if known else None
    return Fielded(node, survey, plan_posts(node, wanted, memory_bytes=memory))


def assign_models(
    fielded: Sequence[Fielded], copies: Mapping[str, int]
) -> tuple[tuple[tuple[Fielded, Post, tuple[str, ...]], ...], Placement]:
    """Returns what each place of some nodes serves; all workers of a device serve the same.

    Args:
        fielded: Nodes that join at the same time.
        copies: How many devices serve each model already.

    Raises:
        PoolError: A model that nobody serves fits nowhere.
    """
    devices = [(one, post) for one in fielded for post in one.posts if post.index == 0]
    rooms = [one.room(post) for one, post in devices]
    loads = _common_loads(fielded)
    models = place_joining(loads, rooms, copies)
    by_device = {(one.node.node_id, post.slot): m for (one, post), m in zip(devices, models, strict=True)}
    places = tuple(
        (one, post, by_device[one.node.node_id, post.slot])
        for one in fielded
        for post in one.posts
        if by_device[one.node.node_id, post.slot]
    )
    return places, _describe(loads, rooms, models)


def _common_loads(fielded: Sequence[Fielded]) -> tuple[ModelLoad, ...]:
    """Returns what models ask for; where devices are of two kinds, the larger, since each must do."""
    every = [one.loads for one in fielded]
    return tuple(
        ModelLoad(same[0].name, max(load.cost_ms for load in same), max(load.memory_bytes for load in same))
        for same in zip(*every, strict=True)
    )


def _describe(
    loads: Sequence[ModelLoad], rooms: Sequence[Room], models: Sequence[tuple[str, ...]]
) -> Placement:
    by_name = {load.name: load for load in loads}
    copies = {name: sum(name in one for one in models) for name in by_name}
    assignments = tuple(
        Assignment(
            room.name,
            names,
            round(sum(by_name[name].cost_ms / copies[name] for name in names), 6),
            sum(by_name[name].memory_bytes for name in names),
        )
        for room, names in zip(rooms, models, strict=True)
    )
    reasons = tuple(
        f"{name} ({by_name[name].cost_ms / copies[name]:.3g} ms per copy) to {room.name}"
        for room, names in zip(rooms, models, strict=True)
        for name in names
    )
    return Placement(assignments, max((one.cost_ms for one in assignments), default=0.0), reasons)


def check_agreement(first: Survey, other: Survey, node: ClusterNode) -> None:
    """Checks that a node has the same builds of the models as the pool, whose answers would mix otherwise.

    It may have other variants of them, since a node pulls those that it can run.

    Raises:
        PoolError: A model has other inputs or outputs there, or is another build.
    """
    for mine, its in zip(first.models, other.models, strict=True):
        expected, got = _describe_build(mine), _describe_build(its)
        if expected == got and (differing := _differing(mine.config, its.config)):
            expected, got = "variants as they were", f"others of the same name: {', '.join(differing)}"
        if expected != got:
            raise PoolError(
                f"{node.name} has another build in the place of {mine.name}\n"
                f"  expected {expected},\n  got {got}",
                hint="a folder has to hold the same bundle on every node; make a new pool for a new build",
            )


def _describe_build(model: SurveyedModel) -> str:
    config = model.config
    tensors = " ".join(f"{one.name}:{one.dtype}{one.shape}" for one in (*config.inputs, *config.outputs))
    return f"{config.name} of {tensors}, {model.identity}"


def _differing(mine: LoaderConfig, its: LoaderConfig) -> list[str]:
    """Returns the variants that both have, and that are not the same."""
    known = {variant.name: variant for variant in mine.variants}
    return [one.name for one in its.variants if known.get(one.name, one) != one]


def build_job(
    place: Fielded, post: Post, models: Sequence[str], openings: Mapping[str, Opening]
) -> dict[str, Any]:
    """Returns what an actor is told to open.

    Args:
        place: Its node.
        post: Its place.
        models: Their names.
        openings: How each is opened, whatever the place.
    """
    workplace = post.workplace
    surveyed = {model.name: model for model in place.survey.models}
    return {
        "device": workplace.device.kind,
        "models": [
            {
                "name": name,
                "opening": encode(
                    replace(
                        openings[name],
                        root=surveyed[name].root,
                        device_id=workplace.device_id,
                        threads=workplace.threads,
                        may_spin=workplace.may_spin,
                    )
                ),
                "config": encode(surveyed[name].config),
            }
            for name in models
        ],
    }


@dataclass(frozen=True)
class Change:
    """What changed among the nodes.

    Attributes:
        joined: Nodes to be used from now on.
        lost: Ids of those that are gone.
        surplus: Ids of those that are more than are to be used, the last to join first.
    """

    joined: tuple[ClusterNode, ...]
    lost: tuple[str, ...]
    surplus: tuple[str, ...]


def compare_nodes(
    used: Sequence[str], alive: Sequence[ClusterNode], choice: NodeChoice, max_nodes: float = math.inf
) -> Change:
    """Returns what is to change.

    Args:
        used: Ids of the nodes in use, in the order they joined.
        alive: The cluster's nodes.
        choice: Which may be used.
        max_nodes: How many at most.
    """
    present = {node.node_id for node in alive}
    lost = tuple(node_id for node_id in used if node_id not in present)
    left = [node_id for node_id in used if node_id in present]
    surplus = tuple(reversed(left[int(max_nodes) :])) if len(left) > max_nodes else ()
    room = max(0.0, max_nodes - len(left))
    new = [node for node in alive if node.node_id not in used and choice.admits(node)]
    return Change(tuple(new if room == math.inf else new[: int(room)]), lost, surplus)
