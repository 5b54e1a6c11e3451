"""Which variants are exported to a server of which more or less is known."""

from __future__ import annotations

import dataclasses

import pytest

from ortprep.bundle.digest import digest_bytes
from ortprep.bundle.loader_config import (
    FileEntry,
    Golden,
    LoaderConfig,
    Requirements,
    Tolerance,
    Variant,
    VersionRange,
)
from ortprep.errors import ExportError
from ortprep.export.variant_selection import (
    ExportRequest,
    choose_variants,
    contradictions,
    describe_needs,
)
from ortprep.runtime.machine.hardware import Gpu, Hardware
from tests.export.builders import CPU, CUDA, make_variant
from tests.registry.builders import on_gpu

OWN = VersionRange("1.31", "1.32")
AVX512 = Requirements(OWN, (CPU,), "x86_64", ("avx512f",), ("amx_tile",))
ANYWHERE = Requirements(VersionRange("1.23"), (CPU,))
HERE = Hardware("x86_64", "", ("avx2", "avx512f"), 4, 0, (Gpu("H", (9, 0), 0, "", "", ""),))
OLD = Hardware("x86_64", "", ("avx2",), 4, 0)


def variant(name: str, needs: Requirements, **changes: object) -> Variant:
    made = make_variant(cuda={} if CUDA in needs.providers else None)
    return dataclasses.replace(made, name=name, requirements=needs, **changes)  # type: ignore[arg-type]


def bundle(*variants: Variant) -> LoaderConfig:
    golden = Golden(FileEntry("golden.npz", 1, digest_bytes(b"g")), Tolerance(0, 0))
    return LoaderConfig("1.2", "net", (), (), golden, variants)


ALL = bundle(
    variant("cuda", on_gpu(9, 0)),
    variant("cpu-int8", AVX512, precision="int8"),
    variant("cpu", AVX512),
    variant("cpu-batch4", ANYWHERE, binding={"batch": 4}, bucket=True),
    variant("portable", ANYWHERE),
)


@pytest.mark.parametrize(
    ("requested", "expected"),
    [
        (ExportRequest(), "portable"),
        (ExportRequest(onnxruntime="1.31.1"), "portable"),
        (ExportRequest(onnxruntime="1.31.1", hardware=HERE), "cuda"),
        (ExportRequest(onnxruntime="1.31.1", hardware=OLD), "portable"),
        (ExportRequest(target="cpu", onnxruntime="1.31.1", hardware=HERE), "cpu-int8"),
        (ExportRequest(target="cpu", precision="fp32", onnxruntime="1.31.1", hardware=HERE), "cpu"),
        (ExportRequest(target="cpu", onnxruntime="1.30.0", hardware=HERE), "portable"),
        (ExportRequest(target="cpu", hardware=HERE), "portable"),
        (ExportRequest(target="cuda"), "cuda"),
    ],
)
def test_the_first_that_is_known_to_fit_is_taken(requested, expected):
    assert [one.name for one in choose_variants(ALL, requested)[0]] == [expected]


@pytest.mark.parametrize(
    "known",
    [
        ExportRequest(),
        ExportRequest(onnxruntime="1.31.1"),
        ExportRequest(onnxruntime="1.31.1", hardware=HERE),
        ExportRequest(onnxruntime="1.20", hardware=OLD),
    ],
)
def test_nothing_is_taken_against_what_is_known(known):
    try:
        variants, passed_over = choose_variants(ALL, known)
    except ExportError:
        assert known.onnxruntime == "1.20"
        return
    assert all(contradictions(one, known) == () for one in variants)
    assert all(one.reasons for one in passed_over)


def test_a_bucket_is_taken_by_its_name_only():
    assert choose_variants(ALL, ExportRequest(variants=("cpu-batch4",)))[0][0].bucket
    passed = choose_variants(ALL, ExportRequest())[1]
    assert "cpu-batch4" not in [one.name for one in passed]


def test_a_name_takes_what_nothing_is_known_against():
    taken = choose_variants(ALL, ExportRequest(variants=("cpu", "cuda", "cpu")))[0]
    assert [one.name for one in taken] == ["cpu", "cuda"]


def test_a_name_does_not_overrule_what_is_known():
    with pytest.raises(ExportError, match="avx512f"):
        choose_variants(ALL, ExportRequest(variants=("cpu",), onnxruntime="1.31.1", hardware=OLD))
    with pytest.raises(ExportError, match=r"1\.30\.0"):
        choose_variants(ALL, ExportRequest(variants=("cpu",), onnxruntime="1.30.0"))


def test_an_unknown_name_is_told_with_those_there_are():
    with pytest.raises(ExportError, match="expected one of cuda, cpu-int8, cpu, cpu-batch4, portable"):
        choose_variants(ALL, ExportRequest(variants=("gpu",)))


def test_a_wish_that_nothing_serves_is_told_with_what_there_is():
    with pytest.raises(ExportError, match="precision int4, got cuda") as raised:
        choose_variants(ALL, ExportRequest(precision="int4"))
    assert raised.value.hint is not None
    assert raised.value.hint.startswith("ortprep prepare net")


def test_needs_say_every_requirement():
    text = "\n".join(describe_needs(variant("v", AVX512, binding={"batch": 4})))
    for part in ("1.31 and < 1.32", "x86_64", "with avx512f", "without amx_tile", "batch=4"):
        assert part in text
    assert "9.0 and < 9.1" in "\n".join(describe_needs(variant("v", on_gpu(9, 0))))
