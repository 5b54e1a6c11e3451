"""JSON Schema of a spec: `ortprep schema` prints it, and errors take the keys that they propose from it."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema

from ortprep.spec.models import ModelSpec
from ortprep.spec.problems import Place

DIALECT = "https://json-schema.org/draft/2020-12/schema"

Schema = Mapping[str, Any]


class _Untitled(GenerateJsonSchema):
    """Leaves out the titles that pydantic derives from fields' names; editors show the names."""

    def field_title_should_be_set(self, schema: Any) -> bool:  # noqa: ARG002
        return False


def spec_schema() -> dict[str, Any]:
    """Returns the JSON Schema (draft 2020-12) of `configs/NAME.yaml`, defaults merged in."""
    body = ModelSpec.model_json_schema(schema_generator=_Untitled)
    return {"$schema": DIALECT, **body, "title": "ortprep model spec"}


@functools.cache
def known_keys(place: Place, kind: type[BaseModel] = ModelSpec) -> tuple[str, ...]:
    """Returns the keys that a mapping at `place` of a `kind`'s data may have; none where it takes any."""
    root = kind.model_json_schema()
    schemas = list(_alternatives(root, root))
    for step in place:
        schemas = [inner for schema in schemas for inner in _step(schema, step, root)]
    return tuple(key for schema in schemas for key in schema.get("properties", {}))


def _alternatives(schema: Schema, root: Schema) -> Iterator[Schema]:
    if "$ref" in schema:
        schema = root["$defs"][schema["$ref"].rpartition("/")[2]]
    if "anyOf" in schema:
        for alternative in schema["anyOf"]:
            yield from _alternatives(alternative, root)
    else:
        yield schema


def _step(schema: Schema, step: str | int, root: Schema) -> Iterator[Schema]:
    inner: Any = schema.get("items")
    if isinstance(step, str):
        inner = schema.get("properties", {}).get(step, schema.get("additionalProperties"))
    elif "prefixItems" in schema:
        inner = dict(enumerate(schema["prefixItems"])).get(step)
    if isinstance(inner, Mapping):
        yield from _alternatives(inner, root)
