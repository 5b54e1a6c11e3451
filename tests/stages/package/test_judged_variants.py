"""A finished bundle has every precision that the application judged, and no other."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from ortprep.bundle.conversion_record import ApplicationVerdict, ConversionRecord
from ortprep.bundle.loader_config import (
    FileEntry,
    Golden,
    LoaderConfig,
    Requirements,
    Tolerance,
    Variant,
    VersionRange,
    read_loader_config,
    write_loader_config,
)
from ortprep.bundle.manifest import VariantRecord
from ortprep.bundle.session_record import ProviderRecord, SessionOptionsRecord
from ortprep.errors import StageError
from ortprep.runtime.loading.session import CPU
from ortprep.spec.validation import parse_spec
from ortprep.stages.core.contract import Context, VariantPlan
from ortprep.stages.package import stage as package
from ortprep.stages.package.prepared_variants import PreparedVariant

NOTHING = cast("Any", None)
PRECISIONS = {"cpu-int8": "int8", "cpu-fp16": "fp16", "cpu-int4": "int4", "cpu": "fp32"}


class FirstVariantJudge:
    """An application whose session is of the bundle's first variant, as a drop-in session is."""

    def __init__(self, *_arguments: object) -> None:
        pass

    def judge(self, bundle: Path, variant: str, **_options: object) -> ApplicationVerdict:
        if read_loader_config(bundle).variants[0].name != variant:
            raise StageError("the application did not use the converted model")
        agreement = 0.5 if variant == "cpu-int4" else 1.0
        return ApplicationVerdict("app.py", "stdout", agreement, 1.0, lines=4, equal=round(4 * agreement))


def prepared(name: str) -> PreparedVariant:
    conversion = ConversionRecord(PRECISIONS[name], PRECISIONS[name])
    record = replace(VariantRecord(name, "cpu", "all", (), NOTHING, (), None), conversion=conversion)
    return PreparedVariant(VariantPlan(name, "cpu", PRECISIONS[name]), NOTHING, NOTHING, record)


def variant(name: str) -> Variant:
    file = FileEntry(f"{name}/m.onnx", 0, "sha256:" + "0" * 64)
    needs = Requirements(VersionRange("1.23"), (CPU,))
    options, providers = SessionOptionsRecord("ORT_DISABLE_ALL"), (ProviderRecord(CPU),)
    return Variant(name, "cpu", file.path, (file,), options, providers, needs)


def test_each_precision_is_judged_by_itself(tmp_path, monkeypatch):
    monkeypatch.setattr(package, "ApplicationJudge", FirstVariantJudge)
    convert = {"precision": ["int8", "fp16", "int4"], "judge": {"run": ["app.py"]}}
    spec = parse_spec({"name": "net", "source": {"path": "net.onnx"}, "convert": convert})
    golden = Golden(FileEntry("golden.npz", 0, "sha256:" + "0" * 64), Tolerance(0, 0))
    config = LoaderConfig("1.0", "net", (), (), golden, tuple(map(variant, PRECISIONS)))
    for name in PRECISIONS:
        (tmp_path / "net" / name).mkdir(parents=True)
    write_loader_config(tmp_path / "net", config)
    context = SimpleNamespace(spec=spec, folder=tmp_path / "net", say=lambda _line: None)

    config, kept, left_out = package.judge_variants(
        cast("Context", context), config, list(map(prepared, PRECISIONS))
    )

    assert [one.plan.name for one in kept] == ["cpu-int8", "cpu-fp16", "cpu"]
    assert [(one.variant, "2 of 4 lines" in one.reason) for one in left_out] == [("cpu-int4", True)]
    assert [one.name for one in config.variants] == ["cpu-int8", "cpu-fp16", "cpu"]
    assert [one.name for one in read_loader_config(tmp_path / "net").variants] == [
        "cpu-int8",
        "cpu-fp16",
        "cpu",
    ]
