"""`fetch`: a local copy of the model and its external data, checked and described."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

from ortprep.bundle.codec import encode
from ortprep.bundle.digest import DigestCache
from ortprep.bundle.loader_config import FileEntry
from ortprep.bundle.manifest import SourceRecord
from ortprep.bundle.paths import MAX_NAME, is_model_path
from ortprep.bundle.verification import describe_files
from ortprep.children.child import run_child
from ortprep.errors import SourceError
from ortprep.quoting import quoted
from ortprep.runtime.machine.memory import available_bytes
from ortprep.spec.models import ModelSpec, SourceSpec
from ortprep.spec.urls import parse_hub_url
from ortprep.stages.core.contract import Context, Plan, TaskId
from ortprep.stages.core.provenance import ONNXRUNTIME, installed_versions
from ortprep.stages.core.results import FetchResult
from ortprep.stages.core.spec_fit import require_fit
from ortprep.stages.fetch.inspection import (
    MAX_INLINE_BYTES,
    TIMEOUT_S,
    check_model_size,
    digest_beside,
    inspect_file,
)
from ortprep.stages.fetch.sources import HubFile, LocalFile, Source, limit_fetch, pin
from ortprep.stages.fetch.zip_map import ZIP_MAP, drop_zip_maps
from ortprep.transport.time_limit import check_time

_LONGEST_NAME = "v" * MAX_NAME
"""A variant's folder in a bundle: paths below it have to be safe, too."""

_LFS_POINTER = b"version https://git-lfs"


class FetchStage:
    """Brings a model into the build and refuses what cannot be prepared, before any long work."""

    name = "fetch"
    version = 7

    def variants(self, plan: Plan) -> tuple[str | None, ...]:  # noqa: ARG002 - part of the stage contract
        """Runs once per model."""
        return (None,)

    def requires(self, plan: Plan, variant: str | None) -> tuple[TaskId, ...]:  # noqa: ARG002
        """Comes first."""
        return ()

    def key(self, plan: Plan, variant: str | None) -> Mapping[str, Any]:  # noqa: ARG002
        """Returns what decides the outcome: the source, and the tools that take it.

        Of a local source that is every byte, of a file on the Hub the commit that its revision names now. The
        stages that use the model report a changed spec that no longer fits it.

        Raises:
            SourceError: The spec names a local file that is not there or cannot be a model, or what the Hub
                does not have.
            MissingExtraError: The source is on the Hub, and its client is not installed.
        """
        spec = plan.spec
        return {
            "source": _source_key(spec),
            "sha256": spec.source.sha256,
            "data_sha256": spec.source.data_sha256,
            "drop_zip_map": spec.source.drop_zip_map,
            "tools": installed_versions("onnx", *ONNXRUNTIME),
        }

    def run(self, context: Context) -> Mapping[str, Any]:
        """Copies the model and its external data into the stage's folder and describes them.

        Raises:
            SourceError: The model cannot be fetched, is none, or changed since the key was computed.
            SpecError: The spec contradicts it.
        """
        spec = context.spec
        name = _shown(spec)
        context.say(f"fetching {name}")
        file = _file_name(spec.source)
        model = context.folder / file
        source = _model_source(spec, context.key)
        with limit_fetch(name):
            received = source.copy_to(model, MAX_INLINE_BYTES, context.progress)
        refuse_what_is_no_model(model, name)
        _check_unchanged(received, context.key, name)
        if spec.source.sha256 is not None:
            _check_digest(received, spec.source.sha256, name, field="source.sha256")
        inspection, changed = inspect_file(model, name=name), received
        if spec.source.drop_zip_map and ZIP_MAP in inspection.operators:
            run_child(drop_zip_maps, (model, model), timeout_s=TIMEOUT_S, memory_bytes=available_bytes())
            inspection, (changed,) = inspect_file(model, name=name), describe_files(context.folder)
        require_fit(spec, inspection.interface)
        entries = (changed, *_fetch_external(context, inspection.external, source, file))
        record = SourceRecord(
            kind="url" if spec.source.path is None else "path",
            location=spec.source.path or name,
            sha256=received.sha256,
            files=entries,
            opsets=inspection.opsets,
            ir_version=inspection.ir_version,
            operators=inspection.operators,
            initializer_bytes=inspection.initializer_bytes,
        )
        return dict(encode(FetchResult(file, record, inspection.interface)))


def _model_source(spec: ModelSpec, key: Mapping[str, Any]) -> Source:
    """Returns where the model comes from, on the Hub at the key's commit."""
    source = spec.source
    if source.url is None:
        return LocalFile(_local_path(spec))
    return HubFile(replace(parse_hub_url(source.url), revision=key["source"]["commit"]))


def _fetch_external(
    context: Context, external: Mapping[str, int], model: Source, file: str
) -> tuple[FileEntry, ...]:
    """Fetches the external data of a model from beside it.

    Args:
        context: The task; its folder takes the files.
        external: Bytes that each file has to have at least, by its relative path below the model's folder.
        model: Source of the model.
        file: The model's own name.

    Raises:
        SourceError: A file is missing, too short, much longer than the model needs, or the target of two
            links, has a name that no bundle may have, or a link leads out of the model's folder.
    """
    name, pinned = _shown(context.spec), context.spec.source
    entries: list[FileEntry] = []
    # Files may hold more than this model uses of them, all together as much as a model file may hold.
    spare_bytes = MAX_INLINE_BYTES
    origins: dict[str, str] = {}
    for path, needed_bytes in external.items():
        _check_external_name(path, (file, f"{context.spec.name}.onnx"), name)
        context.say(f"fetching {path}")
        origin = model.beside(path)
        other = origins.setdefault(origin.name, path)
        if other != path:
            raise SourceError(
                f"external data is one file under two names: {other!r} and {path!r} of {name}",
                hint="save the model again with its external data beside it",
            )
        place, max_bytes = context.folder / path, needed_bytes + spare_bytes
        place.parent.mkdir(parents=True, exist_ok=True)
        with limit_fetch(origin.name):
            received = origin.copy_to(place, max_bytes, context.progress)
        spare_bytes -= max(0, received.size_bytes - needed_bytes)
        if pinned.sha256 is not None:
            digest = pinned.data_sha256.get(path)
            _check_digest(received, digest, f"{path!r} of {name}", field="source.data_sha256")
        entries.append(received._replace(path=path))
        _check_unchanged(entries[-1], context.key, f"{path!r} of {name}", is_external=True)
        if received.size_bytes < needed_bytes:
            raise SourceError(
                f"external data too short: {path!r} of {name}\n"
                f"  expected at least {needed_bytes} bytes, got {received.size_bytes}",
                hint="copy or download the file again",
            )
    return tuple(entries)


def _check_external_name(path: str, models: tuple[str, ...], name: str) -> None:
    """Refuses a path of external data that a later stage writes a model to, or that no bundle may have."""
    hint = "save the model again with its external data in NAME.onnx.data"
    if path in models:
        raise SourceError(f"external data has the name of the model: {path!r} of {name}", hint=hint)
    if not is_model_path(f"{_LONGEST_NAME}/{path}"):
        raise SourceError(
            f"external data has a name that no bundle may have: {path!r} of {name}\n"
            "  expected one that is not hidden, and that no program reads or runs",
            hint=hint,
        )


def _source_key(spec: ModelSpec) -> Mapping[str, Any]:
    """Returns what says that a source is another one, as JSON types."""
    source = spec.source
    if source.url is not None:
        return {"url": source.url, "commit": pin(parse_hub_url(source.url)).revision}
    path, cache = _local_path(spec), DigestCache(between_blocks=check_time)
    check_model_size(path, str(path))
    with limit_fetch(str(path)):
        try:
            digest = cache.digest(path)
        except OSError as error:
            raise SourceError(f"cannot read {path}\n  {error.strerror}") from error
        return {"file": path.name, "digest": digest, "external": digest_beside(path, cache)}


def local_source(spec: ModelSpec) -> Path | None:
    """Returns where a spec's local source is, or would be; None for what is fetched from elsewhere.

    Raises:
        SourceError: The path begins with the home of a user that there is not.
    """
    if spec.source.path is None:
        return None
    try:
        return spec.folder / Path(spec.source.path).expanduser()
    except RuntimeError as error:
        raise _path_error(spec, f"not a file path: {spec.source.path}\n  {error}") from error


def _local_path(spec: ModelSpec) -> Path:
    """Returns the file of a local source; raises SourceError if there is none."""
    path = local_source(spec)
    assert path is not None
    try:
        if path.is_file():
            return path
        got = "something else" if path.exists() else "no such file"
    except OSError as error:
        # A name longer than any file's, or a loop of links.
        raise _path_error(spec, f"not a file path: {spec.source.path}\n  {error.strerror}") from error
    raise _path_error(spec, f"source model missing: {path}\n  expected a file, got {got}")


def _path_error(spec: ModelSpec, message: str) -> SourceError:
    folder = spec.folder.resolve()
    return SourceError(
        message,
        hint=f"set source.path in the spec of {quoted(spec.name)}; it is relative to {quoted(folder)}",
    )


def _shown(spec: ModelSpec) -> str:
    return spec.source.url or str(_local_path(spec))


def _file_name(source: SourceSpec) -> str:
    """Returns the model's name in the stage's folder, and in a bundle: its own, if a bundle may have it."""
    name = PurePosixPath(source.path or parse_hub_url(source.url or "").path).name
    is_plain = is_model_path(name) and (source.path is not None or name.endswith(".onnx"))
    return name if is_plain else "model.onnx"


def refuse_what_is_no_model(path: Path, name: str) -> None:
    """Raises `SourceError` for a file that is empty, or a pointer that a clone has in place of the model."""
    with path.open("rb") as file:
        start = file.read(64)
    if not start:
        raise SourceError(
            f"file is empty: {name}\n  expected an ONNX model, got 0 bytes", hint="download the file again"
        )
    if start.startswith(_LFS_POINTER):
        raise SourceError(f"not a model: {name}\n  expected ONNX, got a Git LFS pointer", hint="git lfs pull")


def _check_unchanged(
    received: FileEntry, key: Mapping[str, Any], name: str, *, is_external: bool = False
) -> None:
    """Raises `SourceError` if a local file is not the one of the key: it was replaced meanwhile.

    Without it, a bundle could have the graph of one export and the weights of the next.
    """
    source = key["source"]
    if "digest" not in source:
        return
    expected = source["external"].get(received.path) if is_external else source["digest"]
    if received.sha256 != expected:
        raise SourceError(f"file changed while it was read: {name}", hint="run the command again")


def _check_digest(received: FileEntry, digest: str | None, name: str, *, field: str) -> None:
    """Raises `SourceError` if a file is not the one whose digest a field of the spec has."""
    expected = digest or f"a digest in {field}"
    if received.sha256 != expected:
        raise SourceError(
            f"wrong digest: {name}\n"
            f"  expected {expected}, got {received.sha256}, {received.size_bytes} bytes",
            hint=f"write its digest into {quoted(field)} if it is the file that you want",
        )
