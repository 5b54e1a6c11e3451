"""Documentation that can be checked is checked."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from docs.schemas import build_schemas, format_schema
from ortprep.bundle.codec import encode
from tests.bundle.builders import write_bundle

ROOT = Path(__file__).parent.parent
SCHEMAS = build_schemas()


def faults_of(content: Any, schema: str) -> list[str]:
    validator = jsonschema.Draft202012Validator(SCHEMAS[schema])
    return [error.message for error in validator.iter_errors(content)]


@pytest.mark.parametrize("name", sorted(SCHEMAS))
def test_the_schemas_in_docs_are_those_of_the_types(name: str) -> None:
    assert (ROOT / "docs" / name).read_text() == format_schema(SCHEMAS[name]), "run: python -m docs.schemas"


@pytest.mark.parametrize("name", sorted(SCHEMAS))
def test_the_schemas_are_schemas(name: str) -> None:
    meta = jsonschema.Draft202012Validator(jsonschema.Draft202012Validator.META_SCHEMA)
    assert list(meta.iter_errors(SCHEMAS[name])) == []


@pytest.mark.parametrize("name", ["loader", "manifest"])
def test_what_is_written_fits_its_schema(tmp_path: Path, name: str) -> None:
    bundle = write_bundle(tmp_path / "m")
    assert faults_of(json.loads((bundle / f"{name}.json").read_text()), f"{name}.schema.json") == []


SPECS = sorted(path for path in (ROOT / "configs").glob("*.yaml") if path.stem != "defaults")


@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.stem)
def test_the_shipped_specs_fit_their_schema(path: Path) -> None:
    assert faults_of(encode(yaml.safe_load(path.read_text())), "spec.schema.json") == []


def test_every_rule_of_the_format_is_in_the_name_of_a_test_and_no_test_names_another() -> None:
    rules = re.findall(r"^- \*\*F(\d+)\*\*", (ROOT / "docs/format.md").read_text(), re.MULTILINE)
    tests = [path.read_text() for path in (ROOT / "tests").rglob("test_*.py")]
    tested = {number for text in tests for number in re.findall(r"^def test_f(\d+)_", text, re.MULTILINE)}
    assert len(set(rules)) == len(rules)
    assert set(rules) == tested


def test_links_in_the_documentation_lead_somewhere() -> None:
    broken = [
        f"{page.relative_to(ROOT)}: {target}"
        for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("artifacts/*.md")]
        for target in _links(page.read_text())
        if not (page.parent / target).exists()
    ]
    assert broken == []


def _links(text: str) -> list[str]:
    parts = [part.partition(")")[0] for part in text.split("](")[1:]]
    return [part.partition("#")[0] for part in parts if part.partition("#")[0] and "://" not in part]
