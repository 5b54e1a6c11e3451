"""Laws of bundle verification; F-numbers are those of docs/format.md."""

import json
import os
import shlex
import sys

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ortprep.bundle.codec import decode, encode
from ortprep.bundle.digest import digest_json
from ortprep.bundle.loader_config import (
    MAX_LOADER_BYTES,
    FileEntry,
    LoaderConfig,
    read_loader_config,
    write_loader_config,
)
from ortprep.bundle.manifest import MAX_MANIFEST_BYTES, Manifest, read_manifest
from ortprep.bundle.session_record import ProviderRecord
from ortprep.bundle.verification import check_bundle, compare_bundle, raise_differences
from ortprep.errors import BundleError, IntegrityError
from ortprep.versions import upgrade_command
from tests.registry.builders import write_bundle

WEIGHTS = "portable/m_optimized.onnx.data"
FILES = ("golden.npz", "portable/m_optimized.onnx", WEIGHTS, "loader.json")
SUPPRESSED = (HealthCheck.function_scoped_fixture, HealthCheck.too_slow)
"""A test's own list takes the place of the one that holds for all tests."""


@pytest.fixture
def bundle(tmp_path):
    return write_bundle(tmp_path / "m", name="m")


def rewrite(path, **changes):
    """Changes fields of a bundle's JSON file and makes its self digest right again, as an attacker would."""
    data = {**json.loads(path.read_text()), **changes}
    data.pop("self_digest")
    path.write_text(json.dumps(data | {"self_digest": digest_json(data)}))


def rewrite_variant(bundle, **changes):
    (variant,) = json.loads((bundle / "loader.json").read_text())["variants"]
    rewrite(bundle / "loader.json", variants=[variant | changes])


@settings(max_examples=60, suppress_health_check=SUPPRESSED)
@given(data=st.data())
@pytest.mark.attack
def test_one_changed_byte_is_always_reported(bundle, data):
    name = data.draw(st.sampled_from([*FILES, "manifest.json"]))
    original = (bundle / name).read_bytes()
    index = data.draw(st.integers(0, len(original) - 1))
    flipped = original[index] ^ data.draw(st.integers(1, 255))
    changed = original[:index] + bytes([flipped]) + original[index + 1 :]
    (bundle / name).write_bytes(changed)
    try:
        if name != "manifest.json" or _means_something_else(original, changed):
            with pytest.raises(BundleError):
                check_bundle(bundle)
    finally:
        (bundle / name).write_bytes(original)


def _means_something_else(original, changed):
    """White space of the manifest may change without changing what it says; no digest is recorded of it."""
    try:
        return bool(json.loads(original) != json.loads(changed))
    except ValueError:
        return True


def test_f8_every_difference_is_reported_at_once(bundle):
    (bundle / "golden.npz").write_bytes(b"other!")
    (bundle / "portable/m_optimized.onnx").write_bytes(b"longer than before")
    (bundle / WEIGHTS).unlink()
    (bundle / "portable/extra").write_bytes(b"")
    kinds = {difference.path: difference.kind for difference in compare_bundle(bundle)}
    assert kinds == {
        "golden.npz": "content",
        "portable/m_optimized.onnx": "size",
        WEIGHTS: "missing",
        "portable/extra": "added",
    }


def test_a_folder_in_a_files_place_is_reported(bundle):
    (bundle / "golden.npz").unlink()
    (bundle / "golden.npz").mkdir()
    assert [d.kind for d in compare_bundle(bundle)] == ["kind"]


def test_f5_a_newer_major_version_is_refused_with_what_to_do(bundle):
    rewrite(bundle / "loader.json", schema_version="2.0")
    with pytest.raises(BundleError, match="too new") as caught:
        read_loader_config(bundle)
    assert caught.value.hint == upgrade_command()


@pytest.mark.parametrize("name", ["loader.json", "manifest.json"])
def test_f5_a_lower_major_version_is_read(bundle, name):
    rewrite(bundle / name, schema_version="0.7")
    assert read_loader_config(bundle).name == read_manifest(bundle).name == "m"


@pytest.mark.parametrize(
    "version", [None, 1, "", "one", "-1.0", "1", "1.", "1.0.0", "١.0", "9" * 5000 + ".0"]
)
def test_f5_a_malformed_version_is_refused(bundle, version):
    rewrite(bundle / "loader.json", schema_version=version)
    with pytest.raises(BundleError, match="schema_version"):
        read_loader_config(bundle)


def test_f5_fields_of_a_newer_minor_version_are_ignored(bundle):
    rewrite(bundle / "loader.json", schema_version="1.9", novelty={"a": 1})
    assert read_loader_config(bundle).name == "m"


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32", "utf-8-sig"])
def test_f5_any_other_encoding_is_refused(bundle, encoding):
    text = (bundle / "loader.json").read_text()
    (bundle / "loader.json").write_text(text, encoding=encoding)
    with pytest.raises(BundleError, match="not a JSON file"):
        read_loader_config(bundle)


@pytest.mark.attack
def test_f5_a_field_named_twice_is_refused_for_readers_could_differ_about_it(bundle):
    text = (bundle / "loader.json").read_text()
    (bundle / "loader.json").write_text(text.replace('"name": "m"', '"name": "other", "name": "m"', 1))
    with pytest.raises(BundleError, match="named twice"):
        read_loader_config(bundle)


@pytest.mark.parametrize("field", ["name", "target"])
@pytest.mark.parametrize("name", ["../up", "$(command)", "", ".hidden", "a/b"])
def test_f1_a_variants_name_or_target_that_is_no_name_is_refused(bundle, field, name):
    rewrite_variant(bundle, **{field: name})
    with pytest.raises(IntegrityError, match="bad name"):
        read_loader_config(bundle)


@pytest.mark.parametrize("digest", ["", "0" * 64, "sha256:" + "A" * 64, "md5:" + "0" * 64])
def test_f4_a_digest_written_otherwise_is_refused(bundle, digest):
    golden = json.loads((bundle / "loader.json").read_text())["golden"]
    golden["file"]["sha256"] = digest
    rewrite(bundle / "loader.json", golden=golden)
    with pytest.raises(IntegrityError, match="bad digest"):
        read_loader_config(bundle)


@pytest.mark.attack
@pytest.mark.parametrize("size", [10**400, 2**64, -(2**63) - 1])
def test_a_number_that_no_machine_has_is_refused_where_it_is_read(size):
    with pytest.raises(BundleError, match="64 bits"):
        decode(FileEntry, {"path": "a", "size_bytes": size, "sha256": "sha256:0"})


@pytest.mark.parametrize("bound", [float("nan"), float("inf"), -1.0, 10**400])
def test_f15_a_tolerance_that_would_pass_anything_is_refused(bundle, bound):
    golden = json.loads((bundle / "loader.json").read_text())["golden"]
    golden["default"]["rtol"] = encode(bound)
    rewrite(bundle / "loader.json", golden=golden)
    with pytest.raises(BundleError, match=r"tolerance|too large"):
        read_loader_config(bundle)


FIRST_PHASE = {"session_options": {"graph_optimization_level": "ORT_DISABLE_ALL"}}


def test_f19_a_first_phase_on_the_variants_own_providers_is_read(bundle):
    providers = [{"name": "CPUExecutionProvider", "options": {"use_arena": "0"}}]
    rewrite_variant(bundle, first_phase={**FIRST_PHASE, "providers": providers})
    (variant,) = read_loader_config(bundle).variants
    assert variant.first_phase.providers == (ProviderRecord("CPUExecutionProvider", {"use_arena": "0"}),)


CPU, CUDA = {"name": "CPUExecutionProvider"}, {"name": "CUDAExecutionProvider"}


def on(*providers, **options):
    return {"first_phase": {**FIRST_PHASE, "providers": [one | options for one in providers]}}


def needing(*providers, **versions):
    return {"requirements": {"onnxruntime": {"minimum": "1.23"} | versions, "providers": list(providers)}}


OTHER_PLACE = "expected its own providers and devices in its first phase"


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        *(
            (needing(CPU["name"], **{bound: version}), "expected a version of ONNX Runtime")
            for bound in ("minimum", "below")
            for version in ("", "new", "9" * 5000)
        ),
        (needing(CUDA["name"], CPU["name"]), "expected the providers it requires"),
        *((on(*providers), OTHER_PLACE) for providers in ([], [CUDA], [CUDA, CPU])),
        (on(CPU, options={"device_id": "1"}), OTHER_PLACE),
        ({"model": "portable/other.onnx"}, "among its files"),
    ],
)
def test_f12_f19_a_variant_that_contradicts_itself_is_refused(bundle, changes, problem):
    rewrite_variant(bundle, **changes)
    with pytest.raises(BundleError, match=problem):
        read_loader_config(bundle)


@pytest.mark.parametrize(
    "path", ["../m/golden.npz", "/etc/passwd", "portable/../../x", "a\\b", "", ".", "a\x00b", "a//b"]
)
@pytest.mark.attack
def test_f2_a_path_that_could_escape_is_refused(bundle, path):
    config = json.loads((bundle / "loader.json").read_text())
    config["golden"]["file"]["path"] = path
    rewrite(bundle / "loader.json", golden=config["golden"])
    with pytest.raises(IntegrityError, match="leaves its bundle"):
        read_loader_config(bundle)


@pytest.mark.parametrize("name", ["golden.npz", "loader.json", "manifest.json"])
@pytest.mark.attack
def test_f3_a_link_that_leads_out_is_refused(bundle, tmp_path, name):
    outside = tmp_path / "outside"
    (bundle / name).rename(outside)
    (bundle / name).symlink_to(outside)
    with pytest.raises(IntegrityError, match="leaves its bundle"):
        check_bundle(bundle)


@pytest.mark.attack
def test_f3_links_that_lead_in_a_circle_are_reported_and_end(bundle):
    (bundle / "golden.npz").unlink()
    (bundle / "golden.npz").symlink_to("golden.npz")
    assert [(d.path, d.kind) for d in compare_bundle(bundle)] == [("golden.npz", "unreadable")]


@pytest.mark.parametrize("name", ["loader.json", "manifest.json", "golden.npz"])
@pytest.mark.attack
def test_a_pipe_in_a_files_place_is_reported_and_never_waited_for(bundle, name):
    (bundle / name).unlink()
    os.mkfifo(bundle / name)
    with pytest.raises(BundleError, match="regular file"):
        check_bundle(bundle)


@pytest.mark.attack
def test_f8_a_link_to_a_folder_is_an_added_file(bundle):
    (bundle / "portable/link").symlink_to(".")
    assert [(d.path, d.kind) for d in compare_bundle(bundle)] == [("portable/link", "added")]


def test_the_way_to_check_a_bundle_is_one_command_whatever_its_folder_is_named(tmp_path):
    bundle = write_bundle(tmp_path / "my models; exit")
    (bundle / "golden.npz").write_bytes(b"other!")
    with pytest.raises(IntegrityError) as caught:
        raise_differences(bundle, compare_bundle(bundle))
    assert shlex.split(caught.value.hint or "") == ["ortprep", "check", str(bundle)]


@pytest.mark.parametrize("name", ["loader.json", "manifest.json"])
def test_f6_a_file_without_its_own_digest_is_refused(bundle, name):
    data = json.loads((bundle / name).read_text())
    del data["self_digest"]
    (bundle / name).write_text(json.dumps(data))
    with pytest.raises(IntegrityError, match="was changed"):
        check_bundle(bundle)


@pytest.mark.attack
def test_f6_nesting_at_any_depth_is_a_bundle_error(bundle):
    original = json.loads((bundle / "loader.json").read_text())
    limit = sys.getrecursionlimit()
    for depth in range(limit - 150, limit + 10, 2):
        nested = f'{json.dumps(original)[:-1]}, "x": {"[" * depth}{"]" * depth}}}'
        (bundle / "loader.json").write_text(nested)
        with pytest.raises(BundleError):
            read_loader_config(bundle)


@pytest.mark.attack
def test_f9_a_loader_config_that_contradicts_the_manifest_is_refused(bundle):
    variants = json.loads((bundle / "loader.json").read_text())["variants"]
    variants[0]["files"][0]["sha256"] = "sha256:" + "0" * 64
    rewrite(bundle / "loader.json", variants=variants)
    with pytest.raises(IntegrityError, match="disagree"):
        check_bundle(bundle)


@pytest.mark.attack
def test_f9_a_manifest_that_lists_a_file_twice_is_refused_before_it_is_hashed(bundle):
    files = json.loads((bundle / "manifest.json").read_text())["files"]
    rewrite(bundle / "manifest.json", files=[*files, files[0]])
    with pytest.raises(IntegrityError, match="listed twice"):
        read_manifest(bundle)


@pytest.mark.parametrize(("count", "problem"), [(0, "number of variants"), (2, "named twice")])
def test_f10_a_bundle_has_variants_and_each_once(bundle, count, problem):
    variants = json.loads((bundle / "loader.json").read_text())["variants"]
    rewrite(bundle / "loader.json", variants=variants * count)
    with pytest.raises(BundleError, match=problem):
        read_loader_config(bundle)


@pytest.mark.parametrize("name", ["loader.json", "manifest.json"])
@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b"[" * 100_000, b"null", b'{"a": NaN}'])
def test_f5_anything_but_a_json_object_of_this_form_is_refused(bundle, name, content):
    (bundle / name).write_bytes(content)
    with pytest.raises(BundleError, match=name):
        check_bundle(bundle)


READERS = {"loader.json": read_loader_config, "manifest.json": read_manifest}


@pytest.mark.parametrize(
    ("name", "max_bytes"), [("loader.json", MAX_LOADER_BYTES), ("manifest.json", MAX_MANIFEST_BYTES)]
)
def test_f7_a_file_past_its_limit_is_not_read(bundle, name, max_bytes):
    with (bundle / name).open("ab") as file:
        file.truncate(max_bytes + 1)
    with pytest.raises(BundleError, match="too large"):
        READERS[name](bundle)


def test_f7_a_file_that_readers_would_refuse_is_not_written(bundle):
    config = read_loader_config(bundle)
    before = (bundle / "loader.json").read_bytes()
    inputs = (config.inputs[0]._replace(name="x" * MAX_LOADER_BYTES),)
    with pytest.raises(BundleError, match="too large"):
        write_loader_config(bundle, config._replace(inputs=inputs))
    assert (bundle / "loader.json").read_bytes() == before


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda children: (
        st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=8), children, max_size=3)
    ),
    max_leaves=8,
)


@settings(max_examples=150, suppress_health_check=SUPPRESSED)
@given(data=st.data())
@pytest.mark.attack
def test_whatever_stands_in_a_field_a_reader_answers_with_a_config_or_a_bundle_error(bundle, data):
    name = data.draw(st.sampled_from(sorted(READERS)))
    read = READERS[name]
    original = (bundle / name).read_text()
    document = json.loads(original)
    place = document
    key = data.draw(st.sampled_from(sorted(set(document) - {"self_digest"})))
    while isinstance(place[key], dict | list) and place[key] and data.draw(st.booleans()):
        place = place[key]
        key = data.draw(st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place))))
    place[key] = data.draw(json_values)
    document.pop("self_digest")
    (bundle / name).write_text(json.dumps(document | {"self_digest": digest_json(document)}))
    try:
        assert isinstance(read(bundle), LoaderConfig | Manifest)
    except BundleError:
        pass  # refusing is the other right answer; anything else that is raised fails the test
    finally:
        (bundle / name).write_text(original)
