"""An MLflow server as a registry: bundles are artifacts of runs, versions are registered model versions.

Experiment `ortprep/NAME`     a run per part: bundle/…, part.json, signatures as tags
Registered model NAME         versions with their documents and labels as tags; MLflow's own aliases, and what
                              they named before as tags
"""

from __future__ import annotations

import logging
import posixpath
import re
import threading
import time
from collections.abc import Collection, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ortprep.bundle.digest import PREFIX, digest_bytes
from ortprep.bundle.loader_config import FileEntry
from ortprep.bundle.paths import is_safe_name
from ortprep.errors import NotPublishedError, RegistryError, RegistryUnavailableError
from ortprep.registry.backend import POINTERS, Backend, Kind, SweepResult, digest_of, digests_of
from ortprep.registry.backends.mlflow_server import (
    EXISTS,
    MISSING,
    MlflowServer,
    ProxiedArtifacts,
    as_pairs,
    objects_in,
    tags_of,
)
from ortprep.registry.documents import Part, Version, as_mapping, parse_part, parse_signature, parse_version
from ortprep.registry.versions import check_model_name
from ortprep.transport.transfer import Download

log = logging.getLogger(__name__)

_EXPERIMENT = "ortprep/"
_TAG_KIND, _TAG_PART, _TAG_REFRESHED = "ortprep.kind", "ortprep.part", "ortprep.refreshed_ms"
_TAG_VERSION = "ortprep.version"
_BUNDLE, _PART_FILE, _FINISHED = "bundle", "part.json", "FINISHED"
_FRESH_MS = 3_600_000
"""Age up to which a run need not be refreshed, in milliseconds."""

_NUMBER = re.compile("[0-9]{1,15}")


@dataclass(frozen=True)
class Run:
    """The run of a part.

    Attributes:
        is_finished: Whether all that it is to hold is there.
        part: Digest of the part.
        used_ms: Time of its start or last refresh, in milliseconds since 1970.
        artifacts: Its files; `artifact_uri` says where they are in MLflow's terms.
    """

    run_id: str
    artifact_uri: str
    is_finished: bool
    part: str
    used_ms: int
    tags: Mapping[str, str]
    artifacts: ProxiedArtifacts


class MlflowBackend(Backend):
    """A registry in MLflow, by the URL of a `MlflowServer`.

    Credentials come from the variables of MLflow's client: `MLFLOW_TRACKING_USERNAME` and
    `MLFLOW_TRACKING_PASSWORD`, or `MLFLOW_TRACKING_TOKEN`.
    """

    def __init__(self, url: str) -> None:
        self._server = MlflowServer(url)
        self.url = f"mlflow+{self._server.url}"
        self._documents: dict[str, bytes] = {}
        """Documents in the tags that were listed, by their digests."""
        self._known: dict[tuple[str, str], Run] = {}
        self._making = threading.Lock()

    def close(self) -> None:
        self._server.close()

    # Files

    def has_file(self, part: Part, entry: FileEntry) -> bool:
        run = self._find_run(check_model_name(part.model), part.digest)
        if run is None:
            return False
        for path in _paths_of(part, entry):
            if run.artifacts.find(posixpath.dirname(path)).get(path) != entry.size_bytes:
                return False
        if _now_ms() - run.used_ms > _FRESH_MS:
            tag = {"key": _TAG_REFRESHED, "value": str(_now_ms())}
            self._server.call("POST", "runs/set-tag", run_id=run.run_id, **tag)
        return True

    def open_file(self, part: Part, entry: FileEntry, offset: int = 0) -> AbstractContextManager[Download]:
        run = self._get_run(part.model, part.digest)
        return run.artifacts.open(f"{_BUNDLE}/{entry.path}", offset, name=entry.path)

    def put_file(self, part: Part, entry: FileEntry, source: Path) -> None:
        paths = _paths_of(part, entry)
        for path in paths:
            # Its server decodes names twice, so one with a percent sign could become another's.
            if "%" in path or "#" in path:
                raise RegistryError(
                    f"MLflow cannot store a file of this name: {path}\n  expected one without '%' and '#'"
                )
        run = self._make_run(part)
        for path in paths:
            run.artifacts.upload(path, entry, source)

    # Refs

    def open_ref(self, model: str, kind: Kind, name: str) -> AbstractContextManager[Download]:
        digest = digest_of(name)
        if kind == Kind.PART:
            return self._get_run(model, digest).artifacts.open(_PART_FILE, 0, name=f"{kind}/{name}")
        if digest not in self._documents:
            self.list_refs(model, kind)
        if digest not in self._documents:
            raise NotPublishedError(f"not in MLflow: {kind}/{name} of {model}")
        return nullcontext(Download(iter([self._documents[digest]]), 0))

    def list_refs(self, model: str, kind: Kind) -> Mapping[str, str]:
        if kind in POINTERS:
            return self._list_pointers(model, kind)
        if kind == Kind.SIGNATURE:
            tagged: Iterable[Mapping[str, str]] = (run.tags for run in self._list_runs(model))
        else:
            tagged = () if kind == Kind.PART else self._list_versions(model).values()
        return {name: digest for tags in tagged for name, digest in self._read_tags(kind, tags).items()}

    def _read_tags(self, kind: Kind, tags: Mapping[str, str]) -> dict[str, str]:
        """Returns the refs of a kind that are among tags, and remembers their documents.

        Raises:
            RegistryError: A number of MLflow has not just the one version that it was made for. Who may set
                tags could add another, and a collection of garbage would delete the number with both.
        """
        start = f"ortprep.{kind}."
        texts = {name.removeprefix(start): text for name, text in tags.items() if name.startswith(start)}
        found = {name: text.encode() for name, text in texts.items()}
        refs = digests_of(found)
        refs = {name: digest for name, digest in refs.items() if digest_bytes(found[name]) == digest}
        own = tags.get(_TAG_VERSION)
        if kind == Kind.VERSION and (own or found) and not (len(found) == 1 and [*refs.values()] == [own]):
            raise RegistryError(
                f"tags of a version in MLflow were changed: {own or 'without a digest'}\n"
                f"  expected one tag {start}…, with its document, got {len(found)}",
                hint="remove the tags that ortprep did not write, in MLflow's pages",
            )
        self._documents |= {digest: found[name] for name, digest in refs.items()}
        return refs

    def _list_pointers(self, model: str, kind: Kind) -> dict[str, str]:
        """Returns the digests of the versions that aliases name, or named before."""
        answer = self._server.call(
            "GET", "registered-models/get", tolerated=MISSING, name=check_model_name(model)
        )
        registered = as_mapping(answer.get("registered_model"))
        if kind == Kind.PREVIOUS:
            tags, start = tags_of(registered), f"ortprep.{kind}."
            return {key.removeprefix(start): text for key, text in tags.items() if key.startswith(start)}
        aliases = objects_in(registered, "aliases")
        digests = {number: digest for digest, number in self._number_versions(model)} if aliases else {}
        named = {str(alias.get("alias")): str(alias.get("version")) for alias in aliases}
        return {alias: digests[number] for alias, number in named.items() if number in digests}

    def _list_versions(self, model: str) -> dict[int, dict[str, str]]:
        """Returns the tags of all versions, also those that are not ours, by MLflow's numbers, in order."""
        query = f"name='{check_model_name(model)}'"
        listed = self._server.list_all("GET", "model-versions/search", "model_versions", filter=query)
        numbered = {str(version.get("version")): tags_of(version) for version in listed}
        versions = {int(number): tags for number, tags in numbered.items() if _NUMBER.fullmatch(number)}
        return dict(sorted(versions.items()))

    def _number_versions(self, model: str) -> list[tuple[str, str]]:
        """Returns the digests of our versions with MLflow's numbers of them, in order."""
        listed = self._list_versions(model).items()
        return [
            (digest, str(number))
            for number, tags in listed
            for digest in self._read_tags(Kind.VERSION, tags).values()
        ]

    def put_ref(self, model: str, kind: Kind, name: str, data: bytes) -> None:
        """Stores a document; MLflow keeps `latest` and `v1` for itself, and takes no dots in aliases."""
        tag = {"key": f"ortprep.{kind}.{name}", "value": data.decode()}
        if kind == Kind.PART:
            self._put_part(parse_part(data))
        elif kind == Kind.VERSION:
            self._put_version(parse_version(data), tag)
        elif kind == Kind.SIGNATURE:
            run = self._get_run(model, parse_signature(data)[0])
            self._server.call("POST", "runs/set-tag", run_id=run.run_id, **tag)
        elif kind == Kind.PREVIOUS:
            tag["value"] = digest_bytes(data)
            self._server.call("POST", "registered-models/set-tag", name=model, **tag)
        else:
            number = self._number_of(model, digest_bytes(data))
            self._server.call("POST", "registered-models/alias", name=model, alias=name, version=number)

    def _number_of(self, model: str, digest: str) -> str:
        number = next((number for one, number in self._number_versions(model) if one == digest), None)
        if number is None:
            raise NotPublishedError(f"no such version in MLflow: {model}@{digest}")
        return number

    def _put_version(self, version: Version, tag: dict[str, str]) -> None:
        """Registers a version, with its document as a tag; its files are those of the part prepared last."""
        model = version.model
        newest = max(version.parts, key=lambda part: (part.created_at, part.digest))
        run = self._get_run(model, newest.digest)
        if version.digest in dict(self._number_versions(model)):
            return
        mark = as_pairs({"ortprep": "1"})
        self._server.call("POST", "registered-models/create", tolerated=EXISTS, name=model, tags=mark)
        files = {"source": f"{run.artifact_uri}/{_BUNDLE}", "run_id": run.run_id}
        tags = {_TAG_VERSION: version.digest, "ortprep.label": version.label}
        self._server.call("POST", "model-versions/create", name=model, tags=[*as_pairs(tags), tag], **files)
        # Another publisher may have registered the same at the same moment: the first of them stays.
        for number in [number for one, number in self._number_versions(model) if one == version.digest][1:]:
            self._delete_version(model, number)

    def delete_version(self, model: str, name: str) -> None:
        for digest, number in self._number_versions(model):
            if digest == digest_of(name):
                self._delete_version(model, number)

    def _delete_version(self, model: str, number: str) -> None:
        which = {"name": model, "version": number}
        self._server.call("DELETE", "model-versions/delete", tolerated=MISSING, **which)

    # Models and runs

    def list_models(self) -> tuple[str, ...]:
        """Returns the names of all models that parts were published of, sorted."""
        query = f"name LIKE '{_EXPERIMENT}%'"
        experiments = self._server.list_all("POST", "experiments/search", "experiments", filter=query)
        names = {str(experiment.get("name")).removeprefix(_EXPERIMENT) for experiment in experiments}
        return tuple(sorted(filter(is_safe_name, names)))

    def sweep(self, model: str, live: Collection[Part], *, grace_s: float, dry_run: bool) -> SweepResult:
        """Deletes runs of parts that no version has; their files go when the owner runs `mlflow gc`."""
        live_digests = {part.digest for part in live}
        oldest_ms = (time.time() - grace_s) * 1000
        runs = self._list_runs(check_model_name(model))
        unused = [run for run in runs if run.part not in live_digests and run.used_ms <= oldest_ms]
        for run in () if dry_run else unused:
            self._server.call("POST", "runs/delete", tolerated=MISSING, run_id=run.run_id)
            self._known.pop((model, run.part), None)
        return SweepResult(tuple(run.part for run in unused))

    def _list_runs(self, model: str, part: str = "") -> tuple[Run, ...]:
        """Returns the runs of a model's parts, or of one part; those that were finished come first."""
        experiment = self._find_experiment(model)
        if not experiment:
            return ()
        query = f"tags.`{_TAG_PART}` = '{part}'" if part else f"tags.`{_TAG_KIND}` = 'part'"
        where: dict[str, Any] = {"experiment_ids": [experiment], "order_by": ["start_time ASC"]}
        runs = self._server.list_all("POST", "runs/search", "runs", filter=query, **where)
        return tuple(sorted(map(self._parse_run, runs), key=lambda run: not run.is_finished))

    def _parse_run(self, fields: Mapping[str, Any]) -> Run:
        """Returns the run in an answer; raises AccessDeniedError if its files are elsewhere."""
        info, tags = as_mapping(fields.get("info")), tags_of(as_mapping(fields.get("data")))
        uri = str(info.get("artifact_uri", ""))
        times = (str(info.get("start_time", "")), tags.get(_TAG_REFRESHED, ""))
        return Run(
            run_id=str(info.get("run_id", "")),
            artifact_uri=uri,
            is_finished=info.get("status") == _FINISHED,
            part=tags.get(_TAG_PART, ""),
            used_ms=max((int(time_ms) for time_ms in times if _NUMBER.fullmatch(time_ms)), default=0),
            tags=tags,
            artifacts=ProxiedArtifacts(uri, self._server),
        )

    def _find_experiment(self, model: str) -> str:
        """Returns the identifier of a model's experiment, "" if there is none."""
        name = _EXPERIMENT + model
        answer = self._server.call("GET", "experiments/get-by-name", tolerated=MISSING, experiment_name=name)
        return str(as_mapping(answer.get("experiment")).get("experiment_id", ""))

    def _find_run(self, model: str, part: str) -> Run | None:
        """Returns the run of a part, None if there is none; of several the first that was finished."""
        runs = self._list_runs(model, part)
        self._known.pop((model, part), None)
        if runs:
            self._known[model, part] = runs[0]
        return runs[0] if runs else None

    def _get_run(self, model: str, part: str) -> Run:
        """Returns what `_find_run` returned last, or asks again; raises NotPublishedError."""
        run = self._known.get((model, part)) or self._find_run(model, part)
        if run is None:
            raise NotPublishedError(f"no such part: {part} of {model} in {self._server.url}")
        return run

    def _make_run(self, part: Part) -> Run:
        """Returns the run of a part, made now if there is none; two publishers may each make one."""
        with self._making:
            run = self._known.get((part.model, part.digest)) or self._find_run(part.model, part.digest)
            if run is None:
                self._server.call(
                    "POST",
                    "runs/create",
                    experiment_id=self._make_experiment(part.model),
                    run_name=part.digest.removeprefix(PREFIX)[:12],
                    start_time=_now_ms(),
                    tags=as_pairs({_TAG_PART: part.digest, _TAG_KIND: "part"}),
                )
                run = self._find_run(part.model, part.digest)
            if run is None:
                raise RegistryUnavailableError(f"run is missing after it was created: {part.digest}")
            return run

    def _make_experiment(self, model: str) -> str:
        known = self._find_experiment(model)
        if known:
            return known
        # Another publisher may be the first.
        mark: dict[str, Any] = {"name": _EXPERIMENT + model, "tags": as_pairs({"ortprep": "1"})}
        self._server.call("POST", "experiments/create", tolerated=EXISTS, **mark)
        return self._find_experiment(model)

    def _put_part(self, part: Part) -> None:
        """Writes the document of a part, and marks its run as finished."""
        run = self._make_run(part)
        run.artifacts.write(_PART_FILE, part.data)
        if not run.is_finished:
            done: dict[str, Any] = {"status": _FINISHED, "end_time": _now_ms()}
            self._server.call("POST", "runs/update", run_id=run.run_id, **done)


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def _paths_of(part: Part, entry: FileEntry) -> list[str]:
    """Returns where a file goes among a run's artifacts: MLflow keeps it once for each of its names."""
    return sorted({f"{_BUNDLE}/{one.path}" for one in part.files if one.sha256 == entry.sha256})
