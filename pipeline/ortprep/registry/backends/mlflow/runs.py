"""The MLflow runs that hold a model's parts: one per part, in an experiment per model."""

from __future__ import annotations

import logging
import math
import re
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from ortprep.bundle.codec import decode, parse_json
from ortprep.bundle.digest import PREFIX
from ortprep.bundle.manifest import Manifest
from ortprep.bundle.paths import is_safe_name
from ortprep.errors import BundleError, NotPublishedError, RegistryError, RegistryUnavailableError
from ortprep.quoting import quoted
from ortprep.registry.backends.mlflow.artifacts import ProxiedArtifacts, open_artifacts
from ortprep.registry.backends.mlflow.server import EXISTS, MISSING, MlflowServer, as_pairs, tags_of
from ortprep.registry.documents import Part, as_mapping
from ortprep.registry.fsspec_folder import FsspecFolder

log = logging.getLogger(__name__)

EXPERIMENT_PREFIX = "ortprep/"

_TAG_KIND, _TAG_PART, _TAG_REFRESHED = "ortprep.kind", "ortprep.part", "ortprep.refreshed_ms"
_FINISHED = "FINISHED"
_MILLISECONDS = re.compile(r"[0-9]{1,15}")
_DEFAULT_PLAN = "default"
_FIGURES = ("ready_ms", "init_ms", "first_ms", "first_result_ms", "steady_ms", "private_mb")
_MAX_METRICS = 1000
_MAX_TEXT = 5000


@dataclass(frozen=True)
class Run:
    """The run of the part with digest `part`, and its files; finished when all that it is to hold is there.

    `artifact_uri` says where the files are in MLflow's terms; `used_ms`, when the run was begun or refreshed,
    in milliseconds since 1970.
    """

    run_id: str
    artifact_uri: str
    is_finished: bool
    part: str
    used_ms: int
    artifacts: FsspecFolder | ProxiedArtifacts


class Runs:
    """The runs of every model on a server; methods raise what `MlflowServer.call` does."""

    def __init__(self, server: MlflowServer) -> None:
        self._server = server
        self._known: dict[tuple[str, str], Run] = {}
        self._making = threading.Lock()

    def list_models(self) -> tuple[str, ...]:
        """Returns the models that have an experiment, sorted."""
        query = f"name LIKE '{EXPERIMENT_PREFIX}%'"
        experiments = self._server.list_all("POST", "experiments/search", "experiments", filter=query)
        names = {str(experiment.get("name")).removeprefix(EXPERIMENT_PREFIX) for experiment in experiments}
        return tuple(sorted(filter(is_safe_name, names)))

    def find_experiment(self, model: str) -> str:
        """Returns the identifier of a model's experiment, "" if there is none."""
        name = EXPERIMENT_PREFIX + model
        answer = self._server.call("GET", "experiments/get-by-name", tolerated=MISSING, experiment_name=name)
        experiment = as_mapping(answer.get("experiment"))
        identifier = str(experiment.get("experiment_id", ""))
        if identifier and experiment.get("lifecycle_stage") != "active":
            raise RegistryError(
                f"experiment was deleted in MLflow: {name}\n  expected it to be active",
                hint=f"mlflow experiments restore --experiment-id {quoted(identifier)}",
            )
        return identifier

    def find(self, model: str, part: str) -> Run | None:
        """Returns the run of a part, None if there is none; of several the first that was finished."""
        runs = self._search(model, f"tags.`{_TAG_PART}` = '{part}'")
        self._known.pop((model, part), None)
        if runs:
            self._known[model, part] = runs[0]
        return runs[0] if runs else None

    def get(self, model: str, part: str) -> Run:
        """Returns what `find` returned last, or asks again; raises NotPublishedError if there is no run."""
        run = self._known.get((model, part)) or self.find(model, part)
        if run is None:
            raise NotPublishedError(f"no such part: {part} of {model} in {self._server.tracking_url}")
        return run

    def list_parts(self, model: str) -> tuple[Run, ...]:
        """Returns the runs of all of a model's parts."""
        return self._search(model, f"tags.`{_TAG_KIND}` = 'part'")

    def _search(self, model: str, query: str) -> tuple[Run, ...]:
        experiment = self.find_experiment(model)
        if not experiment:
            return ()
        where: dict[str, Any] = {"experiment_ids": [experiment], "order_by": ["start_time ASC"]}
        runs = self._server.list_all("POST", "runs/search", "runs", filter=query, **where)
        return tuple(sorted(map(self._parse, runs), key=lambda run: not run.is_finished))

    def _parse(self, fields: Mapping[str, Any]) -> Run:
        info, tags = as_mapping(fields.get("info")), tags_of(as_mapping(fields.get("data")))
        uri = str(info.get("artifact_uri", ""))
        times = (str(info.get("start_time", "")), tags.get(_TAG_REFRESHED, ""))
        return Run(
            run_id=str(info.get("run_id", "")),
            artifact_uri=uri,
            is_finished=info.get("status") == _FINISHED,
            part=tags.get(_TAG_PART, ""),
            used_ms=max((int(time_ms) for time_ms in times if _MILLISECONDS.fullmatch(time_ms)), default=0),
            artifacts=open_artifacts(uri, self._server),
        )

    def make(self, part: Part) -> Run:
        """Returns the run of a part, made now if there is none.

        Two publishers may each make one; readers take the one that was finished first.
        """
        with self._making:
            run = self._known.get((part.model, part.digest)) or self.find(part.model, part.digest)
            if run is None:
                tags = {_TAG_PART: part.digest, _TAG_KIND: "part", **_describe_part(part)}
                self._server.call(
                    "POST",
                    "runs/create",
                    experiment_id=self._make_experiment(part.model),
                    run_name=f"{tags['ortprep.targets']} {part.digest.removeprefix(PREFIX)[:12]}",
                    start_time=_now_ms(),
                    tags=as_pairs(tags),
                )
                run = self.find(part.model, part.digest)
            if run is None:
                raise RegistryUnavailableError(f"run is missing after it was created: {part.digest}")
            return run

    def _make_experiment(self, model: str) -> str:
        known = self.find_experiment(model)
        if known:
            return known
        # Another publisher may be the first.
        mark: dict[str, Any] = {"name": EXPERIMENT_PREFIX + model, "tags": as_pairs({"ortprep": "1"})}
        self._server.call("POST", "experiments/create", tolerated=EXISTS, **mark)
        return self.find_experiment(model)

    def finish(self, run: Run, part: Part, manifest: bytes | None) -> None:
        """Logs the figures in a part's `manifest.json`, if it has one, and marks its run as finished."""
        batch = _build_batch(part, None if manifest is None else _parse_manifest(manifest, part.model))
        self._server.call("POST", "runs/log-batch", run_id=run.run_id, **batch)
        done: dict[str, Any] = {"status": _FINISHED, "end_time": _now_ms()}
        self._server.call("POST", "runs/update", run_id=run.run_id, **done)

    def refresh(self, run: Run) -> None:
        """Notes that somebody relies on a run."""
        tag = {"key": _TAG_REFRESHED, "value": str(_now_ms())}
        self._server.call("POST", "runs/set-tag", run_id=run.run_id, **tag)

    def delete(self, run: Run) -> None:
        """Deletes a run; MLflow keeps it restorable until its own `mlflow gc`."""
        self._server.call("POST", "runs/delete", tolerated=MISSING, run_id=run.run_id)
        self._known.clear()


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def _describe_part(part: Part) -> dict[str, str]:
    """Returns the tags of a part's run, beside those it is found by."""
    variants = part.summary.variants
    return {
        "ortprep.model": part.model,
        "ortprep.source": part.source,
        "ortprep.spec": part.spec,
        "ortprep.created_at": part.summary.created_at,
        "ortprep.targets": _join(variant.target for variant in variants),
        "ortprep.onnxruntime": _join(variant.onnxruntime for variant in variants),
        "ortprep.hardware": _join(variant.hardware for variant in variants),
    }


def _join(texts: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(filter(None, texts)))[:_MAX_TEXT]


def _parse_manifest(manifest: bytes, model: str) -> Manifest | None:
    try:
        return decode(Manifest, parse_json(manifest, name="manifest.json"))
    except BundleError as error:
        log.warning("no metrics in MLflow for a part of %s: %s", model, error.message)
        return None


def _build_batch(part: Part, manifest: Manifest | None) -> dict[str, Any]:
    """Returns what `runs/log-batch` takes: what a part's manifest says, in MLflow's terms."""
    params = {"targets": _join(variant.target for variant in part.summary.variants)}
    if manifest is None:
        return {"params": as_pairs(params)}
    params["pipeline_version"] = manifest.pipeline_version[:_MAX_TEXT]
    params |= {
        f"{variant.name}.plan": variant.decision.shipped
        for variant in manifest.variants[:50]
        if variant.decision
    }
    # Always the same, so that logging a figure again does not make it a second one.
    try:
        at_ms = int(datetime.fromisoformat(part.summary.created_at).timestamp() * 1000)
    except ValueError:
        at_ms = 0
    figures = tuple(_list_figures(manifest))[:_MAX_METRICS]
    return {
        "metrics": [{"key": key, "value": value, "timestamp": at_ms, "step": 0} for key, value in figures],
        "params": as_pairs(params),
        "tags": as_pairs({"ortprep.git_commit": manifest.spec_commit} if manifest.spec_commit else {}),
    }


def _list_figures(manifest: Manifest) -> Iterator[tuple[str, float]]:
    for variant in manifest.variants:
        plans = (_DEFAULT_PLAN, variant.decision.shipped if variant.decision else _DEFAULT_PLAN)
        warm = (measurement for measurement in variant.measurements if measurement.cache == "warm")
        for plan in (plan for measurement in warm for plan in measurement.plans if plan.plan in plans):
            for figure in _FIGURES:
                summary = getattr(plan, figure)
                if math.isfinite(summary.median):
                    yield f"{variant.name}.{plan.plan}.{figure}", summary.median
