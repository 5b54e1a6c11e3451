"""The Serve config file of some bundles, whose models share replicas.

Its schema is Serve's (https://docs.ray.io/en/latest/serve/production-guide/config.html).
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ortprep.bundle.codec import encode
from ortprep.bundle.loader_config import Variant, read_loader_config
from ortprep.errors import PoolError
from ortprep.quoting import quoted
from ortprep.ray_inference.config import DEPLOYMENT, ServeConfig, deployment_options
from ortprep.ray_inference.pinning import PinnedBundle
from ortprep.runtime.loading.sources import locate
from ortprep.runtime.loading.variant_selection import needs_gpu, serves

LOOPBACK = "127.0.0.1"


def is_loopback(host: str) -> bool:
    """Returns whether only processes of a node reach what listens at an address of it."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def build_serve_file(
    bundles: Mapping[str, PinnedBundle],
    config: ServeConfig,
    *,
    host: str = LOOPBACK,
    http_port: int = 8000,
) -> dict[str, Any]:
    """Returns a Serve config file as JSON types: one application, whose replicas serve all models.

    Args:
        bundles: Bundles that are served, by the names of their models.
        config: Settings; without `cpus`, a replica gets the threads that its bundles set, or one.
        host: Address that Serve's HTTP proxies listen at.
        http_port: Port of the HTTP proxies.

    Raises:
        PipelineError: A bundle cannot be read or has nothing for the device, or models for GPUs and for CPUs
            are mixed.
    """
    variants = [_find_variant(name, pinned, config) for name, pinned in bundles.items()]
    on_gpu = {needs_gpu(variant.requirements) for variant in variants}
    if len(on_gpu) != 1:
        raise PoolError(
            "models for GPUs and models for CPUs cannot share replicas",
            hint="ortprep serve-config --device cpu BUNDLE…, or write one file per kind",
        )
    threads = [variant.session_options.attributes.get("intra_op_num_threads") for variant in variants]
    config = replace(config, cpus=config.cpus or float(max(int(number or 1) for number in threads)))
    deployment = {
        "name": DEPLOYMENT,
        "user_config": {"bundles": {name: encode(pinned) for name, pinned in bundles.items()}},
        **deployment_options(config, on_gpu=on_gpu.pop()),
    }
    application = {
        "name": "-".join(bundles),
        "route_prefix": "/",
        "import_path": "ortprep.ray_inference.deployment:build_app",
        "args": {"config": encode(config)},
        "deployments": [deployment],
    }
    return {
        "proxy_location": "EveryNode",
        "http_options": {"host": host, "port": http_port},
        "applications": [application],
    }


def _find_variant(name: str, pinned: PinnedBundle, config: ServeConfig) -> Variant:
    """Returns the variant of a bundle that replicas would open."""
    root = locate(pinned.bundle, require_signature=config.load.require_signature)
    target = None if config.device == "all" else config.device
    for variant in read_loader_config(root).variants:
        if serves(variant, target, config.load.precision):
            return variant
    raise PoolError(
        f"{name} has no variant to serve\n  expected target {target or 'any'}, precision "
        f"{config.load.precision}",
        hint=quoted("ortprep", "show", root),
    )
