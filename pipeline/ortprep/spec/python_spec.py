"""Specs written in Python: the sections of `configs/NAME.yaml` as arguments."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote, urlsplit

from pydantic import BaseModel

from ortprep.bundle.atomic import write_bytes_atomic
from ortprep.bundle.paths import make_name
from ortprep.errors import SpecError
from ortprep.spec.models import ModelSpec
from ortprep.spec.session_options import warn_if_newer
from ortprep.spec.urls import is_hub_url, parse_hub_url
from ortprep.spec.validation import parse_spec
from ortprep.versions import installed_onnxruntime

Section = Mapping[str, Any] | BaseModel
"""One section of a spec: a mapping, or its model of `ortprep.spec.models`."""


_HINT = (
    'Spec("net.onnx", inputs={"image": {"shapes": [[1, 3, 224, 224]]}}, tune={"budget_s": 60})'
    "   # ortprep schema: every key and what it takes"
)


class Spec(ModelSpec):
    """A model and how to prepare it, with the content of a `configs/NAME.yaml`.

    Relative paths start from the working folder. Numpy's arrays and numbers, and paths, are accepted.

    Args:
        source: Path or URL of the model; or a mapping with `path`, `url` or `demo`, and `sha256`.
        name: Name of the bundle; by default that of the source's file.
        sections: The other sections, as docs/spec.md describes them: `inputs`, `tune`, `convert`, ….

    Raises:
        SpecError: Something is wrong; the message lists every problem.
    """

    def __init__(
        self,
        source: str | os.PathLike[str] | Section,
        *,
        name: str | None = None,
        **sections: Any,
    ) -> None:
        place = as_json(source) if isinstance(source, Mapping | BaseModel) else _source_of(source)
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
    spec = parse_spec(data, onnxruntime=onnxruntime, hint=_HINT)
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


def _source_of(source: object) -> dict[str, str]:
    text = os.fspath(source) if isinstance(source, str | os.PathLike) else None
    if not isinstance(text, str):
        raise SpecError(
            f"bad source of a Spec\n  expected a path, a URL or a mapping, got {source!r}", hint=_HINT
        )
    return {"url": text} if "://" in text else {"path": text}


def _name_of(source: Mapping[str, Any]) -> str:
    """Returns a name for a bundle; of a file on the Hub, where most are `model.onnx`, the repository's."""
    url = source.get("url")
    if not isinstance(url, str):
        return make_name(PurePosixPath(str(source.get("path") or source.get("demo") or "")).stem)
    if is_hub_url(url):
        try:
            address = parse_hub_url(url)
        except ValueError:
            return make_name("")  # the check of the URL says what is wrong
        stem = PurePosixPath(address.path).stem
        repository = address.repository.rpartition("/")[2]
        return make_name(repository if stem == "model" else f"{repository}-{stem}")
    return make_name(PurePosixPath(unquote(urlsplit(url).path)).stem)


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
