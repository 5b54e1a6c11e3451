"""The Serve config file of some bundles, with numbers that follow from what their manifests measured.

Its schema is Serve's (https://docs.ray.io/en/latest/serve/production-guide/config.html).
"""

from __future__ import annotations

import ipaddress
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ortprep.bundle.codec import decode, encode
from ortprep.bundle.loader_config import Variant, read_loader_config
from ortprep.bundle.manifest import MANIFEST_FILE, read_manifest
from ortprep.errors import PoolError
from ortprep.quoting import quoted
from ortprep.ray_inference.config import DEPLOYMENT, ServeConfig, deployment_options
from ortprep.ray_inference.pinning import PinnedBundle
from ortprep.runtime.loading.sources import locate
from ortprep.runtime.loading.variant_selection import needs_gpu, serves
from ortprep.runtime.machine.hardware import Hardware
from ortprep.runtime.placement import Device, ModelLoad, place_models, read_figures, read_load

_CALL_MS = 4.0
"""What Serve adds to a request (`bench.ray_serving`): so much work waits to keep a replica busy."""

_QUEUE_MS = 2000.0
"""Requests that would wait longer than so are turned away."""

_MEMORY_MARGIN = 1.25

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class BundleFigures:
    """A bundle, and the figures of its manifest.

    Attributes:
        pinned: The bundle, pinned to a version.
        load: Time of a run, and memory of a copy.
        ready_s: From the start of a process to its first answer, in seconds.
        threads: Threads that it was tuned with.
        on_gpu: Whether it was prepared for a GPU.
        device_bytes: Memory of the device that it was prepared on; None if unknown.
    """

    pinned: PinnedBundle
    load: ModelLoad
    ready_s: float
    threads: int
    on_gpu: bool
    device_bytes: int | None


def read_bundle_figures(name: str, pinned: PinnedBundle, config: ServeConfig) -> BundleFigures:
    """Reads what a bundle's manifest measured; requests call the model `name`.

    Raises:
        PipelineError: It cannot be read, or has nothing for the device.
    """
    root = locate(pinned.bundle, require_signature=config.load.require_signature)
    loader = read_loader_config(root)
    target = None if config.device == "all" else config.device
    variant = next(
        (candidate for candidate in loader.variants if serves(candidate, target, config.load.precision)), None
    )
    if variant is None:
        raise PoolError(
            f"{name} has no variant to serve\n  expected target {target or 'any'}, precision "
            f"{config.load.precision}",
            hint=quoted("ortprep", "show", root),
        )
    figures = read_figures(root).get(variant.name)
    hardware = _read_hardware(root)
    on_gpu = needs_gpu(variant.requirements)
    load = read_load(name, root, variant.target, precision=config.load.precision, buckets=config.load.buckets)
    memory = [gpu.memory_bytes for gpu in hardware.gpus[:1]] if on_gpu else [hardware.memory_bytes]
    return BundleFigures(
        pinned,
        load,
        0.0 if figures is None else figures.ready_ms.median / 1000,
        1 if on_gpu else _threads(variant) or hardware.cores or 1,
        on_gpu,
        next(iter(filter(None, memory)), None),
    )


def _read_hardware(root: Path) -> Hardware:
    """Returns the machine that a bundle was prepared on, of no size where its manifest does not say."""
    manifest = read_manifest(root) if (root / MANIFEST_FILE).exists() else None
    found = manifest.environment.get("hardware") if manifest is not None else None
    return Hardware("", "", (), 0, 0) if found is None else decode(Hardware, found, where="hardware")


def _threads(variant: Variant) -> int:
    return int(variant.session_options.attributes.get("intra_op_num_threads", 0) or 0)


def is_loopback(host: str) -> bool:
    """Returns whether only processes of a node reach what listens at an address of it."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def plan_serve_file(
    bundles: Sequence[BundleFigures],
    config: ServeConfig,
    *,
    host: str = LOOPBACK,
    http_port: int = 8000,
) -> dict[str, Any]:
    """Returns a Serve config file as JSON types: an application per group of models that share a device.

    Args:
        bundles: Bundles that are served.
        config: Settings; numbers of requests and the period of checks follow from the figures.
        host: Address that Serve's HTTP proxies listen at.
        http_port: Port of the HTTP proxies.

    Raises:
        PoolError: Models for GPUs and for CPUs are mixed, or one fits nowhere.
    """
    if len({bundle.on_gpu for bundle in bundles}) != 1:
        raise PoolError(
            "models for GPUs and models for CPUs cannot share replicas",
            hint="ortprep serve-config --device cpu BUNDLE…, or write one file per kind",
        )
    groups = _group(bundles)
    return {
        "proxy_location": "EveryNode",
        "http_options": {"host": host, "port": http_port},
        "applications": [_application(group, config, alone=len(groups) == 1) for group in groups],
    }


def _group(bundles: Sequence[BundleFigures]) -> list[list[BundleFigures]]:
    """Returns the bundles in as few groups as fit a device each."""
    sizes = [bundle.device_bytes for bundle in bundles if bundle.device_bytes]
    limit = min(sizes) if sizes else None
    loads = [bundle.load for bundle in bundles]
    for count in range(1, len(bundles) + 1):
        try:
            placement = place_models(loads, [Device("cuda", number, limit) for number in range(count)])
        except PoolError:
            if count == len(bundles):
                raise
            continue
        names = [assignment.models for assignment in placement.assignments]
        return [[bundle for bundle in bundles if bundle.load.name in group] for group in names]
    raise PoolError("no bundle to serve\n  expected at least one")


def _application(group: Sequence[BundleFigures], config: ServeConfig, *, alone: bool) -> dict[str, Any]:
    """Returns the application of models that share replicas."""
    name = "-".join(bundle.load.name for bundle in group)
    tuned = tune_config(group, config)
    on_gpu = group[0].on_gpu
    options = deployment_options(tuned, on_gpu=on_gpu)
    if not on_gpu:
        memory = sum(bundle.load.memory_bytes for bundle in group) * _MEMORY_MARGIN
        options["ray_actor_options"]["memory"] = math.ceil(memory)
    config_values = encode(tuned)
    del config_values["load"]["for_fork"]  # a pool's template sets it; replicas are not forked
    return {
        "name": name,
        "route_prefix": "/" if alone else f"/{name}",
        "import_path": "ortprep.ray_inference.deployment:build_app",
        "args": {"config": config_values},
        "deployments": [
            {
                "name": DEPLOYMENT,
                "user_config": {"bundles": {bundle.load.name: encode(bundle.pinned) for bundle in group}},
                **options,
            }
        ],
    }


def tune_config(group: Sequence[BundleFigures], config: ServeConfig) -> ServeConfig:
    """Returns a configuration whose numbers follow from the figures of the models of a replica."""
    default = ServeConfig()
    slowest_ms = max(max(bundle.load.cost_ms for bundle in group), 0.05)
    ongoing = min(64, 2 + math.ceil(2 * _CALL_MS / slowest_ms))
    round_ms = sum(bundle.load.cost_ms for bundle in group)
    return replace(
        config,
        cpus=config.cpus or float(max(bundle.threads for bundle in group)),
        max_ongoing_requests=ongoing,
        max_queued_requests=int(min(1000, max(16, _QUEUE_MS / slowest_ms))),
        health_check_period_s=round(max(default.health_check_period_s, round_ms / 10), 1),
        run_timeout_s=round(max(default.run_timeout_s, 10 * ongoing * slowest_ms / 1000), 1),
    )
