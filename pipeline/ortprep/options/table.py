"""The options of every listed version, read from `options.tsv`: one line per option.

Names and first versions were read from the Linux x86-64 wheels of ONNX Runtime 1.23 to 1.32 and from its
public header; CUDA's from the provider's library in 1.23.2, 1.27.0, 1.30.0 and 1.31.1, and for 1.32 from the
core library, since no CUDA provider of that version was published yet. Limits: ONNX Runtime takes a million
threads without a word and negative counts too, so 1024 is the most here, far above any machine; of
`session.moe.offload.*` it refuses unknown entries and every bad value itself (tried on 1.32.0).

Columns: the table (`session`, `attribute` or `cuda`); name; first version; kind; default; values (the range
of a number, as in `4096..int32 by 4096`; choices with `|` between them; the regular expression of a text);
what a text looks like, in words; why a user must not set the option and what to do instead; its effect.

An option with an `owner` is one that `ortprep` decides, or that reaches beyond a session: by it, ONNX Runtime
writes files, reads others than the bundle's or calls addresses. Effects speak of source graphs: a prepared
graph loads with optimisation off, so most options about rewriting a graph do nothing there.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, get_args

from ortprep.options.option import Kind, Option

TableName = Literal["session", "attribute", "cuda"]
Table = Mapping[str, Option]

_NAMED_LIMITS = {"": None, "int32": 2**31 - 1, "int64": 2**63 - 1}
"""Largest integers that ONNX Runtime keeps in 32 and in 64 bits; no text is no limit."""


@functools.cache
def read_tables() -> Mapping[TableName, Table]:
    """Returns every option by table and name."""
    _, *lines = Path(__file__).with_name("options.tsv").read_text(encoding="utf-8").splitlines()
    tables: dict[TableName, dict[str, Option]] = {name: {} for name in get_args(TableName)}
    for line in lines:
        table, name, since, kind, default, values, form, owner, effect = line.split("\t")
        limits = _parse_values(kind, values)  # type: ignore[arg-type]
        option = Option(name, kind, default, effect, since, form=form, owner=owner or None, **limits)  # type: ignore[arg-type]
        tables[table][name] = option  # type: ignore[index]
    return MappingProxyType({name: MappingProxyType(table) for name, table in tables.items()})


def _parse_values(kind: Kind, text: str) -> dict[str, Any]:
    """Returns the fields of an option that its column of values stands for."""
    if kind == "choice":
        return {"values": tuple(text.split("|"))}
    if kind not in ("integer", "number"):
        return {"pattern": text or None}
    limits, _, multiple = text.partition(" by ")
    number = int if kind == "integer" else float
    low, high = (_NAMED_LIMITS[end] if end in _NAMED_LIMITS else number(end) for end in limits.split(".."))
    return {"minimum": low, "maximum": high, "multiple": int(multiple) if multiple else None}
