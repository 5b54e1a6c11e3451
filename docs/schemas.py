"""Writes the JSON Schemas of this folder from the types they describe: `python -m docs.schemas`."""

from __future__ import annotations

import json
from copy import copy
from dataclasses import MISSING, field, fields, is_dataclass, make_dataclass
from functools import cache, partial, reduce
from operator import or_
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from pydantic import TypeAdapter

from ortprep.bundle.loader_config import LoaderConfig
from ortprep.bundle.manifest import Manifest
from ortprep.spec.models import spec_schema

FOLDER = Path(__file__).parent
DIALECT = "https://json-schema.org/draft/2020-12/schema"


@cache
def _as_dataclass(kind: Any) -> Any:
    """Returns a type with dataclasses in place of named tuples, which bundles write as objects too."""
    if isinstance(kind, UnionType):
        return reduce(or_, map(_as_dataclass, get_args(kind)))
    if get_origin(kind) is not None:
        return get_origin(kind)[tuple(map(_as_dataclass, get_args(kind)))]
    if is_dataclass(kind):
        # Copies: `make_dataclass` writes the new types into the fields that it is given.
        defaults = {one.name: copy(one) for one in fields(kind)}
    elif hasattr(kind, "_fields"):
        given = kind._field_defaults
        defaults = {name: field(default=given.get(name, MISSING)) for name in kind._fields}
        mutable = {
            name: field(default_factory=partial(copy, one)) for name, one in given.items() if one == {}
        }
        defaults.update(mutable)
    else:
        return kind
    hints = get_type_hints(kind)
    rows = [(name, _as_dataclass(hints[name]), default) for name, default in defaults.items()]
    return make_dataclass(kind.__name__, rows, namespace={"__doc__": kind.__doc__})


def build_schemas() -> dict[str, dict[str, Any]]:
    """Returns every schema by file name."""
    return {
        "spec.schema.json": spec_schema(),
        "loader.schema.json": _bundle_schema(LoaderConfig),
        "manifest.schema.json": _bundle_schema(Manifest),
    }


def _bundle_schema(kind: type) -> dict[str, Any]:
    schema = TypeAdapter(_as_dataclass(kind)).json_schema()
    schema["properties"]["self_digest"] = {"type": "string", "pattern": "^sha256:[0-9a-f]{64}$"}
    schema["required"].append("self_digest")
    return {"$schema": DIALECT, **schema}


def format_schema(schema: dict[str, Any]) -> str:
    """Returns a schema's text as the file has it."""
    return json.dumps(schema, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    for name, schema in build_schemas().items():
        (FOLDER / name).write_text(format_schema(schema), encoding="utf-8")
