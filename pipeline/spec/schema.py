"""JSON Schema of a spec: `ortprep schema` prints it, and error messages take their words from it."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

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
def _root() -> Schema:
    return spec_schema()


def schemas_at(place: Place) -> tuple[Schema, ...]:
    """Returns every alternative the schema has for a value at `place`; none for an unknown key."""
    found = tuple(_alternatives(_root()))
    for step in place:
        found = tuple(inner for schema in found for inner in _step(schema, step))
    return found


def _alternatives(schema: Schema) -> Iterator[Schema]:
    if "$ref" in schema:
        yield from _alternatives(_root()["$defs"][schema["$ref"].rpartition("/")[2]])
    elif "anyOf" in schema:
        for alternative in schema["anyOf"]:
            yield from _alternatives(alternative)
    else:
        yield schema


def _step(schema: Schema, step: str | int) -> Iterator[Schema]:
    inner: Any = None
    if isinstance(step, str):
        inner = schema.get("properties", {}).get(step, schema.get("additionalProperties"))
    elif "prefixItems" in schema:
        inner = schema["prefixItems"][step] if step < len(schema["prefixItems"]) else None
    else:
        inner = schema.get("items")
    if isinstance(inner, Mapping):
        yield from _alternatives(inner)


def known_keys(place: Place) -> tuple[str, ...]:
    """Returns the keys that a mapping at `place` may have; none where it takes any."""
    return tuple(key for schema in schemas_at(place) for key in schema.get("properties", {}))


def describe(place: Place) -> str:
    """Returns in words what is expected at `place`: `an integer ≥ 1`, `'cpu' or 'cuda'`."""
    return _describe_all(schemas_at(place))


def _describe_all(schemas: tuple[Schema, ...], *, plural: bool = False) -> str:
    kinds = {schema.get("type") for schema in schemas}
    ignored = {"null", "integer"} if "number" in kinds else {"null"}
    words = [_describe(schema, plural=plural) for schema in schemas if schema.get("type") not in ignored]
    *first, last = dict.fromkeys(words) or ["nothing"]
    return f"{', '.join(first)} or {last}" if first else last


_NOUNS = {
    "string": ("text", "texts"),
    "integer": ("an integer", "integers"),
    "number": ("a number", "numbers"),
    "boolean": ("true or false", "true or false"),
    "object": ("a mapping", "mappings"),
}


def _describe(schema: Schema, *, plural: bool) -> str:
    if "const" in schema or "enum" in schema:
        values = schema.get("enum", [schema.get("const")])
        return " or ".join(repr(value) for value in values)
    if schema.get("type") == "array":
        return _describe_list(schema, plural=plural)
    noun = _NOUNS.get(schema.get("type", ""), ("a value", "values"))[plural]
    return f"{noun}{_describe_limits(schema)}"


def _describe_list(schema: Schema, *, plural: bool) -> str:
    noun = "lists" if plural else "a list"
    if "prefixItems" in schema:
        items = _describe_all(tuple(_alternatives(schema["prefixItems"][0])), plural=True)
        return f"{noun} of {len(schema['prefixItems'])} {items}"
    return f"{noun} of {_describe_all(tuple(_alternatives(schema['items'])), plural=True)}"


def _describe_limits(schema: Schema) -> str:
    low, high = schema.get("minimum"), schema.get("maximum")
    if low is not None and high is not None:
        return f" from {low:g} to {high}"
    signs = {"exclusiveMinimum": ">", "minimum": "≥", "exclusiveMaximum": "<", "maximum": "≤"}
    limits = [f"{sign} {schema[key]}" for key, sign in signs.items() if key in schema]
    return f" {' and '.join(limits)}" if limits else ""
