"""A bundle as a model package: by the published rules, and as ONNX Runtime itself reads it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest

from pipeline.bundle.digest import digest_file
from pipeline.bundle.loader_config import Requirements, VersionRange, read_loader_config
from pipeline.bundle.session_record import SessionOptionsRecord
from pipeline.errors import ExportError
from pipeline.export.choosing import Server, Wish
from pipeline.export.package.rules import find_problems
from pipeline.export.package.writing import PackageRequest, export_package
from pipeline.versions import parse_version
from tests.runtime.bundles import CPU_ONLY, CUDA_NEEDED, sample, weights_of, write_bundle, write_converted
from tests.runtime.pool.pool_bundles import write_doubling

TUNED = SessionOptionsRecord(
    "ORT_DISABLE_ALL",
    {
        "intra_op_num_threads": 2,
        "execution_mode": "ORT_PARALLEL",
        "enable_cpu_mem_arena": False,
        "enable_mem_reuse": True,
        "execution_order": "PRIORITY_BASED",
        "use_deterministic_compute": True,
        "logid": "net",
    },
    {"session.intra_op.allow_spinning": "0"},
)
needs_reader = pytest.mark.skipif(
    (parse_version(onnxruntime.__version__) or ()) < (1, 31), reason="this ONNX Runtime has no stable reader"
)


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return write_bundle(tmp_path / "linear", options=TUNED)


def read_by_onnxruntime(package: Path, tmp_path: Path) -> dict[str, Any]:
    answer = tmp_path / "answer.json"
    command = [sys.executable, "-m", "tests.export.package_api", str(package), str(answer)]
    subprocess.run(command, check=True, timeout=60, cwd=Path(__file__).parents[2])
    return dict(json.loads(answer.read_text()))


def read_variant(package: Path, component: str, variant: str) -> dict[str, Any]:
    body = json.loads((package / "components" / component / "component.json").read_text())
    return dict(body["variants"][variant])


def change(package: Path, document: str, **changes: Any) -> None:
    path = package / document
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def change_variant(package: Path, **changes: Any) -> None:
    path = package / "components/linear/component.json"
    body = json.loads(path.read_text())
    body["variants"]["cpu"].update(changes)
    path.write_text(json.dumps(body))


@needs_reader
def test_onnxruntime_opens_the_package_chooses_the_variant_and_makes_its_session(
    bundle: Path, tmp_path: Path
) -> None:
    package = tmp_path / "package"
    export_package([bundle, write_doubling(tmp_path / "double")], package)
    components = read_by_onnxruntime(package, tmp_path)["components"]
    assert {name: one["variant"] for name, one in components.items()} == {"linear": "cpu", "double": "cpu"}
    assert components["linear"]["folder"] == str(package / "components/linear/cpu")


@needs_reader
@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("session.graph_optimization_level", "ORT_DISABLE_ALL", "disable_all"),
        ("session.execution_mode", "both", "parallel"),
        ("session.intra_op_num_threads", "two", "int32"),
        ("session.enable_cpu_mem_arena", "no", "boolean"),
        ("session.use_deterministic_compute", "no", "boolean"),
    ],
)
def test_onnxruntime_reads_the_options_that_are_carried_as_options(
    bundle: Path, tmp_path: Path, key: str, value: str, expected: str
) -> None:
    package = tmp_path / "package"
    export_package([bundle], package)
    ort = read_variant(package, "linear", "cpu")["executor_info"]["ort"]
    assert key in ort["session_options"]
    change_variant(package, executor_info={"ort": {**ort, "session_options": {key: value}}})
    assert expected in read_by_onnxruntime(package, tmp_path)["error"]


@needs_reader
def test_onnxruntime_1_31_finds_no_variant_of_the_cpu_provider_that_says_its_device(
    bundle: Path, tmp_path: Path
) -> None:
    export_package([bundle], tmp_path / "package", PackageRequest(constrain_device=True))
    assert read_variant(tmp_path / "package", "linear", "cpu")["device"] == "cpu"
    answer = read_by_onnxruntime(tmp_path / "package", tmp_path)
    if parse_version(onnxruntime.__version__) == (1, 31, 1):
        assert "No suitable model variant" in answer["error"]


def test_the_packaged_model_answers_as_the_golden_sample_says(bundle: Path, tmp_path: Path) -> None:
    (exported,) = export_package([bundle], tmp_path / "package").models
    folder = tmp_path / "package/components/linear/cpu"
    model = folder / read_variant(tmp_path / "package", "linear", "cpu")["executor_info"]["ort"]["model_file"]
    session = onnxruntime.InferenceSession(str(model), providers=["CPUExecutionProvider"])
    np.testing.assert_allclose(
        session.run(None, {"x": sample()})[0], sample() @ weights_of(0), rtol=1e-4, atol=1e-5
    )
    assert "answers the golden sample" in exported.trial


def test_model_and_weights_are_the_bundle_s_to_the_byte(bundle: Path, tmp_path: Path) -> None:
    (model,) = export_package([bundle], tmp_path / "package").models
    recorded = sorted(one.sha256 for one in read_loader_config(bundle).variants[0].files)
    assert sorted(digest_file(tmp_path / "package" / one.path) for one in model.files) == recorded


def test_a_variant_says_provider_compatibility_options_and_directory(bundle: Path, tmp_path: Path) -> None:
    export_package([bundle], tmp_path / "package")
    variant = read_variant(tmp_path / "package", "linear", "cpu")
    assert variant["ep"] == "CPUExecutionProvider"
    assert variant["variant_directory"] == "cpu"
    assert variant["compatibility_string"] == "ortprep/1 onnxruntime>=1.23"
    assert variant["additional_metadata"]["ortprep"]["device"] == "cpu"
    assert variant["executor_info"]["ort"]["session_options"] == {
        "session.graph_optimization_level": "disable_all",
        "session.intra_op_num_threads": "2",
        "session.execution_mode": "parallel",
        "session.enable_cpu_mem_arena": "0",
        "session.use_deterministic_compute": "1",
        "session.log_id": "net",
        "session.intra_op.allow_spinning": "0",
    }


def test_one_variant_per_provider_is_packed_since_onnxruntime_takes_the_first(tmp_path: Path) -> None:
    bound = Requirements(VersionRange("1.23"), ("CPUExecutionProvider",), "x86_64", ("avx2",))
    needs = {"cuda": CUDA_NEEDED, "cpu": bound, "portable": CPU_ONLY, "other": CPU_ONLY}
    bundle = write_bundle(tmp_path / "linear", requirements=needs)
    exported = export_package([bundle], tmp_path / "package")
    assert [one.variant for one in exported.models] == ["cuda", "portable"]
    assert [one.name for one in exported.passed_over] == ["cpu", "other"]


def test_a_named_variant_that_is_never_reached_is_listed_as_such(tmp_path: Path) -> None:
    bundle = write_converted(tmp_path / "linear")
    request = PackageRequest(Wish(variants=("cpu", "cpu-int8")))
    models = export_package([bundle], tmp_path / "package", request).models
    assert [one.what for one in models[1].left_out] == ["device cpu", "being chosen"]


def test_two_bundles_of_one_name_are_refused(bundle: Path, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="two bundles of one name"):
        export_package([bundle, bundle], tmp_path / "package")


def test_what_is_no_package_of_ours_is_never_overwritten(bundle: Path, tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "manifest.json").write_text("{}")
    with pytest.raises(ExportError, match="will not overwrite"):
        export_package([bundle], package)
    assert (package / "manifest.json").read_text() == "{}"


def test_an_earlier_package_is_replaced_whole(bundle: Path, tmp_path: Path) -> None:
    package = tmp_path / "package"
    export_package([bundle], package)
    export_package([write_doubling(tmp_path / "double")], package, PackageRequest(name="second"))
    assert [path.name for path in (package / "components").iterdir()] == ["double"]
    assert json.loads((package / "manifest.json").read_text())["package_name"] == "second"


def test_a_known_version_lets_in_what_is_bound_to_it(tmp_path: Path) -> None:
    own = Requirements(VersionRange("1.31", "1.32"), ("CPUExecutionProvider",))
    bundle = write_bundle(tmp_path / "linear", requirements={"cpu": own, "portable": CPU_ONLY})
    for version, expected in ((None, "portable"), ("1.31.1", "cpu"), ("1.32.0", "portable")):
        request = PackageRequest(server=Server(version))
        (model,) = export_package([bundle], tmp_path / "package", request).models
        assert model.variant == expected


BREAKS: dict[str, tuple[str, dict[str, Any], str]] = {
    "an unknown field": ("manifest.json", {"configs_dir": "x"}, "unknown field 'configs_dir'"),
    "a version that is none": ("manifest.json", {"schema_version": 1.5}, "schema_version"),
    "another major version": ("manifest.json", {"schema_version": "2.0"}, "schema_version"),
    "a name that is no text": ("manifest.json", {"package_name": 3}, "package_name"),
    "no component": ("manifest.json", {"components": {}}, "at least one component"),
    "a list of components": ("manifest.json", {"components": ["linear"]}, "at least one component"),
    "a path that leads out": ("manifest.json", {"components": {"a": "../a"}}, "without .."),
    "a component that is not there": ("manifest.json", {"components": {"a": "gone"}}, "read as JSON"),
    "no variant": ("components/linear/component.json", {"variants": {}}, "at least one variant"),
    "an unknown field of a component": ("components/linear/component.json", {"x": 1}, "unknown field"),
}


@pytest.mark.parametrize("name", BREAKS)
def test_a_package_against_the_rules_is_told_so(bundle: Path, tmp_path: Path, name: str) -> None:
    package = tmp_path / "package"
    export_package([bundle], package)
    assert find_problems(package) == ()
    document, changes, expected = BREAKS[name]
    change(package, document, **changes)
    assert expected in "\n".join(find_problems(package))


VARIANT_BREAKS: dict[str, tuple[dict[str, Any], str]] = {
    "an unknown field": ({"file": "model.onnx"}, "unknown field"),
    "a device in capitals": ({"device": "CPU"}, "lower-case"),
    "a provider that is no text": ({"ep": ["CPUExecutionProvider"]}, "ep is a string"),
    "a folder that is not there": ({"variant_directory": "gone"}, "directory on disk"),
    "a folder outside": ({"variant_directory": "/tmp"}, "directory on disk"),
    "no model file": ({"executor_info": {"ort": {}}}, "model_file"),
    "a model that is not there": ({"executor_info": {"ort": {"model_file": "gone.onnx"}}}, "model_file"),
    "a model outside": ({"executor_info": {"ort": {"model_file": "../component.json"}}}, "model_file"),
    "an option that is a number": (
        {"executor_info": {"ort": {"model_file": "model.onnx", "session_options": {"a": 1}}}},
        "map of string",
    ),
    "an option that writes files": (
        {"executor_info": {"ort": {"model_file": "model.onnx", "session_options": {
            "session.enable_profiling": "1"}}}},
        "forbidden",
    ),
    "a payload that is a list": ({"executor_info": {"ort": []}}, "an object, or a path"),
}  # fmt: skip


@pytest.mark.parametrize("name", VARIANT_BREAKS)
def test_a_variant_against_the_rules_is_told_so(bundle: Path, tmp_path: Path, name: str) -> None:
    package = tmp_path / "package"
    export_package([bundle], package)
    changes, expected = VARIANT_BREAKS[name]
    change_variant(package, **changes)
    assert expected in "\n".join(find_problems(package))


@needs_reader
@pytest.mark.parametrize(
    "name", ["an unknown field", "a provider that is no text", "a folder that is not there", "no model file"]
)
def test_what_the_rules_refuse_onnxruntime_refuses_too(bundle: Path, tmp_path: Path, name: str) -> None:
    package = tmp_path / "package"
    export_package([bundle], package)
    change_variant(package, **VARIANT_BREAKS[name][0])
    assert "error" in read_by_onnxruntime(package, tmp_path)


def test_a_payload_in_a_file_of_its_own_is_read(bundle: Path, tmp_path: Path) -> None:
    package = tmp_path / "package"
    export_package([bundle], package)
    ort = read_variant(package, "linear", "cpu")["executor_info"]["ort"]
    (package / "components/linear/cpu/ort_info.json").write_text(json.dumps(ort))
    change_variant(package, executor_info={"ort": "ort_info.json"})
    assert find_problems(package) == ()


def test_a_variant_of_a_gpu_says_so(tmp_path: Path) -> None:
    bundle = write_bundle(tmp_path / "linear", requirements={"cuda": CUDA_NEEDED})
    export_package([bundle], tmp_path / "package", PackageRequest(constrain_device=True))
    variant = read_variant(tmp_path / "package", "linear", "cuda")
    assert (variant["ep"], variant["device"]) == ("CUDAExecutionProvider", "gpu")
