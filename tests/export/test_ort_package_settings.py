"""Which options a model package has, under which names, and what is said of the rest."""

from __future__ import annotations

import dataclasses

from hypothesis import given

from ortprep.bundle.digest import digest_bytes
from ortprep.bundle.loader_config import FileEntry, FirstPhase, Variant
from ortprep.bundle.session_record import SessionOptionsRecord
from ortprep.export.files import plan_files
from ortprep.export.option_mapping import recorded_options
from ortprep.export.ort_package.package import compatibility_string
from ortprep.export.ort_package.settings import FORBIDDEN, PATHS, plan_settings
from tests.export.builders import CUDA, any_variant, make_variant
from tests.registry.builders import on_gpu


@given(any_variant)
def test_every_recorded_option_is_in_the_package_or_in_the_list(variant: Variant) -> None:
    settings = plan_settings(variant)
    carried = [str(one.option) for one in settings.carried]
    assert sorted([*carried, *(one.what for one in settings.left_out)]) == sorted(
        map(str, recorded_options(variant))
    )


@given(any_variant)
def test_what_is_carried_is_written_and_nothing_else(variant: Variant) -> None:
    settings = plan_settings(variant)
    written = {f"session_options.{key}={one}" for key, one in settings.session_options.items()}
    written |= {f"provider_options.{key}={one}" for key, one in settings.provider_options.items()}
    assert written == {one.where for one in settings.carried}


@given(any_variant)
def test_nothing_that_the_rules_refuse_is_written(variant: Variant) -> None:
    settings = plan_settings(variant)
    assert not settings.session_options.keys() & (FORBIDDEN | PATHS)
    values = [*settings.session_options.values(), *settings.provider_options.values()]
    assert all(isinstance(one, str) for one in values)


def test_options_of_the_preferred_provider_are_the_package_s() -> None:
    settings = plan_settings(make_variant(cuda={"use_tf32": "0", "enable_cuda_graph": "1"}))
    assert settings.provider_options == {"use_tf32": "0", "enable_cuda_graph": "1"}
    assert [one.name for one in settings.plan_providers] == [CUDA, "CPUExecutionProvider"]


def test_a_level_is_spelt_as_the_c_interface_takes_it() -> None:
    for level, expected in (("ORT_DISABLE_ALL", "disable_all"), ("ORT_ENABLE_LAYOUT", "enable_layout")):
        settings = plan_settings(make_variant(level))
        assert settings.session_options == {"session.graph_optimization_level": expected}


def test_a_first_phase_is_in_the_list() -> None:
    variant = make_variant()
    first = FirstPhase(SessionOptionsRecord("ORT_ENABLE_ALL"), variant.providers)
    settings = plan_settings(dataclasses.replace(variant, first_phase=first))
    assert [one.what for one in settings.left_out] == ["first phase"]


def test_the_files_of_a_first_phase_stay_behind() -> None:
    variant = make_variant()
    own = [FileEntry(f"v/first/{name}", 1, digest_bytes(b"f")) for name in ("f.onnx", "f.onnx.data")]
    first = FirstPhase(SessionOptionsRecord("ORT_DISABLE_ALL"), variant.providers, "v/first/f.onnx")
    both = dataclasses.replace(variant, files=(*variant.files, *own), first_phase=first)
    assert plan_files(both, "out", model="m.onnx") == plan_files(variant, "out", model="m.onnx")
    shared = dataclasses.replace(variant, first_phase=dataclasses.replace(first, model="v/m.onnx"))
    assert plan_files(shared, "out", model="m.onnx") == plan_files(variant, "out", model="m.onnx")


def test_a_compatibility_string_says_every_requirement() -> None:
    text = compatibility_string(on_gpu(9, 0))
    assert text == "ortprep/1 onnxruntime>=1.23 compute-capability>=9.0,<9.1"
