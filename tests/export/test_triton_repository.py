"""A bundle as a model of a Triton repository, loaded as Triton's backend does."""

import json

import numpy as np
import pytest

from ortprep.bundle.codec import decode
from ortprep.bundle.digest import digest_file
from ortprep.bundle.loader_config import ComputeCapabilityRange, read_loader_config
from ortprep.bundle.session_record import SessionOptionsRecord
from ortprep.bundle.verification import check_bundle
from ortprep.errors import ExportError, IntegrityError, LoadError
from ortprep.export.repository import ExportedModel, ExportRequest, export_triton
from ortprep.runtime.tensors.arrays import write_tensors
from ortprep.runtime.tensors.element_types import BFLOAT16
from tests.export.fakes import answer, read_config
from tests.runtime.builders import CPU_ONLY, CUDA_NEEDED, rewrite_digests, sample, weights_of, write_bundle
from tests.runtime.pool.builders import write_doubling, write_passing_on

TUNED = SessionOptionsRecord(
    "ORT_DISABLE_ALL",
    {"intra_op_num_threads": 2, "enable_cpu_mem_arena": False, "enable_mem_reuse": True},
    {"session.use_device_allocator_for_initializers": "1", "session.intra_op.allow_spinning": "0"},
)


@pytest.fixture
def bundle(tmp_path):
    return write_bundle(tmp_path / "linear", options=TUNED)


def named(*names):
    return ExportRequest(variants=names)


def test_a_bundle_becomes_a_model_that_answers_as_the_golden_sample_says(bundle, tmp_path):
    (model,) = export_triton([bundle], tmp_path / "repository")
    folder = tmp_path / "repository" / "linear"
    np.testing.assert_allclose(
        answer(folder, {"x": sample()})["y"], sample() @ weights_of(0), rtol=1e-4, atol=1e-5
    )
    # The files are the bundle's, to the byte; several are in a folder named as the model.
    recorded = sorted(one.sha256 for one in read_loader_config(bundle).variants[0].files)
    written = [folder / one.path for one in model.files]
    assert sorted(map(digest_file, written)) == sorted(one.sha256 for one in model.files) == recorded
    assert sorted(written) == sorted((folder / "1" / "model.onnx").iterdir())
    assert read_config(folder).default_model_filename == "model.onnx"
    # The record says what is carried and what is left out.
    record = json.loads((folder / "ortprep-export.json").read_text())
    assert decode(ExportedModel, record["model"]) == model
    for name in ("enable_mem_reuse", "session.intra_op.allow_spinning"):
        assert any(name in what for what in model.left_out)


def test_an_export_replaces_itself_with_equal_files_and_leaves_other_models_alone(bundle, tmp_path):
    repository = tmp_path / "repository"

    def files():
        return {path: path.read_bytes() for path in (repository / "linear").rglob("*") if path.is_file()}

    export_triton([bundle], repository)
    before = files()
    export_triton([bundle], repository)
    export_triton([write_doubling(tmp_path / "double")], repository, ExportRequest(name="other"))
    assert sorted(path.name for path in repository.iterdir()) == ["linear", "other"]
    assert read_config(repository / "other").name == "other"
    assert files() == before


def test_what_is_no_export_is_never_overwritten(bundle, tmp_path):
    own = tmp_path / "repository" / "linear"
    own.mkdir(parents=True)
    (own / "config.pbtxt").write_text("mine")
    with pytest.raises(ExportError, match="will not overwrite"):
        export_triton([bundle], tmp_path / "repository")
    (own / "ortprep-export.json").write_text("{}")
    with pytest.raises(ExportError, match="will not overwrite"):
        export_triton([bundle], tmp_path / "repository")
    assert (own / "config.pbtxt").read_text() == "mine"


@pytest.mark.attack
@pytest.mark.parametrize("own", ["2/model.onnx", "labels.txt", "config.pbtxt", "1/model.onnx/notes"])
def test_an_export_replaces_no_file_that_a_user_added_or_edited(bundle, tmp_path, own):
    export_triton([bundle], tmp_path / "repository")
    file = tmp_path / "repository" / "linear" / own
    file.parent.mkdir(exist_ok=True)
    file.write_text("mine")
    with pytest.raises(
        ExportError, match=f"got one with files that were added or changed: '{own}'"
    ) as caught:
        export_triton([bundle], tmp_path / "repository")
    assert "move what is yours elsewhere" in (caught.value.hint or "")
    assert file.read_text() == "mine"


def test_a_failed_export_leaves_the_old_one(bundle, tmp_path):
    repository = tmp_path / "repository"
    export_triton([bundle], repository)
    before = (repository / "linear" / "ortprep-export.json").read_bytes()
    write_tensors(bundle / "golden.npz", {"input:x": sample(), "output:y": sample() @ weights_of(1)})
    rewrite_digests(bundle)
    with pytest.raises(LoadError, match="does not answer as recorded"):
        export_triton([bundle], repository)
    assert [path.name for path in repository.iterdir()] == ["linear"]
    assert (repository / "linear" / "ortprep-export.json").read_bytes() == before


def test_a_changed_byte_in_the_bundle_is_never_exported(bundle, tmp_path):
    data = next((bundle / "cpu").glob("*.data"))
    data.write_bytes(bytes(data.stat().st_size))
    with pytest.raises(IntegrityError):
        export_triton([bundle], tmp_path / "repository")
    assert not (tmp_path / "repository").exists()


def test_a_variant_that_cannot_run_here_is_refused(tmp_path):
    gpu = CUDA_NEEDED._replace(compute_capability=ComputeCapabilityRange((99, 0), (100, 0)))
    bundle = write_bundle(tmp_path / "linear", requirements={"cuda": gpu, "portable": CPU_ONLY})
    with pytest.raises(ExportError, match=r"cannot try variant 'cuda'\n.*no CUDA device"):
        export_triton([bundle], tmp_path / "repository", named("cuda"))
    assert not (tmp_path / "repository" / "linear").exists()


def test_with_batches_the_first_axis_is_triton_s(bundle, tmp_path):
    export_triton([bundle], tmp_path / "repository", ExportRequest(max_batch_size=16, instances=3))
    config = read_config(tmp_path / "repository" / "linear")
    assert list(config.input[0].dims) == [8]
    assert config.max_batch_size == 16
    assert config.HasField("dynamic_batching")
    assert config.instance_group[0].count == 3
    answers = answer(tmp_path / "repository" / "linear", {"x": sample()})
    np.testing.assert_allclose(answers["y"], sample() @ weights_of(0), rtol=1e-4, atol=1e-5)


def test_batches_of_a_model_of_fixed_size_are_refused(tmp_path):
    bundle = write_doubling(tmp_path / "double", shape=(2, "n"))
    with pytest.raises(ExportError, match="first axis of any size"):
        export_triton([bundle], tmp_path / "repository", ExportRequest(max_batch_size=4))
    assert not (tmp_path / "repository" / "double").exists()


SAMPLES = {
    "bool": np.array([[True, False]]),
    "uint8": np.array([[1, 255]], np.uint8),
    "int16": np.array([[-1, 300]], np.int16),
    "int64": np.array([[-1, 2**40]], np.int64),
    "float16": np.array([[1.5, -2]], np.float16),
    "float64": np.array([[1.5, -2e300]], np.float64),
    "string": np.array([["ünï ✓", "", "z"]]),
    "bfloat16": np.array([[0x3F80, 0xC000]], np.uint16).view(BFLOAT16),
}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", SAMPLES)
def test_every_type_comes_through_unchanged(tmp_path, dtype):
    export_triton([write_passing_on(tmp_path / "same", dtype, SAMPLES[dtype])], tmp_path / "repository")
    given = SAMPLES[dtype]
    assert answer(tmp_path / "repository" / "same", {"x": given})["y"].tolist() == given.tolist()


@pytest.mark.parametrize("name", ["../up", "a/b", ".", "-x"])
def test_a_name_that_leaves_the_repository_is_refused(bundle, tmp_path, name):
    with pytest.raises(ExportError, match="not a name"):
        export_triton([bundle], tmp_path / "repository", ExportRequest(name=name))


def test_two_bundles_of_one_name_are_refused_before_anything_is_written(tmp_path):
    bundles = [write_doubling(tmp_path / where / "double") for where in ("one", "two")]
    with pytest.raises(ExportError, match="two models with the same name"):
        export_triton(bundles, tmp_path / "repository")
    assert not (tmp_path / "repository").exists()


def test_no_export_goes_into_a_bundle_onto_a_file_or_through_a_link(tmp_path):
    bundle = write_doubling(tmp_path / "double")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "alias").symlink_to(bundle)
    for out in (bundle, bundle / "below", tmp_path / "alias"):
        with pytest.raises(ExportError, match="will not export into a bundle"):
            export_triton([bundle], out)
    with pytest.raises(ExportError, match="expected a folder, got a file"):
        export_triton([bundle], tmp_path / "file")
    check_bundle(bundle)
    (tmp_path / "repository").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "repository" / "double").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ExportError, match="will not replace a link"):
        export_triton([bundle], tmp_path / "repository")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    assert export_triton([bundle], tmp_path / "link")
    assert (tmp_path / "elsewhere" / "double").is_dir()
    assert (tmp_path / "link").is_symlink()
