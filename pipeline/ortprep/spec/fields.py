"""Base class and field types of the sections of a spec."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from ortprep.bundle.paths import NAME_PATTERN, is_safe_name
from ortprep.spec.urls import parse_hub_url

Target = Literal["cpu", "cuda"]
"""Execution providers a bundle can be prepared for."""

_DIGEST = re.compile(r"(sha256:)?[0-9a-fA-F]{64}")


def check_each_once(items: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns items that all differ.

    Raises:
        ValueError: Two are equal.
    """
    if len(set(items)) != len(items):
        raise ValueError(f"expected each once, got {', '.join(map(str, items))}")
    return items


def _check_name(name: str) -> str:
    if not is_safe_name(name):
        raise ValueError(
            "expected up to 128 letters, digits, '.', '_' and '-', a letter or digit first and no '..'"
        )
    return name


def _check_digest(digest: str) -> str:
    if not _DIGEST.fullmatch(digest):
        raise ValueError("expected 64 hexadecimal digits, as sha256sum prints them")
    return f"sha256:{digest.removeprefix('sha256:').lower()}"


def _check_url(url: str) -> str:
    """Returns a URL that a spec may name; raises `ValueError` for another."""
    parse_hub_url(url)
    return url


def _check_glob(pattern: str) -> str:
    """Returns a glob that a spec may have for its samples; raises `ValueError` for another."""
    folder, _, name = pattern.rpartition("/")
    if pattern.startswith("/") or not set(folder).isdisjoint("*?["):
        raise ValueError("expected files of one folder, relative to the spec: samples/*.npz")
    if "**" in name or not name.endswith(".npz"):
        raise ValueError("expected a glob that ends in .npz, without **")
    return pattern


MAX_DIMENSION = 2**31
"""Largest size of one axis of an input."""

Argument = Annotated[str, Field(pattern=r"^[^\x00]*$")]
"""Text without NUL."""
Text = Annotated[Argument, Field(min_length=1)]
Name = Annotated[str, AfterValidator(_check_name), Field(json_schema_extra={"pattern": f"^{NAME_PATTERN}$"})]
Sha256 = Annotated[str, AfterValidator(_check_digest)]
Url = Annotated[str, AfterValidator(_check_url)]
Glob = Annotated[Text, AfterValidator(_check_glob)]
Identifier = Annotated[str, Field(pattern=r"^[A-Za-z0-9_]+$")]
Dimension = Annotated[int, Field(ge=0, le=MAX_DIMENSION)]
Shape = Annotated[tuple[Dimension, ...], Field(max_length=64)]
Number = Annotated[float, Field(allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Seconds = Annotated[float, Field(gt=0, le=30 * 86_400, allow_inf_nan=False)]
ScalarOption = str | int | Number | bool
"""Value of a session or provider option, or of a tensor's element, as YAML gives it."""


class SpecSection(BaseModel):
    """A part of a spec: unknown keys are an error, and it never changes."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, hide_input_in_errors=True, use_attribute_docstrings=True
    )
