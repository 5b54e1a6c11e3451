"""What jobs call: `RaySessionPool`, a deployment of bundles on a Ray cluster behind one `run`."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import time
import uuid
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np
import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.schema import ApplicationStatus, ApplicationStatusOverview, ServeStatus
from ray.util.client import ray as client

from ortprep.bundle.codec import decode
from ortprep.bundle.loader_config import LoaderConfig
from ortprep.cluster.nodes import parse_nodes
from ortprep.cluster.serving.application import CONFIG_LOCK, build_application
from ortprep.cluster.serving.coalescer import SMALL_BYTES, RequestCoalescer, RequestCounts
from ortprep.cluster.serving.config import DEPLOYMENT, ServeConfig, count_replicas
from ortprep.cluster.serving.deployment import parse_failure
from ortprep.cluster.serving.pinning import PinnedBundle, pin_version
from ortprep.errors import PipelineError, PoolClosedError, PoolError, RequestTimeoutError
from ortprep.runtime.loading.model_load_options import require_counts
from ortprep.runtime.pool.base_pool import BasePool
from ortprep.runtime.tensors.signatures import read_signature

Bundle = str | os.PathLike[str]

_POLL_INTERVAL_S = 0.1


@dataclass(frozen=True)
class RayPoolStats:
    """What a pool and its deployment are doing.

    Attributes:
        application: Name of the Serve application.
        replicas: How many replicas there are, by Serve's name of their state.
        pending: Requests that are not answered yet.
        counts: What became of the others.
    """

    application: str
    replicas: Mapping[str, int]
    pending: int
    counts: RequestCounts


class RaySessionPool(BasePool):
    """A Serve deployment of one or several bundles, with the calls of `ortprep.runtime.SessionPool`.

    Without `bundles` it is a client of an application that was deployed otherwise, as by `serve deploy`.

    Args:
        bundles: A bundle that every node can reach, or several by the name that requests call them by: a
            folder of a shared file system, or a reference to a registry, which each node pulls once. None for
            those of the application `name`.
        config: How they are served.
        name: Of the Serve application; one of that name is updated. None for a new one that `close` deletes.

    Raises:
        PipelineError: A bundle cannot be opened on a node; what the node said.
        PoolError: Ray is not initialised, the cluster has no such node, the configuration contradicts itself,
            or there is no such application.
        RequestTimeoutError: The replicas were not ready within `config.start_timeout_s`.
    """

    def __init__(
        self,
        bundles: Bundle | Mapping[str, Bundle] | None = None,
        config: ServeConfig | None = None,
        *,
        name: str | None = None,
    ) -> None:
        self._config = config or ServeConfig()
        self._config.check()
        _require_ray()
        self._name = name or f"ortprep-{uuid.uuid4().hex[:8]}"
        if bundles is not None:
            self._deploy(_pin_all(bundles, self._config.load.require_signature))
        elif name is None:
            raise PoolError("no bundle to serve\n  expected bundles, or the name of an application")
        handle = _find_handle(self._name)
        description = handle.describe.remote().result(timeout_s=self._config.start_timeout_s)
        signatures = {
            model: read_signature(model, decode(LoaderConfig, entry["config"]))
            for model, entry in description["models"].items()
        }
        run_many = handle.options(method_name="run_many")
        self._coalescer = RequestCoalescer(
            signatures,
            run_many.remote,
            max_pending=self._config.max_pending,
            max_batch=self._config.max_batch,
        )
        super().__init__(signatures, self._coalescer, long_copy_bytes=SMALL_BYTES)
        owned = self._name if bundles is not None and name is None else None
        # The thread holds the coalescer and not the pool, so that a pool that is forgotten ends its replicas.
        self._finalizer = weakref.finalize(self, _stop, self._coalescer, owned)
        self._coalescer.follow(functools.partial(_read_states, self._name))

    def _deploy(self, bundles: Mapping[str, PinnedBundle]) -> None:
        on_gpu, count = count_replicas(self._config, parse_nodes(ray.nodes()))
        if not _read_status().proxies:
            serve.start(proxy_location="Disabled")
        app = build_application(self._config, bundles, on_gpu=on_gpu, replicas=count)
        # Not `serve.run`: it cannot be told how long to wait.
        target = serve.RunTarget(app, name=self._name, route_prefix=None)
        serve.run_many([target], wait_for_applications_running=False)
        until = time.monotonic() + self._config.start_timeout_s
        while (status := _read_application(self._name)).status != ApplicationStatus.RUNNING:
            if status.status == ApplicationStatus.DEPLOY_FAILED:
                serve.delete(self._name)
                raise _read_failure(self._name, status)
            if time.monotonic() > until:
                serve.delete(self._name)
                raise _not_ready(count, self._config.start_timeout_s)
            time.sleep(_POLL_INTERVAL_S)

    @property
    def name(self) -> str:
        """Name of the Serve application."""
        return self._name

    def wait_ready(self, count: int | None = None, *, timeout_s: float | None = None) -> None:
        """Waits until so many replicas are running; None for one.

        Raises:
            RequestTimeoutError: They were not by then.
        """
        require_counts(count=count)
        until = None if timeout_s is None else time.monotonic() + timeout_s
        while self._count_workers() < (count or 1):
            if until is not None and time.monotonic() > until:
                raise _not_ready(count or 1, timeout_s)
            time.sleep(_POLL_INTERVAL_S)

    def stats(self) -> RayPoolStats:
        """Returns what the pool and its deployment are doing."""
        counts = dataclasses.replace(self._coalescer.counts)
        return RayPoolStats(self._name, _read_states(self._name), self._coalescer.pending, counts)

    def close(self, *, drain: bool = True, timeout_s: float | None = None) -> None:
        """Takes no more requests, and deletes the application if this pool made and named it.

        Args:
            drain: Whether requests that were taken are answered first; otherwise they fail.
            timeout_s: Seconds to wait for that; None as long as it takes.
        """
        if drain:
            self._coalescer.admission.refuse_in_callback("close()")
        error = PoolClosedError("pool is closed", hint="make a new one: RaySessionPool(…)")
        self._coalescer.close(error, drain=drain, timeout_s=timeout_s)
        self._finalizer()

    def __enter__(self) -> RaySessionPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(drain=kind is None)

    def _count_workers(self, model: str | None = None) -> int:
        del model  # each replica has all
        return _read_states(self._name).get("RUNNING", 0)

    def _share(self, model: str, name: str, value: Any, timeout_s: float | None) -> Any:
        del model, name, timeout_s
        return np.asarray(value)


def _not_ready(count: int, timeout_s: float | None) -> RequestTimeoutError:
    text = f"replicas were not ready\n  expected {count} within {timeout_s or 0:g} s"
    return RequestTimeoutError(text, hint="serve status; ray status")


def _require_ray() -> None:
    if client.is_connected():
        raise PoolError(
            "a pool needs a direct connection\n  expected no ray://", hint="ray.init('HOST:6379')"
        )
    if not ray.is_initialized():
        raise PoolError("Ray is not initialised", hint="ray.init(address='auto')")


def _pin_all(bundles: Bundle | Mapping[str, Bundle], signature: str | None) -> dict[str, PinnedBundle]:
    """Returns bundles pinned to their versions, by the names that requests call them by."""
    by_name = bundles if isinstance(bundles, Mapping) else {"": bundles}
    if not by_name:
        raise PoolError("no bundle to serve\n  expected at least one")
    pins = {}
    for name, bundle in by_name.items():
        model, pinned = pin_version(os.fspath(bundle), require_signature=signature)
        pins[name or model] = pinned
    return pins


def _find_handle(name: str) -> Any:
    try:
        return serve.get_deployment_handle(DEPLOYMENT, name)
    except (KeyError, RayServeException):
        raise PoolError(
            f"no such application: {name}\n  expected one of bundles", hint="serve status"
        ) from None


def _read_application(name: str) -> ApplicationStatusOverview:
    """Returns what Serve says of an application; of one that is gone, that it has not started."""
    gone = ApplicationStatusOverview(
        status=ApplicationStatus.NOT_STARTED, message="deleted", last_deployed_time_s=0, deployments={}
    )
    return _read_status().applications.get(name, gone)


def _read_status() -> ServeStatus:
    with CONFIG_LOCK:
        return serve.status()


def _read_states(name: str) -> dict[str, int]:
    deployment = _read_application(name).deployments.get(DEPLOYMENT)
    states = {} if deployment is None else deployment.replica_states
    return {str(getattr(state, "value", state)): count for state, count in states.items()}


def _read_failure(name: str, status: ApplicationStatusOverview) -> PipelineError:
    """Returns why a replica could not start, or what Serve says of it."""
    text = "\n".join([status.message, *(deployment.message for deployment in status.deployments.values())])
    failure = parse_failure(text)
    if failure is not None:
        return failure
    lines = [line for line in text.splitlines() if line.strip()]
    return PoolError(f"application {name} cannot be deployed\n  {lines[-1] if lines else 'no reason given'}")


def _stop(coalescer: RequestCoalescer, owned: str | None) -> None:
    coalescer.close(PoolClosedError("pool is closed"), drain=False)
    if owned is not None and ray.is_initialized():
        with contextlib.suppress(RayError, RayServeException):  # gone already
            serve.delete(owned)
