"""A bundle as a model package, as ONNX Runtime itself reads it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest

from ortprep.bundle.digest import digest_file
from ortprep.bundle.loader_config import Requirements, VersionRange, read_loader_config
from ortprep.bundle.session_record import SessionOptionsRecord
from ortprep.errors import ExportError
from ortprep.export import ort_package
from ortprep.export.ort_package import export_package
from ortprep.export.result import ExportRequest
from tests.runtime.builders import CPU_ONLY, CUDA_NEEDED, sample, weights_of, write_bundle, write_converted
from tests.runtime.pool.builders import write_doubling

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
pytestmark = [
    pytest.mark.runtime,
    pytest.mark.skipif(
        not hasattr(onnxruntime, "ModelPackage"),
        reason="no model packages before ONNX Runtime 1.32",
    ),
]


@pytest.fixture
def bundle(tmp_path):
    return write_bundle(tmp_path / "linear", options=TUNED)


def select(package: Path, component: str) -> Any:
    """Returns the variant that ONNX Runtime selects for its CPU provider."""
    options = onnxruntime.SessionOptions()
    options.add_provider("CPUExecutionProvider", {})
    wanted = onnxruntime.ModelPackageOptions(options)
    return onnxruntime.ModelPackageContext(str(package)).select_component(component, wanted)


def read_variant(package: Path, component: str, variant: str) -> dict[str, Any]:
    body = json.loads((package / "manifest.json").read_text())["components"][component]
    return dict(body["variants"][variant])


@pytest.mark.slow
def test_onnxruntime_opens_the_package_chooses_the_variant_and_makes_its_session(bundle, tmp_path):
    package = tmp_path / "package"
    export_package([bundle, write_doubling(tmp_path / "double")], package)
    found = {name: select(package, name) for name in ("linear", "double")}
    assert {name: one.get_selected_variant_name() for name, one in found.items()} == {
        "linear": "cpu",
        "double": "cpu",
    }
    assert found["linear"].get_selected_variant_folder_path() == str(package / "components/linear/cpu")
    session = found["linear"].create_session()
    np.testing.assert_allclose(
        session.run(None, {"x": sample()})[0], sample() @ weights_of(0), rtol=1e-4, atol=1e-5
    )


@pytest.mark.slow
def test_onnxruntime_makes_the_session_with_the_options_that_are_carried(bundle, tmp_path):
    export_package([bundle], tmp_path / "package")
    options = select(tmp_path / "package", "linear").create_session().get_session_options()
    assert options.intra_op_num_threads == 2
    assert options.execution_mode == onnxruntime.ExecutionMode.ORT_PARALLEL
    assert options.graph_optimization_level == onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    assert not options.enable_cpu_mem_arena
    assert options.use_deterministic_compute
    assert options.logid == "net"


def test_the_packaged_model_answers_as_the_golden_sample_says(bundle, tmp_path):
    (exported,) = export_package([bundle], tmp_path / "package").models
    folder = tmp_path / "package/components/linear/cpu"
    model = folder / read_variant(tmp_path / "package", "linear", "cpu")["executor_info"]["ort"]["model_file"]
    session = onnxruntime.InferenceSession(str(model), providers=["CPUExecutionProvider"])
    np.testing.assert_allclose(
        session.run(None, {"x": sample()})[0], sample() @ weights_of(0), rtol=1e-4, atol=1e-5
    )
    assert "answers the golden sample" in exported.trial


def test_model_and_weights_are_the_bundle_s_to_the_byte(bundle, tmp_path):
    (model,) = export_package([bundle], tmp_path / "package").models
    recorded = sorted(one.sha256 for one in read_loader_config(bundle).variants[0].files)
    assert sorted(digest_file(tmp_path / "package" / one.path) for one in model.files) == recorded


def test_a_variant_says_provider_options_and_directory(bundle, tmp_path):
    export_package([bundle], tmp_path / "package")
    variant = read_variant(tmp_path / "package", "linear", "cpu")
    assert variant["ep"] == "CPUExecutionProvider"
    assert variant["variant_directory"] == "components/linear/cpu"
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


def test_one_variant_per_provider_is_packed_since_onnxruntime_takes_the_first(tmp_path):
    bound = Requirements(VersionRange("1.23"), ("CPUExecutionProvider",), "x86_64", ("avx2",))
    needs = {"cuda": CUDA_NEEDED, "cpu": bound, "portable": CPU_ONLY, "other": CPU_ONLY}
    bundle = write_bundle(tmp_path / "linear", requirements=needs)
    exported = export_package([bundle], tmp_path / "package")
    assert [one.variant for one in exported.models] == ["cuda", "portable"]
    assert [one.name for one in exported.passed_over] == ["cpu", "other"]


def test_a_named_variant_that_is_never_reached_is_listed_as_such(tmp_path):
    bundle = write_converted(tmp_path / "linear")
    request = ExportRequest(variants=("cpu", "cpu-int8"))
    models = export_package([bundle], tmp_path / "package", request).models
    assert [*models[1].left_out] == ["being chosen"]


def test_two_bundles_of_one_name_are_refused(bundle, tmp_path):
    with pytest.raises(ExportError, match="two bundles with the same name"):
        export_package([bundle, bundle], tmp_path / "package")


def test_what_is_no_package_of_ours_is_never_overwritten(bundle, tmp_path):
    package = tmp_path / "package"
    package.mkdir()
    (package / "manifest.json").write_text("{}")
    with pytest.raises(ExportError, match="will not overwrite"):
        export_package([bundle], package)
    assert (package / "manifest.json").read_text() == "{}"


def test_an_earlier_package_is_replaced_whole(bundle, tmp_path):
    package = tmp_path / "package"
    export_package([bundle], package)
    export_package([write_doubling(tmp_path / "double")], package, ExportRequest(name="second"))
    assert [path.name for path in (package / "components").iterdir()] == ["double"]
    assert json.loads((package / "manifest.json").read_text())["package_name"] == "second"


def test_what_onnxruntime_refuses_is_an_error_and_leaves_nothing(bundle, tmp_path, monkeypatch):
    plan = ort_package.plan_options
    broken: Any = {"session_options": 3}
    monkeypatch.setattr(ort_package, "plan_options", lambda variant: replace(plan(variant), sections=broken))
    with pytest.raises(ExportError, match="refuses the model package"):
        export_package([bundle], tmp_path / "package")
    assert not (tmp_path / "package").exists()
