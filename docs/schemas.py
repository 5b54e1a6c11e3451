"""Writes the JSON Schemas of this folder from the types they describe: `python -m docs.schemas`."""

from __future__ import annotations

import json
from copy import copy
from dataclasses import MISSING, field, make_dataclass
from functools import partial
from pathlib import Path
from typing import Any, get_type_hints

from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue

from ortprep.bundle.loader_config import LoaderConfig
from ortprep.bundle.manifest import Manifest
from ortprep.spec.models import spec_schema

FOLDER = Path(__file__).parent
DIALECT = "https://json-schema.org/draft/2020-12/schema"


class _TuplesAsObjects(GenerateJsonSchema):
    """A named tuple of the bundle is written as an object, like a dataclass."""

    def named_tuple_schema(self, schema: Any) -> JsonSchemaValue:
        kind, rows = schema["cls"], []
        for name, hint in get_type_hints(kind).items():
            default = kind._field_defaults.get(name, MISSING)
            given = field() if default is MISSING else field(default_factory=partial(copy, default))
            rows.append((name, hint, given))
        described = make_dataclass(kind.__name__, rows, namespace={"__doc__": kind.__doc__})
        return self.generate_inner(TypeAdapter(described).core_schema)


def build_schemas() -> dict[str, dict[str, Any]]:
    """Returns every schema by file name."""
    return {
        "spec.schema.json": spec_schema(),
        "loader.schema.json": _bundle_schema(LoaderConfig),
        "manifest.schema.json": _bundle_schema(Manifest),
    }


def _bundle_schema(kind: type) -> dict[str, Any]:
    schema = TypeAdapter(kind).json_schema(schema_generator=_TuplesAsObjects)
    schema["properties"]["self_digest"] = {"type": "string", "pattern": "^sha256:[0-9a-f]{64}$"}
    schema["required"].append("self_digest")
    return {"$schema": DIALECT, **schema}


def format_schema(schema: dict[str, Any]) -> str:
    """Returns a schema's text as the file has it."""
    return json.dumps(schema, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    for name, schema in build_schemas().items():
        (FOLDER / name).write_text(format_schema(schema), encoding="utf-8")
