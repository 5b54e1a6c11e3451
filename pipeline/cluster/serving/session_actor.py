"""What runs on a node: a process with the sessions of its models, which answers one request after another."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pipeline.errors import IntegrityError, PipelineError, PoolError
from pipeline.runtime.pool.worker import describe_error

if TYPE_CHECKING:
    from pipeline.cluster.serving.opened_model import OpenedModel
    from pipeline.runtime.element_types import Array

Result = tuple[list["Array"] | None, dict[str, Any] | None, int]
"""Outputs in the model's order, or what went wrong; and the nanoseconds of the run."""

WATCH = "watch"
"""Concurrency group of the call that lasts as long as the actor, by whose end its death is known at once."""


class SessionActor:
    """The sessions of a device. Its calls are answered in the order they were made, `watch` apart."""

    def __init__(self) -> None:
        self._models: dict[str, OpenedModel] = {}

    def greet(self) -> None:
        """Returns as soon as there is a process."""

    def open(self, job: Mapping[str, Any]) -> dict[str, Any]:
        """Opens models beside those it has, and checks their golden samples.

        Args:
            job: `device`: `cpu` or `cuda`; `models`, each with `name`, `opening` (an `Opening` as JSON types)
                and `config`, the bundle's loader config as its node had it when the pool began.

        Returns:
            `pid`, `gpu`, `phases`, `total_s`, `private_bytes`, `variants`, `buckets`, `roots`; or `kind`,
            `message` and `hint` of what went wrong.
        """
        try:
            return self._open(job)
        except PipelineError as error:
            return describe_error(error)

    def _open(self, job: Mapping[str, Any]) -> dict[str, Any]:
        begun = time.perf_counter()
        os.environ.update(plan_environment(job["device"], os.environ.get("CUDA_VISIBLE_DEVICES")))
        # Only then: ONNX Runtime looks for GPUs when it is imported.
        from pipeline.bundle.codec import decode, encode
        from pipeline.cluster.serving.opened_model import Opening, open_model
        from pipeline.runtime.loading.session import import_onnxruntime
        from pipeline.runtime.memory import private_bytes

        import_onnxruntime()
        phases = {"import": time.perf_counter() - begun}
        for model in job["models"]:
            started = time.perf_counter()
            opened = open_model(model["name"], decode(Opening, model["opening"]))
            if encode(opened.bundle_config) != model["config"]:
                raise IntegrityError(
                    f"bundle was replaced by another build: {opened.root}\n"
                    "  expected the one that the pool began with, whose answers would mix with this one's",
                    hint="make a new pool",
                )
            self._models[model["name"]] = opened
            phases[model["name"]] = time.perf_counter() - started
        return {
            "pid": os.getpid(),
            "gpu": os.environ.get("CUDA_VISIBLE_DEVICES") or None,
            "phases": phases,
            "total_s": time.perf_counter() - begun,
            "private_bytes": private_bytes(),
            "variants": {name: model.variant for name, model in self._models.items()},
            "buckets": {name: list(model.buckets) for name, model in self._models.items()},
            "roots": {name: str(model.root) for name, model in self._models.items()},
        }

    def run(self, requests: Sequence[tuple[str, Sequence[Array]]]) -> list[Result]:
        """Answers small requests, which travel together: each a model and its inputs in order."""
        return [self._run(model, arrays) for model, arrays in requests]

    def run_large(self, model: str, *arrays: Array) -> list[Result]:
        """Answers one request, whose large inputs Ray has brought into the node's object store."""
        return [self._run(model, arrays)]

    def _run(self, model: str, arrays: Sequence[Array]) -> Result:
        started = time.perf_counter_ns()
        try:
            outputs = self._models[model].run(arrays)
        except (PipelineError, MemoryError) as error:
            return None, describe_error(error), time.perf_counter_ns() - started
        return outputs, None, time.perf_counter_ns() - started

    def check(self) -> dict[str, Any]:
        """Runs the golden samples again; returns nothing, or what went wrong as `open` does."""
        try:
            for model in self._models.values():
                model.check()
        except PipelineError as error:
            return describe_error(error)
        return {}

    def watch(self) -> None:
        """Lasts as long as the actor."""
        threading.Event().wait()


def plan_environment(device: str, visible: str | None) -> dict[str, str]:
    """Returns the variables that a worker of a device sets before ONNX Runtime is imported.

    Args:
        device: `cpu` or `cuda`.
        visible: `CUDA_VISIBLE_DEVICES` as Ray set it; None if it did not.

    Raises:
        PoolError: It is a GPU's worker, and Ray gave it none, or several.
    """
    if device == "cpu":
        return {"CUDA_VISIBLE_DEVICES": ""}  # else a bundle that prefers CUDA would have a GPU of somebody's
    given = [name for name in (visible or "").split(",") if name.strip()]
    if len(given) != 1:
        raise PoolError(
            f"a worker of a GPU has not been given one\n"
            f"  expected one device in CUDA_VISIBLE_DEVICES, got {visible!r}",
            hint="unset RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES",
        )
    return {"CUDA_MODULE_LOADING": "LAZY"}
