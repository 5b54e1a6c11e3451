"""Which variants a finished bundle has, and in which order jobs prefer them."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ortprep.bundle.conversion_record import ApplicationVerdict, ConversionRecord
from ortprep.bundle.figures import PlanFigures, Samples
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
from ortprep.bundle.manifest import Decision, MeasurementRecord, VariantRecord
from ortprep.bundle.session_record import ProviderRecord, SessionOptionsRecord
from ortprep.errors import StageError
from ortprep.measuring.shipped import PREPARED
from ortprep.runtime.loading.session import CPU
from ortprep.spec.validation import parse_spec
from ortprep.stages.core.contract import PORTABLE, Context, VariantPlan
from ortprep.stages.package import stage as package
from ortprep.stages.package.prepared_variants import PreparedVariant, find_slower, order_variants
from tests.tuning.builders import per_load

ONE_RUN = per_load(1)


def exactly(value):
    return Samples((value,) * 3)


def figures(plan, first_result_ms):
    cost = exactly(first_result_ms)
    return PlanFigures(plan, cost, cost, cost, exactly(1.0), cost, cost)


def variant(name, *, shipped=PREPARED, **costs):
    plans = tuple(figures(plan, cost) for plan, cost in costs.items())
    measurements = (MeasurementRecord("warm", 3, "x=[1]", plans),) if costs else ()
    decision = Decision(shipped, reason="") if costs else None
    target, _, precision = name.partition("-")
    plan = VariantPlan(name, target.replace(PORTABLE, "cpu"), precision or "fp32")
    nothing = cast("Any", None)
    record = VariantRecord(name, plan.target, "all", (), nothing, measurements, decision)
    return PreparedVariant(plan, nothing, nothing, record)


def order(*variants, targets=("cpu",)):
    return [one.plan.name for one in order_variants(variants, targets, ONE_RUN)]


def converted(name, ratio):
    return variant(name, prepared=100 * ratio, unconverted=100)


BASE, ANYWHERE = variant("cpu", prepared=100), variant(PORTABLE)


def test_a_precision_comes_before_fp32_only_if_it_is_cheaper_by_more_than_a_little():
    assert order(BASE, converted("cpu-int8", 0.5), ANYWHERE) == ["cpu-int8", "cpu", PORTABLE]
    assert order(BASE, converted("cpu-int8", 0.99), ANYWHERE)[0] == "cpu"


def test_of_several_the_cheapest_comes_first():
    made = order(BASE, converted("cpu-int8", 0.7), converted("cpu-int4", 0.6), ANYWHERE)
    assert made == ["cpu-int4", "cpu-int8", "cpu", PORTABLE]


def test_what_is_slower_and_less_accurate_comes_after_what_runs_anywhere():
    assert order(BASE, converted("cpu-fp16", 4.0), ANYWHERE) == ["cpu", PORTABLE, "cpu-fp16"]


def test_what_fp32_ships_is_what_a_precision_has_to_beat():
    base = variant("cpu", shipped=PORTABLE, prepared=100, portable=40)
    assert order(base, converted("cpu-int8", 0.5), ANYWHERE) == ["cpu", PORTABLE, "cpu-int8"]


def test_both_are_compared_in_the_same_rounds_where_fp32_ships_the_source():
    base = variant("cpu", shipped="default", default=100, prepared=120)  # another program ran for a moment
    int8 = variant("cpu-int8", default=100, unconverted=100, prepared=90)
    assert order(base, int8, ANYWHERE)[0] == "cpu-int8"


def test_a_slow_precision_of_a_gpu_still_comes_before_the_cpu():
    gpu, slow = variant("cuda", prepared=10), converted("cuda-fp16", 2.0)
    made = order(BASE, gpu, slow, ANYWHERE, targets=("cuda", "cpu"))
    assert made == ["cuda", "cuda-fp16", "cpu", PORTABLE]


@pytest.mark.parametrize(("ratio", "is_left_out"), [(0.9, False), (0.92, True), (1.2, True)])
def test_a_precision_that_is_not_clearly_faster_is_left_out_if_nobody_named_it(ratio, is_left_out):
    int8 = converted("cpu-int8", ratio)
    reasons = dict(find_slower((BASE, int8, ANYWHERE), ONE_RUN))
    said = f"not 1.1 times as fast as fp32 for 1 runs per load: fp32 100 ms, prepared {100 * ratio:g} ms"
    assert reasons == ({"cpu-int8": said} if is_left_out else {})


# -- A finished bundle has every precision that the application judged, and no other

NOTHING = cast("Any", None)
PRECISIONS = {"cpu-int8": "int8", "cpu-fp16": "fp16", "cpu-int4": "int4", "cpu": "fp32"}


class FirstVariantJudge:
    """An application whose session is of the bundle's first listed_variant, as a drop-in session is."""

    def __init__(self, *_arguments):
        pass

    def judge(self, bundle, listed_variant, **_options):
        if read_loader_config(bundle).variants[0].name != listed_variant:
            raise StageError("the application did not use the converted model")
        agreement = 0.5 if listed_variant == "cpu-int4" else 1.0
        return ApplicationVerdict("app.py", "stdout", agreement, 1.0, lines=4, equal=round(4 * agreement))


def prepared(name):
    conversion = ConversionRecord(PRECISIONS[name], PRECISIONS[name])
    record = replace(VariantRecord(name, "cpu", "all", (), NOTHING, (), None), conversion=conversion)
    return PreparedVariant(VariantPlan(name, "cpu", PRECISIONS[name]), NOTHING, NOTHING, record)


def listed_variant(name):
    file = FileEntry(f"{name}/m.onnx", 0, "sha256:" + "0" * 64)
    needs = Requirements(VersionRange("1.23"), (CPU,))
    options, providers = SessionOptionsRecord("ORT_DISABLE_ALL"), (ProviderRecord(CPU),)
    return Variant(name, "cpu", file.path, (file,), options, providers, needs)


def test_each_precision_is_judged_by_itself(tmp_path, monkeypatch):
    monkeypatch.setattr(package, "ApplicationJudge", FirstVariantJudge)
    convert = {"precision": ["int8", "fp16", "int4"], "judge": {"run": ["app.py"]}}
    spec = parse_spec({"name": "net", "source": {"path": "net.onnx"}, "convert": convert})
    golden = Golden(FileEntry("golden.npz", 0, "sha256:" + "0" * 64), Tolerance(0, 0))
    config = LoaderConfig("1.0", "net", (), (), golden, tuple(map(listed_variant, PRECISIONS)))
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
