"""Specs written in Python: the sections of `configs/NAME.yaml` as arguments."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, Literal, TypedDict, Unpack
from urllib.parse import unquote, urlsplit

from pydantic import BaseModel

from ortprep.bundle.atomic import write_bytes_atomic
from ortprep.spec.hub_url import is_hub_url, parse_hub_url
from ortprep.spec.models import ModelSpec
from ortprep.spec.session_options import warn_if_newer
from ortprep.spec.validation import parse_spec
from ortprep.versions import installed_onnxruntime

Section = Mapping[str, Any] | BaseModel
"""One section of a spec: a mapping, or its model of `ortprep.spec.models`."""

_MAX_NAME = 128


class SpecSections(TypedDict, total=False):
    """The sections of a spec besides `name` and `source`; docs/spec.md describes them."""

    inputs: Mapping[str, Section]
    samples: str
    targets: Sequence[Literal["cpu", "cuda"]] | Literal["auto"]
    convert: Section
    optimize: Section
    runtime: Section
    verify: Section
    tune: Section
    measure: Section
    publish: Section


class Spec(ModelSpec):
    """A model and everything that is to be done with it, as `configs/NAME.yaml` says it.

    Relative paths start from the working folder. Arrays and numbers of numpy, and paths, are taken as well.

    Args:
        source: Path or URL of the model; or a mapping with `path`, `url` or `demo`, and `sha256`.
        name: Name of the bundle; that of the source's file if it is not given.
        sections: The other sections.

    Raises:
        SpecError: Something is wrong; the message lists every problem.
    """

    def __init__(
        self,
        source: str | os.PathLike[str] | Section,
        *,
        name: str | None = None,
        **sections: Unpack[SpecSections],
    ) -> None:
        place = as_json(source) if isinstance(source, Mapping | BaseModel) else _source_of(os.fspath(source))
        data = {"name": _name_of(place) if name is None else name, "source": place, **sections}
        super().__init__(**_check(as_json(data)).model_dump(exclude_unset=True))
        self._folder = Path.cwd()


def override(spec: ModelSpec, sections: Mapping[str, object]) -> ModelSpec:
    """Returns a spec with some keys merged over its own, mapping by mapping.

    Raises:
        SpecError: The result is wrong; the message lists every problem.
    """
    if not sections:
        return spec
    data = merge(spec.model_dump(mode="json", exclude_unset=True), as_json(sections))
    return _check(data).located_in(spec.folder)


def _check(data: Mapping[str, Any]) -> ModelSpec:
    onnxruntime = installed_onnxruntime()
    spec = parse_spec(data, onnxruntime=onnxruntime)
    warn_if_newer(data.get("runtime"), version=onnxruntime)
    return spec


def merge(beneath: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `own` over `beneath`, mapping by mapping; lists are not merged."""
    merged = {**beneath, **own}
    for key, value in own.items():
        under = beneath.get(key)
        if isinstance(value, Mapping) and isinstance(under, Mapping):
            merged[key] = merge(under, value)
    return merged


def write_spec(spec: ModelSpec, path: Path) -> None:
    """Writes what a spec says as YAML; `source.path` and `samples` are written relative to the new file.

    Raises:
        OSError: The disk is full or read-only.
    """
    import yaml

    data = spec.model_dump(mode="json", exclude_unset=True)
    moved = Path(os.path.relpath(spec.folder, path.absolute().parent))
    if spec.source.path is not None:
        data["source"]["path"] = os.path.normpath(moved / Path(spec.source.path).expanduser())
    if spec.samples is not None:
        data["samples"] = os.path.normpath(moved / spec.samples)
    text = yaml.safe_dump(data, sort_keys=False, allow_unicode=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes_atomic(path, text.encode())


def _source_of(text: str) -> dict[str, str]:
    return {"url": text} if "://" in text else {"path": text}


def _name_of(source: Mapping[str, Any]) -> str:
    """Returns a name for a bundle; of a file on the Hub, where most are `model.onnx`, the repository's."""
    url = source.get("url")
    if not isinstance(url, str):
        return _safe(PurePosixPath(str(source.get("path") or source.get("demo") or "")).stem)
    if is_hub_url(url):
        try:
            address = parse_hub_url(url)
        except ValueError:
            return _safe("")  # the check of the URL says what is wrong
        stem = PurePosixPath(address.path).stem
        repository = address.repository.rpartition("/")[2]
        return _safe(repository if stem == "model" else f"{repository}-{stem}")
    return _safe(PurePosixPath(unquote(urlsplit(url).path)).stem)


def _safe(name: str) -> str:
    plain = re.sub(r"[^A-Za-z0-9._-]+|\.{2,}", "-", name).lstrip("._-")
    return plain[:_MAX_NAME] or "model"


def as_json(value: Any) -> Any:
    """Returns what Python code writes, models of sections and numbers of numpy included, as JSON types."""
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json", exclude_unset=True)
    if isinstance(value, Mapping):
        return {key: as_json(item) for key, item in value.items()}
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, list | tuple | range):
        return [as_json(item) for item in value]
    # Numbers and arrays of numpy, which need not be imported for it.
    return value.tolist() if hasattr(value, "tolist") else value
