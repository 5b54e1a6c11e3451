"""Which MLflow runs hold a model's records and parts."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from pipeline.errors import NotPublishedError, RegistryError, RegistryUnavailableError
from pipeline.registry.backends.mlflow.artifacts import Artifacts, open_artifacts
from pipeline.registry.backends.mlflow.errors import translated
from pipeline.registry.backends.mlflow.http import refusal, request
from pipeline.registry.retries import with_retries
from pipeline.spec.redaction import redact_url

EXPERIMENT_PREFIX = "ortprep/"
TAG_KIND, TAG_PART = "ortprep.kind", "ortprep.part"

_FINISHED = "FINISHED"
_MOST_RUNS = 10_000
_PAGE = 1000
_OVERLOADED = (429, 500, 502, 503, 504)
_PROBE_TIMEOUT_S = 20.0
_REACHABLE_S = 30.0


@dataclass(frozen=True)
class Run:
    """A run and its files.

    Attributes:
        run_id: Of the run.
        experiment_id: Of its experiment.
        artifact_uri: Where its files are, in MLflow's terms.
        is_finished: Whether everything it is to hold is there.
        artifacts: Its files.
    """

    run_id: str
    experiment_id: str
    artifact_uri: str
    is_finished: bool
    artifacts: Artifacts


class Tracking:
    """A tracking server, or what the client takes for one.

    The client asks again for minutes when a server is down, and only its environment can tell it otherwise
    (`MLFLOW_HTTP_REQUEST_MAX_RETRIES`, `MLFLOW_HTTP_REQUEST_TIMEOUT`), so whether a server is there at all is
    found out before, by one short request.

    Args:
        client: `MlflowClient`.
        tracking_uri: Its tracking URI.
        registry_uri: Its registry URI, None for the client's own choice.
    """

    def __init__(self, client: Any, *, tracking_uri: str, registry_uri: str | None) -> None:
        self.client = client
        self._tracking_uri = tracking_uri
        self._registry_uri = registry_uri
        self._name = redact_url(tracking_uri)
        self._reachable_until_s = 0.0
        self._known: dict[tuple[str, str, str], tuple[Run, ...]] = {}
        self._making = threading.Lock()

    @contextmanager
    def asking(self, doing: str) -> Iterator[Any]:
        """Yields the client, and raises what it raises as an error of ours.

        Raises:
            RegistryUnavailableError: There was no answer.
            AccessDeniedError: The server wants other credentials.
            NotPublishedError: It has no such thing.
            RegistryError: It refused for another reason.
        """
        doing = f"{doing} at {self._name}"
        if (
            self._tracking_uri.startswith(("http://", "https://"))
            and time.monotonic() > self._reachable_until_s
        ):
            with_retries(lambda: self._probe(doing))
            self._reachable_until_s = time.monotonic() + _REACHABLE_S
        try:
            with translated(doing):
                yield self.client
        except RegistryUnavailableError:
            self._reachable_until_s = 0.0
            raise

    def _probe(self, doing: str) -> None:
        with request(self._tracking_uri, "/health", "GET", doing, timeout=_PROBE_TIMEOUT_S) as response:
            # Any other answer is one; servers behind a proxy need not have that page.
            if response.status_code in _OVERLOADED:
                raise refusal(response, doing)

    def find_experiment(self, model: str) -> str | None:
        """Returns the identifier of a model's experiment, None if there is none."""
        name = EXPERIMENT_PREFIX + model
        with self.asking(f"find experiment: {name}") as client:
            found = client.get_experiment_by_name(name)
        if found is not None and found.lifecycle_stage != "active":
            raise RegistryError(
                f"experiment was deleted in MLflow: {name}\n  expected it to be active",
                hint=f"mlflow experiments restore --experiment-id {found.experiment_id}",
            )
        return None if found is None else str(found.experiment_id)

    def find_runs(self, model: str, tag: str, value: str) -> tuple[Run, ...]:
        """Returns a model's runs with a tag: finished ones first, then the oldest first."""
        experiment = self.find_experiment(model)
        found = () if experiment is None else self._search(experiment, f"tags.`{tag}` = '{value}'")
        self._known[model, tag, value] = found
        return found

    def _search(self, experiment: str, wanted: str) -> tuple[Run, ...]:
        runs: list[Any] = []
        token: str | None = None
        with self.asking(f"find runs: {wanted}") as client:
            while token or not runs:
                page = client.search_runs(
                    [experiment], wanted, max_results=_PAGE, order_by=["start_time ASC"], page_token=token
                )
                runs += page
                token = page.token
                if not token or len(runs) > _MOST_RUNS:
                    break
        runs.sort(key=lambda run: (run.info.status != _FINISHED, run.info.start_time, run.info.run_id))
        return tuple(self._wrap(run) for run in runs)

    def _wrap(self, run: Any) -> Run:
        uri = str(run.info.artifact_uri)
        return Run(
            run.info.run_id,
            run.info.experiment_id,
            uri,
            run.info.status == _FINISHED,
            open_artifacts(uri, tracking_uri=self._tracking_uri, registry_uri=self._registry_uri),
        )

    def known_runs(self, model: str, tag: str, value: str) -> tuple[Run, ...]:
        """Returns what `find_runs` said last, if that was anything; else asks."""
        return self._known.get((model, tag, value)) or self.find_runs(model, tag, value)

    def forget_runs(self, model: str, tag: str, value: str) -> None:
        """Makes `known_runs` ask again."""
        self._known.pop((model, tag, value), None)

    def make_run(self, model: str, name: str, tag: str, value: str, tags: dict[str, str]) -> Run:
        """Returns the run with a tag, made now if there is none.

        Two publishers may each make one; readers look at all of them.
        """
        with self._making:
            found = self.known_runs(model, tag, value)
            if not found:
                experiment = self._make_experiment(model)
                with self.asking(f"create run: {name}") as client:
                    client.create_run(experiment, run_name=name, tags={tag: value, **tags})
                found = self.find_runs(model, tag, value)
            if not found:
                raise RegistryUnavailableError(
                    f"run is not there after it was made: {name} of {model}\n  expected to find it"
                )
            return found[0]

    def _make_experiment(self, model: str) -> str:
        name = EXPERIMENT_PREFIX + model
        found = self.find_experiment(model)
        if found is not None:
            return found
        try:
            with self.asking(f"create experiment: {name}") as client:
                return str(client.create_experiment(name, tags={"ortprep": "1"}))
        except RegistryUnavailableError:
            raise
        except RegistryError:
            # Another publisher may have been the first.
            found = self.find_experiment(model)
            if found is None:
                raise
            return found

    def list_experiments(self) -> tuple[str, ...]:
        """Returns the models that have an experiment, in no order."""
        names: list[str] = []
        token: str | None = None
        with self.asking("list experiments") as client:
            while True:
                page = client.search_experiments(
                    filter_string=f"name LIKE '{EXPERIMENT_PREFIX}%'", max_results=_PAGE, page_token=token
                )
                names += [experiment.name.removeprefix(EXPERIMENT_PREFIX) for experiment in page]
                token = page.token
                if not token or len(names) > _MOST_RUNS:
                    return tuple(names)

    def finish_run(self, run: Run, batch: dict[str, list[Any]]) -> None:
        """Logs a run's metrics, parameters and tags, and marks it as finished."""
        with self.asking(f"finish run: {run.run_id}") as client:
            client.log_batch(run.run_id, **batch)
            client.update_run(run.run_id, _FINISHED)

    def delete_runs(self, model: str, tag: str, value: str) -> None:
        """Deletes all runs with a tag; MLflow keeps them restorable until its own `mlflow gc`."""
        for run in self.find_runs(model, tag, value):
            with suppress(NotPublishedError), self.asking(f"delete run: {run.run_id}") as client:
                client.delete_run(run.run_id)
        self.forget_runs(model, tag, value)
