"""An MLflow server as a registry: records and bundles are artifacts of runs, versions are registered models.

Experiment `ortprep/NAME`
    run `records`            records/KIND-HEX.json
    run per part             bundle/…, with the bundle's figures as metrics
Registered model NAME        a version for each of ours, with its labels as a tag and its aliases
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

from pipeline.bundle.digest import digest_bytes
from pipeline.bundle.loader_config import FileEntry
from pipeline.bundle.manifest import MANIFEST_FILE, MAX_MANIFEST_BYTES
from pipeline.bundle.paths import is_safe_name
from pipeline.errors import AccessDeniedError, NotPublishedError, RegistryError, RegistryUnavailableError
from pipeline.registry.backend import Block, Report, StoredFile
from pipeline.registry.backends.mlflow.artifacts import read_whole
from pipeline.registry.backends.mlflow.errors import import_client, translated
from pipeline.registry.backends.mlflow.part import build_batch, part_tags, run_name
from pipeline.registry.backends.mlflow.runs import TAG_KIND, TAG_PART, Run, Tracking
from pipeline.registry.backends.mlflow.upload import Upload, upload_bytes
from pipeline.registry.backends.mlflow.views import BUNDLE, View
from pipeline.registry.records import (
    MAX_RECORD_BYTES,
    MAX_RECORDS,
    PartRecord,
    RecordName,
    record_digest,
)
from pipeline.registry.retries import with_retries
from pipeline.registry.state import State, Version

_RECORDS = "records"
_SCHEME = "mlflow"


class MlflowBackend:
    """A registry in MLflow.

    Credentials come from where MLflow takes them: `MLFLOW_TRACKING_USERNAME` and `MLFLOW_TRACKING_PASSWORD`,
    or `MLFLOW_TRACKING_TOKEN`. How long its client waits, and how often it asks again, is up to
    `MLFLOW_HTTP_REQUEST_TIMEOUT` and `MLFLOW_HTTP_REQUEST_MAX_RETRIES` (files and records, which do not go
    through the client, are asked for four times).

    Args:
        url: `mlflow+` and a tracking URI, as in `mlflow+https://HOST`; or `mlflow://` for the tracking URI
            and registry URI that MLflow itself takes from its environment.

    Raises:
        MissingExtraError: MLflow's client is not installed.
        RegistryError: The URL is malformed, or has credentials in it.
    """

    def __init__(self, url: str) -> None:
        tracking_uri = _tracking_uri(url)
        mlflow = import_client()
        registry_uri: str | None = tracking_uri
        with translated(f"use tracking URI: {url}"):
            if tracking_uri is None:
                if not mlflow.is_tracking_uri_set():
                    raise RegistryError(
                        f"no tracking URI for {url}\n  expected one in MLFLOW_TRACKING_URI, got none",
                        hint="export MLFLOW_TRACKING_URI=http://HOST:PORT",
                    )
                tracking_uri, registry_uri = str(mlflow.get_tracking_uri()), None
            client = mlflow.MlflowClient(tracking_uri=tracking_uri, registry_uri=registry_uri)
        self._url = url
        self._tracking = Tracking(client, tracking_uri=tracking_uri, registry_uri=registry_uri)

    @property
    def url(self) -> str:
        """Where it is, as the user wrote it."""
        return self._url

    def list_models(self) -> tuple[str, ...]:
        """Returns the names of all models with at least one record, sorted."""
        names = sorted(name for name in self._tracking.list_experiments() if is_safe_name(name))
        return tuple(name for name in names if self.list_records(name))

    def list_records(self, model: str) -> tuple[RecordName, ...]:
        """Returns the names of a model's records."""
        found: set[RecordName] = set()
        for run in self._tracking.find_runs(_checked(model), TAG_KIND, _RECORDS):
            names = (
                RecordName.parse(file.name.removesuffix(".json"))
                for file in run.artifacts.list_folder(_RECORDS)
                # Older servers write into place: what was cut off at once is no record.
                if file.size_bytes and file.name.endswith(".json") and not file.is_folder
            )
            found.update(name for name in names if name is not None)
        if len(found) > MAX_RECORDS:
            raise RegistryError(
                f"too many records: {model} in {self._url}\n"
                f"  expected at most {MAX_RECORDS}, got {len(found)}"
            )
        return tuple(sorted(found))

    def read_record(self, model: str, name: RecordName) -> bytes:
        """Returns a record's bytes, unchecked."""
        try:
            return self._read_record(
                self._tracking.known_runs(_checked(model), TAG_KIND, _RECORDS), model, name
            )
        except NotPublishedError:
            runs = self._tracking.find_runs(model, TAG_KIND, _RECORDS)
            return self._read_record(runs, model, name)

    def _read_record(self, runs: Sequence[Run], model: str, name: RecordName) -> bytes:
        cut: bytes | None = None
        for run in runs:
            with suppress(NotPublishedError):
                data = read_whole(run.artifacts, _record_path(name), MAX_RECORD_BYTES + 1)
                if digest_bytes(data) == name.digest:
                    return data
                cut = data
        if cut is None:
            raise NotPublishedError(
                f"no such record: {name} of {model} in {self._url}\n  expected to find it"
            )
        return cut

    def write_record(self, model: str, name: RecordName, data: bytes) -> None:
        """Writes a record; it is listed once it is there whole."""
        # Asked for each time: what is written to a run that somebody deleted is never listed.
        self._tracking.forget_runs(_checked(model), TAG_KIND, _RECORDS)
        run = self._tracking.make_run(model, "records", TAG_KIND, _RECORDS, {"ortprep.model": model})
        # Whatever is wrong with what is there, or with asking for it: writing it will tell.
        with suppress(NotPublishedError, RegistryUnavailableError):
            with run.artifacts.open(_record_path(name), 0, MAX_RECORD_BYTES + 1) as blocks:
                there = b"".join(blocks)
            if there == data:
                return
        run.artifacts.put(_record_path(name), upload_bytes(_record_path(name), data))
        if not run.is_finished:
            self._tracking.finish_run(run, {})

    def delete_record(self, model: str, name: RecordName) -> None:
        """Removes a record.

        Raises:
            RegistryError: The server's artifact store cannot delete; or it failed.
        """
        for run in self._tracking.find_runs(_checked(model), TAG_KIND, _RECORDS):
            run.artifacts.delete(_record_path(name))

    def find_missing(self, model: str, part: PartRecord) -> tuple[FileEntry, ...]:
        """Returns those of a part's files that have to be uploaded, each digest once."""
        runs = self._tracking.find_runs(_checked(model), TAG_PART, record_digest(part))
        sizes: dict[str, int] = {}
        folders = {posixpath.dirname(_bundle_path(entry.path)) for entry in part.files} if runs else set()
        for folder in folders:
            listed = runs[0].artifacts.list_folder(folder)
            sizes |= {f"{folder}/{file.name}": file.size_bytes for file in listed if not file.is_folder}
        missing = {
            entry.sha256: entry
            for entry in part.files
            if sizes.get(_bundle_path(entry.path)) != entry.size_bytes
        }
        return tuple(missing.values())

    def upload_file(
        self, model: str, part: PartRecord, entry: FileEntry, source: Path, report: Report
    ) -> None:
        """Uploads a file; what is kept is exactly the bytes that `entry` describes."""
        paths = sorted({other.path for other in part.files if other.sha256 == entry.sha256} | {entry.path})
        _check_paths(paths)
        digest = record_digest(part)
        run = self._tracking.make_run(
            _checked(model), run_name(part, digest), TAG_PART, digest, {TAG_KIND: "part", **part_tags(part)}
        )
        for path in paths:
            upload = Upload(entry, source, report if path == paths[0] else _ignore)
            run.artifacts.put(_bundle_path(path), upload)

    def finish_part(self, model: str, part: PartRecord) -> None:
        """Shows the bundle's figures as metrics, and marks the run as finished."""
        runs = self._tracking.find_runs(_checked(model), TAG_PART, record_digest(part))
        if not runs:
            raise NotPublishedError(f"no run for a part of {model} in {self._url}\n  expected its files")
        if runs[0].is_finished:
            return
        manifest = None
        if any(entry.path == MANIFEST_FILE for entry in part.files):
            manifest = read_whole(runs[0].artifacts, _bundle_path(MANIFEST_FILE), MAX_MANIFEST_BYTES)
        self._tracking.finish_run(runs[0], build_batch(part, manifest))

    @contextmanager
    def open_file(
        self, model: str, part: PartRecord, entry: FileEntry, offset: int
    ) -> Iterator[Iterator[Block]]:
        """Yields the blocks of a file from `offset` on, unchecked."""
        if offset >= entry.size_bytes:
            yield iter(())
            return
        digest = record_digest(part)
        with ExitStack() as stack:
            try:
                blocks = self._open(
                    stack, self._tracking.known_runs(_checked(model), TAG_PART, digest), entry, offset
                )
            except NotPublishedError:
                runs = self._tracking.find_runs(model, TAG_PART, digest)
                blocks = self._open(stack, runs, entry, offset)
            yield blocks

    def _open(self, stack: ExitStack, runs: Sequence[Run], entry: FileEntry, offset: int) -> Iterator[Block]:
        path = _bundle_path(entry.path)
        for run in runs:

            def enter(run: Run = run) -> Iterator[Block]:
                return stack.enter_context(run.artifacts.open(path, offset, entry.size_bytes))

            with suppress(NotPublishedError):
                return with_retries(enter)
        raise NotPublishedError(f"no such file: {entry.path} in {self._url}\n  expected to find it, got none")

    def list_files(self, model: str) -> tuple[StoredFile, ...]:  # noqa: ARG002 - as every backend's
        """Returns nothing: files go with their part's run."""
        return ()

    def delete_files(self, model: str, digests: Sequence[str]) -> None:
        """Does nothing: files go with their part's run."""

    def delete_part(self, model: str, digest: str) -> None:
        """Deletes a part's run; its files go when the server's owner runs `mlflow gc`."""
        self._tracking.delete_runs(_checked(model), TAG_PART, digest)

    def delete_version(self, model: str, version: Version) -> None:
        """Does nothing: `mirror` removes registered versions whose records are gone."""

    def mirror(self, model: str, state: State) -> None:
        """Shows versions, labels and aliases in MLflow's model registry."""

        def is_recorded(version: str) -> bool:
            return RecordName("version", version) in self.list_records(model)

        View(self._tracking, state, is_recorded=is_recorded).update()

    def close(self) -> None:
        """Does nothing: MLflow's client keeps its connections for the whole process."""


def _tracking_uri(url: str) -> str | None:
    if url in (f"{_SCHEME}:", f"{_SCHEME}://"):
        return None
    scheme, _, tracking_uri = url.partition("+")
    parts = urlsplit(tracking_uri)
    if "@" in parts.netloc:
        raise AccessDeniedError(
            "credentials in the URL of an MLflow server\n  expected mlflow+https://HOST",
            hint="set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN",
        )
    is_web = parts.scheme in ("http", "https")
    if (
        scheme != _SCHEME
        or not tracking_uri
        or (is_web and (parts.query or parts.fragment or not parts.netloc))
    ):
        raise RegistryError("bad URL of an MLflow server\n  expected mlflow+http://HOST:PORT, or mlflow://")
    return tracking_uri.rstrip("/") if is_web else tracking_uri


def _checked(model: str) -> str:
    if not is_safe_name(model):
        raise RegistryError(f"no name of a model: {model[:80]!r}\n  expected letters, digits, '.', '_', '-'")
    return model


def _check_paths(paths: Sequence[str]) -> None:
    for path in paths:
        # Its server decodes names twice, so one with a percent sign could become another's.
        if "%" in path or "#" in path:
            raise RegistryError(
                f"MLflow keeps no file of that name: {path}\n  expected one without '%' and '#'"
            )


def _record_path(name: RecordName) -> str:
    return f"{_RECORDS}/{name}.json"


def _bundle_path(path: str) -> str:
    return f"{BUNDLE}/{path}"


def _ignore(count: int) -> None:
    pass
