"""An MLflow server as a registry: bundles are artifacts of runs, versions are registered model versions.

Experiment `ortprep/NAME`     a run per part: bundle/…, part.json, signatures; its figures as metrics
Registered model NAME         versions with their documents, labels, signatures and moves as tags; aliases
"""

from __future__ import annotations

import posixpath
import re
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from ortprep.bundle.digest import PREFIX, digest_bytes
from ortprep.bundle.loader_config import FileEntry
from ortprep.bundle.manifest import MANIFEST_FILE, MAX_MANIFEST_BYTES
from ortprep.errors import NotPublishedError, RegistryError
from ortprep.registry.backend import KIND_NAMES, Backend, Download, Known, Report, SweepResult
from ortprep.registry.backends.mlflow.runs import Runs
from ortprep.registry.backends.mlflow.server import (
    EXISTS,
    MISSING,
    MlflowServer,
    as_pairs,
    objects_in,
    tags_of,
)
from ortprep.registry.documents import MAX_DOCUMENT_BYTES, Part, Version, as_mapping, check_model_name
from ortprep.registry.progress import ignore

_TAG_DOCUMENT, _TAG_LABEL = "ortprep.document", "ortprep.label"
_BUNDLE, _PART_FILE = "bundle", "part.json"
_MAX_ATTACHED = 100
_NUMBER = re.compile("[0-9]{1,20}")


class MlflowBackend(Backend):
    """A registry in MLflow, by the URL of a `MlflowServer`.

    Credentials and the timeout are those of MLflow's client: `MLFLOW_TRACKING_USERNAME` and
    `MLFLOW_TRACKING_PASSWORD`, or `MLFLOW_TRACKING_TOKEN`; `MLFLOW_HTTP_REQUEST_TIMEOUT`.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self._server = MlflowServer(url)
        self._runs = Runs(self._server)

    def list_models(self) -> tuple[str, ...]:
        """Returns the names of all models that parts were published of, sorted."""
        return self._runs.list_models()

    def read_versions(self, model: str, known: Known) -> tuple[bytes, ...]:
        versions = self._list_versions(model)
        return tuple(tags[_TAG_DOCUMENT].encode() for tags in versions.values())

    def _list_versions(self, model: str) -> dict[int, dict[str, str]]:
        """Returns the tags of all versions that are ours, by MLflow's numbers of them, in order."""
        query = f"name='{check_model_name(model)}'"
        listed = self._server.list_all("GET", "model-versions/search", "model_versions", filter=query)
        numbered = {str(version.get("version")): tags_of(version) for version in listed}
        versions = {int(number): tags for number, tags in numbered.items() if _NUMBER.fullmatch(number)}
        return {number: tags for number, tags in sorted(versions.items()) if _TAG_DOCUMENT in tags}

    def _numbers(self, model: str) -> dict[str, int]:
        """Returns MLflow's numbers of all versions by the digests of their documents."""
        return {_digest_of(tags): number for number, tags in self._list_versions(model).items()}

    def _number_of(self, model: str, version: Version) -> str:
        number = self._numbers(model).get(version.digest)
        if number is None:
            raise NotPublishedError(f"no such version in MLflow: {model}@{version.digest}")
        return str(number)

    def read_aliases(self, model: str) -> Mapping[str, str]:
        answer = self._server.call(
            "GET", "registered-models/get", tolerated=MISSING, name=check_model_name(model)
        )
        aliases = objects_in(as_mapping(answer.get("registered_model")), "aliases")
        if not aliases:
            return {}
        digests = {str(number): _digest_of(tags) for number, tags in self._list_versions(model).items()}
        named = {str(alias.get("alias")): str(alias.get("version")) for alias in aliases}
        return {alias: digests[number] for alias, number in named.items() if number in digests}

    def add_version(self, model: str, version: Version) -> bool:
        """Adds a version whose parts are there; its files are those of the part prepared last.

        MLflow numbers versions one after the other: of two with one label the lower number has it.
        """
        newest = max(version.parts, key=lambda part: (part.created_at, part.digest))
        run = self._runs.get(model, newest.digest)
        if version.digest in self._numbers(model):
            return True
        marks = {"tags": as_pairs({"ortprep": "1"}), "description": "ONNX Runtime bundles"}
        self._server.call("POST", "registered-models/create", tolerated=EXISTS, name=model, **marks)
        files = {"source": f"{run.artifact_uri}/{_BUNDLE}", "run_id": run.run_id}
        tags = as_pairs(_version_tags(version))
        created = self._server.call("POST", "model-versions/create", name=model, tags=tags, **files)
        new_number = int(as_mapping(created.get("model_version")).get("version") or 0)
        for number, tags_of_version in self._list_versions(model).items():
            is_same = _digest_of(tags_of_version) == version.digest
            if number < new_number and (is_same or tags_of_version.get(_TAG_LABEL) == version.label):
                self._delete(model, new_number)
                return is_same
        return True

    def delete_version(self, model: str, version: Version) -> None:
        for number, tags in self._list_versions(model).items():
            if _digest_of(tags) == version.digest:
                self._delete(model, number)

    def _delete(self, model: str, number: int) -> None:
        which = {"name": model, "version": str(number)}
        self._server.call("DELETE", "model-versions/delete", tolerated=MISSING, **which)

    def set_alias(self, model: str, alias: str, version: Version) -> None:
        """Makes an alias name a version; MLflow keeps `latest` and `v1` for itself, and takes no dots."""
        which = {"name": model, "alias": alias, "version": self._number_of(model, version)}
        self._server.call("POST", "registered-models/alias", **which)

    def find_missing(self, model: str, part: Part) -> tuple[FileEntry, ...]:
        """Returns those of a part's files that have to be uploaded, and refreshes its run."""
        run = self._runs.find(check_model_name(model), part.digest)
        sizes = {}
        if run is not None:
            folders = {posixpath.dirname(_bundle_path(entry.path)) for entry in part.files}
            files = {path: file for folder in folders for path, file in run.artifacts.find(folder).items()}
            sizes = {path: file.size_bytes for path, file in files.items()}
            self._runs.refresh(run)
        missing = [entry for entry in part.files if sizes.get(_bundle_path(entry.path)) != entry.size_bytes]
        return tuple({entry.sha256: entry for entry in missing}.values())

    def upload_file(self, model: str, part: Part, entry: FileEntry, source: Path, report: Report) -> None:
        paths = sorted({other.path for other in part.files if other.sha256 == entry.sha256} | {entry.path})
        for path in paths:
            # Its server decodes names twice, so one with a percent sign could become another's.
            if "%" in path or "#" in path:
                raise RegistryError(
                    f"MLflow cannot store a file of this name: {path}\n  expected one without '%' and '#'"
                )
        run = self._runs.make(part)
        for path in paths:
            run.artifacts.upload(_bundle_path(path), entry, source, report if path == paths[0] else ignore)

    def put_part(self, model: str, part: Part) -> None:
        """Writes the document of a part, and the bundle's figures as metrics of its run."""
        run = self._runs.make(part)
        run.artifacts.write(_PART_FILE, part.data)
        if run.is_finished:
            return
        manifest = None
        if any(entry.path == MANIFEST_FILE for entry in part.files):
            manifest = run.artifacts.read(_bundle_path(MANIFEST_FILE), limit_bytes=MAX_MANIFEST_BYTES)
        self._runs.finish(run, part, manifest)

    def read_part(self, model: str, digest: str) -> bytes:
        artifacts = self._runs.get(check_model_name(model), digest).artifacts
        return artifacts.read(_PART_FILE, limit_bytes=MAX_DOCUMENT_BYTES)

    def open_file(
        self, model: str, part: Part, entry: FileEntry, offset: int
    ) -> AbstractContextManager[Download]:
        artifacts = self._runs.get(model, part.digest).artifacts
        return artifacts.open(_bundle_path(entry.path), offset, name=entry.path)

    def attach(self, model: str, subject: Part | Version, kind: str, data: bytes) -> None:
        """Attaches a small document: to a version as a tag, to a part as a file of its run."""
        name = digest_bytes(data).removeprefix(PREFIX)
        if isinstance(subject, Part):
            path = f"{KIND_NAMES[kind]}s/{name}.json"
            self._runs.get(model, subject.digest).artifacts.write(path, data)
            return
        tag = {"key": f"ortprep.{KIND_NAMES[kind]}.{name[:16]}", "value": data.decode()}
        which = {"name": model, "version": self._number_of(model, subject)}
        self._server.call("POST", "model-versions/set-tag", **which, **tag)

    def read_attached(
        self, model: str, subjects: Sequence[Part | Version], kind: str
    ) -> Mapping[str, tuple[bytes, ...]]:
        parts = [subject for subject in subjects if isinstance(subject, Part)]
        documents = {part.digest: self._read_files(part, f"{KIND_NAMES[kind]}s") for part in parts}
        versions = {subject.digest for subject in subjects if isinstance(subject, Version)}
        for tags in self._list_versions(model).values() if versions else ():
            if _digest_of(tags) in versions:
                start = f"ortprep.{KIND_NAMES[kind]}."
                documents[_digest_of(tags)] = tuple(
                    text.encode() for name, text in tags.items() if name.startswith(start)
                )
        return dict.fromkeys(versions, ()) | documents

    def _read_files(self, part: Part, folder: str) -> tuple[bytes, ...]:
        run = self._runs.find(part.model, part.digest)
        if run is None:
            return ()
        paths = sorted(run.artifacts.find(folder))[:_MAX_ATTACHED]
        return tuple(run.artifacts.read(path, limit_bytes=MAX_DOCUMENT_BYTES) for path in paths)

    def sweep(self, model: str, live: Collection[Part], *, grace_s: float, dry_run: bool) -> SweepResult:
        """Deletes runs of parts that no version has; their files go when the owner runs `mlflow gc`."""
        live_digests = {part.digest for part in live}
        oldest_ms = (time.time() - grace_s) * 1000
        runs = self._runs.list_parts(check_model_name(model))
        unused = [run for run in runs if run.part not in live_digests and run.used_ms <= oldest_ms]
        for run in () if dry_run else unused:
            self._runs.delete(run)
        return SweepResult(tuple(run.part for run in unused))


def _digest_of(tags: Mapping[str, str]) -> str:
    """Returns the digest of a version's document, whatever its other tags say."""
    return digest_bytes(tags[_TAG_DOCUMENT].encode())


def _version_tags(version: Version) -> dict[str, str]:
    targets = {variant.target for part in version.parts for variant in part.variants}
    return {
        _TAG_DOCUMENT: version.data.decode(),
        "ortprep.version": version.digest,
        _TAG_LABEL: version.label,
        "ortprep.targets": ", ".join(sorted(targets)),
    }


def _bundle_path(path: str) -> str:
    return f"{_BUNDLE}/{path}"
