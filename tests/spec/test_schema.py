"""Laws of the JSON Schema, and of the specs that are shipped."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import onnx.backend.test
import pytest
import yaml

from ortprep.spec.models import spec_schema
from ortprep.spec.reading import read_spec
from tests.spec.test_models import FULL

CONFIGS = Path(__file__).parents[2] / "configs"
SHIPPED = ("densenet121", "resnet50", "squeezenet")
"""By name: a checkout's folder also has the specs that its user wrote."""

LIGHT = Path(onnx.backend.test.__file__).parent / "data" / "light"


def schemas(schema: Any) -> Iterator[Any]:
    """Yields every property's schema with its name."""
    for value in schema.get("$defs", {}).values():
        yield from schemas(value)
    yield from schema.get("properties", {}).items()


def test_every_key_is_described_for_the_editor():
    for name, schema in schemas(spec_schema()):
        assert schema.get("description") or "$ref" in schema, name


@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_spec_validates_against_the_schema(name):
    text = (CONFIGS / f"{name}.yaml").read_text()
    assert text.startswith("# yaml-language-server: $schema=../docs/spec.schema.json\n")
    jsonschema.Draft202012Validator(spec_schema()).validate(yaml.safe_load(text))


def test_what_the_schema_takes_and_refuses_is_what_the_reader_does():
    validator = jsonschema.Draft202012Validator(spec_schema())
    assert validator.is_valid(FULL)
    wrong: list[dict[str, Any]] = [
        FULL | {"name": "a/b"},
        FULL | {"source": {"path": "a", "demo": "b"}},
        FULL | {"targets": ["tpu"]},
        FULL | {"verify": {"rtl": 1}},
        {"name": "x"},
    ]
    assert not any(validator.is_valid(data) for data in wrong)


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_specs_are_named_as_their_files_and_name_the_inputs_of_their_models(name):
    spec = read_spec(CONFIGS / f"{name}.yaml")
    assert spec.name == name
    graph = onnx.load(LIGHT / f"light_{spec.source.demo}.onnx").graph
    weights = {tensor.name for tensor in graph.initializer}
    shapes = {
        value.name: tuple(axis.dim_value for axis in value.type.tensor_type.shape.dim)
        for value in graph.input
        if value.name not in weights
    }
    assert {name: given.shapes[0] for name, given in spec.inputs.items()} == shapes
