"""Serve applications of bundles: as Python deploys them, and as `serve.yaml` describes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ray import serve

from ortprep.bundle.codec import encode
from ortprep.cluster.serving.config import DEPLOYMENT, ServeConfig, deployment_options
from ortprep.cluster.serving.deployment import BundleDeployment
from ortprep.cluster.serving.pinning import PinnedBundle


def build_application(
    config: ServeConfig, bundles: Mapping[str, PinnedBundle], *, on_gpu: bool, replicas: int
) -> Any:
    """Returns the application that serves some bundles, by name, with as many replicas at the start."""
    options = deployment_options(config, on_gpu=on_gpu, replicas=replicas)
    deployment = serve.deployment(BundleDeployment).options(
        name=DEPLOYMENT,
        user_config={"bundles": encode(bundles)},
        max_constructor_retry_count=3,
        **options,
    )
    return deployment.bind(encode(config))


def build_app(args: Mapping[str, Any]) -> Any:
    """Returns the application that a Serve config file describes, whose `import_path` this is.

    Args:
        args: `config`: a `ServeConfig` as JSON types. The rest is in the file's `deployments`.
    """
    return serve.deployment(BundleDeployment).options(name=DEPLOYMENT).bind(dict(args["config"]))
