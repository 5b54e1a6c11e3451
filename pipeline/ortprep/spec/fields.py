"""Base class and field types of the sections of a spec."""

from __future__ import annotations

import itertools
import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from ortprep.bundle.paths import NAME_PATTERN, is_safe_name
from ortprep.spec.urls import check_url, has_credentials, is_hub_url, parse_hub_url

Target = Literal["cpu", "cuda"]
"""Execution providers a bundle can be prepared for."""

_MAX_GLOB_PARTS = 32
_DIGEST = re.compile(r"(sha256:)?[0-9a-fA-F]{64}")
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^\s\x00-\x1f\x7f]+")


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
    if has_credentials(url):
        raise ValueError(
            "expected a URL without user and password, which would end up in the bundle; "
            "put them into ~/.netrc or the environment"
        )
    if not _URL.fullmatch(url):
        raise ValueError("expected scheme://… without spaces; for a file on this machine use path:")
    check_url(url)
    if is_hub_url(url):
        parse_hub_url(url)
    return url


def has_wildcard(part: str) -> bool:
    """Says whether a part of a glob is a pattern rather than a name."""
    return not set(part).isdisjoint("*?[")


def _check_glob(pattern: str) -> str:
    """Returns a glob that a spec may have for its samples; raises `ValueError` for another."""
    parts = pattern.split("/")
    if pattern.startswith("/") or any("**" in part and part != "**" for part in parts):
        raise ValueError("expected a glob of .npz files relative to the spec, ** only as a whole component")
    if parts.count("**") > 1:  # each more multiplies the folders that are walked
        raise ValueError("expected a glob with at most one **")
    behind = itertools.dropwhile(lambda part: not has_wildcard(part), parts)
    if len(parts) > _MAX_GLOB_PARTS or ".." in behind:  # each may lead to the same folders again
        raise ValueError(f"expected a glob of at most {_MAX_GLOB_PARTS} parts, without .. behind a wildcard")
    if not pattern.endswith(".npz"):
        raise ValueError("expected a glob that ends in .npz")
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
