"""JSON Schema of a spec: `ortprep schema` prints it, and editors check specs with it."""

from __future__ import annotations

from typing import Any

from pydantic.json_schema import GenerateJsonSchema

from ortprep.spec.models import ModelSpec

DIALECT = "https://json-schema.org/draft/2020-12/schema"


class _Untitled(GenerateJsonSchema):
    """Leaves out the titles that pydantic derives from fields' names; editors show the names."""

    def field_title_should_be_set(self, schema: Any) -> bool:  # noqa: ARG002
        return False


def spec_schema() -> dict[str, Any]:
    """Returns the JSON Schema (draft 2020-12) of `configs/NAME.yaml`, defaults merged in."""
    body = ModelSpec.model_json_schema(schema_generator=_Untitled)
    return {"$schema": DIALECT, **body, "title": "ortprep model spec"}
