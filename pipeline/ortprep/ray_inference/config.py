"""Settings of a deployment of bundles: one dataclass for every way to deploy it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ortprep.errors import PoolError
from ortprep.runtime.loading.load_options import check_choice
from ortprep.runtime.loading.model_load_options import ModelLoadOptions, require_counts, require_positive

DEPLOYMENT = "BundleDeployment"
"""Name of the deployment in its application."""

RETRY_AFTER_S = 1
"""Time after which a refused client may try again, in seconds."""


@dataclass(frozen=True)
class ServeConfig:
    """Settings of bundles that are served on a cluster.

    Attributes:
        device: `all` (whatever the bundles were prepared for), `cpu` or `cuda`.
        replicas: Number of replicas; None for one.
        cpus: Processors that Ray reserves for a replica, which are its threads too; None for one, or, in
            `ortprep serve-config`, as many threads as the bundles set.
        max_ongoing_requests: Maximum number of requests that a replica has at a time.
        max_queued_requests: Most requests that wait at each proxy; more are answered with 503.
        max_body_bytes: Size limit of one HTTP request, in bytes.
        max_json_bytes: Size limit of a request that is JSON alone, without binary tensors: to parse it takes
            a replica's processor, and many times its size in memory. The same holds for the arrays of
            outputs that are answered as JSON.
        max_inflight_bytes: Most bytes of HTTP requests that a replica has at a time; further requests are
            answered with 503.
        token_file: File, on every node, with the token that HTTP clients must send; None for no token.
        run_timeout_s: Timeout of one run, in seconds: a replica whose run hangs is replaced. Requests that
            wait behind others do not count.
        health_check_period_s: Time between two runs of the golden samples, in seconds.
        watch_s: Time between two looks at the aliases of bundles, in seconds: a replica opens what one names
            now beside what it named, and swaps. 0 to serve what they named when this was deployed.
        load: Options for the bundles of a replica.
    """

    device: str = "all"
    replicas: int | None = None
    cpus: float | None = None
    max_ongoing_requests: int = 16
    max_queued_requests: int = 256
    max_body_bytes: int = 256 * 2**20
    max_json_bytes: int = 4 * 2**20
    max_inflight_bytes: int = 2**30
    token_file: str | None = None
    run_timeout_s: float = 30.0
    health_check_period_s: float = 10.0
    watch_s: float = 30.0
    load: ModelLoadOptions = field(default_factory=ModelLoadOptions)

    def check(self) -> None:
        """Checks all of it.

        Raises:
            PipelineError: A number is out of range, or a choice is not one of those there are.
        """
        check_choice("device", self.device, ("all", "cpu", "cuda"))
        require_counts(
            replicas=self.replicas,
            max_ongoing_requests=self.max_ongoing_requests,
            max_body_bytes=self.max_body_bytes,
            max_json_bytes=self.max_json_bytes,
        )
        require_counts(minimum=-1, max_queued_requests=self.max_queued_requests)
        require_positive(
            cpus=self.cpus,
            run_timeout_s=self.run_timeout_s,
            health_check_period_s=self.health_check_period_s,
            watch_s=self.watch_s or None,
        )
        if self.max_inflight_bytes < self.max_body_bytes:
            raise PoolError(
                f"bad max_inflight_bytes\n  expected at least max_body_bytes ({self.max_body_bytes}), "
                f"got {self.max_inflight_bytes!r}"
            )
        if self.token_file is not None and not Path(self.token_file).is_absolute():
            # It is not repeated: it may be the token itself, given by mistake.
            raise PoolError("bad token_file\n  expected an absolute path, which is a file on every node")


def deployment_options(config: ServeConfig, *, on_gpu: bool) -> dict[str, Any]:
    """Returns the options of a Serve deployment, as `serve.deployment` and a Serve config file take them."""
    return {
        "num_replicas": config.replicas or 1,
        "max_ongoing_requests": config.max_ongoing_requests,
        "max_queued_requests": config.max_queued_requests,
        "backpressure_config": {"status_code": 503, "retry_after_s": RETRY_AFTER_S},
        "health_check_period_s": config.health_check_period_s,
        "health_check_timeout_s": config.run_timeout_s,
        "graceful_shutdown_timeout_s": config.run_timeout_s,
        "graceful_shutdown_wait_loop_s": 0.1,
        "ray_actor_options": {"num_cpus": config.cpus or 1, "num_gpus": 1 if on_gpu else 0},
    }
