"""The plain list of an export: what it is, what it needs, and what of the bundle is not in it."""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.export.exported import ExportedModel

LISTING_FILE = "ortprep-export.txt"


def describe_model(model: ExportedModel) -> tuple[str, ...]:
    """Returns the lines that say what became of one variant."""
    return tuple(_lines(model))


def format_listing(models: tuple[ExportedModel, ...]) -> str:
    """Returns the text of `ortprep-export.txt`."""
    return "\n".join(line for model in models for line in describe_model(model)) + "\n"


def _lines(model: ExportedModel) -> Iterator[str]:
    size_mb = sum(entry.size_bytes for entry in model.files) / 2**20
    prepared = f", prepared with ONNX Runtime {model.prepared_with}" if model.prepared_with else ""
    yield f"{model.name}: variant {model.variant} of {model.bundle}, {size_mb:.1f} MB{prepared}"
    yield f"  {model.trial}"
    yield "  needs, and its server does not check:"
    yield from (f"    {need}" for need in model.needs)
    if model.carried:
        yield "  carried over:"
        yield from (f"    {one.option} -> {one.where}" for one in model.carried)
    yield "  left out:" if model.left_out else "  left out: nothing"
    yield from (f"    {one}" for one in model.left_out)
