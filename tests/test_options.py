"""Laws of the table of options, and what of it the installed ONNX Runtime confirms."""

import re
import time
from functools import cache
from importlib import util
from pathlib import Path

import pytest

from ortprep.bundle.loader_config import Requirements, Variant, VersionRange
from ortprep.bundle.session_record import ProviderRecord, SessionOptionsRecord
from ortprep.errors import SpecError
from ortprep.options import NEWEST, OLDEST, check_options, format_option, known_options
from ortprep.options.option import version_parts
from ortprep.runtime.loading.session import CPU, CUDA
from ortprep.runtime.loading.variant_resolver import find_invalid_options
from ortprep.versions import upgrade_command
from tests.runtime.builders import add_model

pytestmark = pytest.mark.runtime

SESSION = known_options("session", NEWEST)
EVERY = (*SESSION, *known_options(CUDA, NEWEST), *known_options("attribute", NEWEST))
SETTABLE = tuple(option for option in SESSION if option.owner is None)


JUNK = {"switch": "true", "integer": "7.5", "number": "much", "choice": "banana"}


# The tables


def test_every_default_that_is_a_value_is_accepted():
    for option in EVERY:
        value = re.match(r"(-?[\d.]+|[A-Z]\w*|k[A-Z]\w+)(:|$)", option.default)
        if option.kind == "switch":
            assert option.default[0] in "01" or option.default == "built in", option
        elif value is not None:
            assert option.accepts(value[1]), option


VALUES = ("1", "2", "1048576", "0.5", "gpu(a)", "x:[1]", "a:b=1")


def test_f18_a_bundle_may_set_what_a_spec_may_and_nothing_else():
    for option in EVERY:
        assert may_be_set(option) == (option.owner is None or option.name == "device_id"), option


def may_be_set(option):
    """Says whether a bundle may have an option, set to a value that it accepts."""
    value = next(text for text in (*option.values, *VALUES) if option.accepts(text))
    chosen = {option.name: value}
    record = SessionOptionsRecord(
        "ORT_DISABLE_ALL",
        chosen if option in known_options("attribute", NEWEST) else {},
        chosen if option in SESSION else {},
    )
    provider = ProviderRecord(CUDA, chosen if option in known_options(CUDA, NEWEST) else {})
    return find_invalid_options(variant_with(record, provider)) == ()


def variant_with(options, *providers):
    needed = Requirements(VersionRange("1.23"), tuple(provider.name for provider in providers))
    return Variant("v", "cuda", "m.onnx", (), options, providers, needed)


@pytest.mark.attack
@pytest.mark.parametrize(
    ("attributes", "entries", "said"),
    [
        ({"optimized_model_filepath": "/x"}, {}, "must not be set"),
        ({"intra_op_num_threads": 100_000}, {}, "bad value"),
        ({"intra_op_num_threads": -5}, {}, "bad value"),
        ({"inter_op_num_threads": 4097}, {}, "bad value"),
        ({"intra_op_num_threads": "many"}, {}, "bad value"),
        ({"execution_mode": "ORT_SIDEWAYS"}, {}, "bad value"),
        ({"enable_mem_pattern": 2}, {}, "bad value"),
        ({"log_severity_level": 0}, {}, "bad value"),
        ({}, {"ep.context_enable": "x"}, "must not be set"),
        ({}, {"ep.context_file_path": "x"}, "must not be set"),
        ({}, {"session.collect_node_memory_stats_to_file": "x"}, "must not be set"),
        ({}, {"session.debug_layout_transformation": "x"}, "must not be set"),
        ({}, {"session.model_external_initializers_file_folder_path": "x"}, "must not be set"),
        ({}, {"session.node_partition_config_file": "x"}, "must not be set"),
        ({}, {"session.optimized_model_filepath": "x"}, "must not be set"),
        ({}, {"session.some_later_version_writes_to.path": "x"}, "unknown"),
        ({}, {"mlas.kleidiai.conv_igemm_max_work": "banana"}, "bad value"),  # ends the process
        ({}, {"session.intra_op.allow_spinning": "perhaps"}, "bad value"),
        ({}, {"": "1"}, "unknown"),
        ({}, {"k" * 5000: "1"}, "unknown"),
        ({}, {"session.x": "1" * 50_000}, "unknown"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_f18_what_a_session_of_a_bundle_may_not_have_is_named(attributes, entries, said):
    options = SessionOptionsRecord("ORT_DISABLE_ALL", attributes, entries)
    (problem,) = find_invalid_options(variant_with(options, ProviderRecord(CPU)))
    assert said in problem
    (name,) = {**attributes, **entries}
    assert repr(name[:60]) in problem


@pytest.mark.attack
@pytest.mark.parametrize(
    ("provider", "option"),
    [
        (CUDA, "gpu_external_alloc"),
        (CUDA, "user_compute_stream"),
        ("TensorrtExecutionProvider", "trt_extra_plugin_lib_paths"),
        ("QNNExecutionProvider", "backend_path"),
    ],
)
def test_f18_a_provider_option_with_an_address_or_a_library_is_refused(provider, option):
    plain = SessionOptionsRecord("ORT_DISABLE_ALL")
    problems = find_invalid_options(variant_with(plain, ProviderRecord(provider, {option: "1"})))
    assert any(
        one.startswith((f"{provider} option '{option}' must", f"{provider} option '{option}' is unknown"))
        for one in problems
    )


# What is reported


def test_every_key_that_a_user_may_set_takes_its_kind_and_refuses_junk():
    for option in SETTABLE:
        if option.kind in JUNK:
            (problem,) = check_options("session", {option.name: JUNK[option.kind]}, version=NEWEST)
            assert f"expected {option.expected}" in problem
            assert JUNK[option.kind] in problem
        good = {
            "switch": True,
            "integer": option.minimum or 4,
            "number": 0.5,
            "choice": (option.values or ("",))[-1],
        }
        if option.kind in good:
            assert check_options("session", {option.name: good[option.kind]}, version=NEWEST) == (), option


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
def test_an_unknown_key_is_reported_with_the_nearest_known_one(version):
    (problem,) = check_options("session", {"session.disable_prepaking": 1}, version=version)
    assert "unknown" in problem
    assert version in problem
    assert "did you mean 'session.disable_prepacking'?" in problem


def test_a_key_newer_than_the_version_is_reported_with_the_version_that_brings_it():
    (problem,) = check_options("session", {"session.prepack.enable_parallel": "1"}, version="1.30.0")
    assert "came with ONNX Runtime 1.31" in problem
    assert "1.30.0" in problem
    (problem,) = check_options(CUDA, {"external_data_loader_reading_threads": 4}, version="1.23.2")
    assert "came with ONNX Runtime 1.31" in problem


def test_a_version_newer_than_the_table_keeps_every_known_key():
    assert check_options("session", {"session.prepack.enable_parallel": True}, version="1.40.0") == ()
    (problem,) = check_options("session", {"session.prepack.enable_parallel": "yes"}, version="1.40.0")
    assert "expected 0 or 1" in problem


@pytest.mark.attack
@pytest.mark.parametrize("value", [1, "auto", "/etc/passwd", "140028371632128", "", "1;2"])
def test_an_unknown_option_of_a_version_newer_than_the_table_is_refused_with_the_way_to_upgrade(value):
    (problem,) = check_options("session", {"session.from_the_future": value}, version="1.40.0")
    assert f"unknown to every ONNX Runtime up to {NEWEST}" in problem
    assert f"upgrade ortprep: {upgrade_command()}" in problem
    (problem,) = check_options(CUDA, {"from_the_future": value}, version="1.40.0")
    assert "upgrade ortprep" in problem


@pytest.mark.parametrize(
    ("key", "good", "bad"),
    [
        ("session.intra_op_thread_affinities", "1,2;3-4", "0;1"),
        ("session.intra_op.spin_backoff_max", "64", "0"),
        ("session.qdq_matmulnbits_block_size", "-1", "-2"),
        ("session.max_shape_override", "ids:[8,4096];mask:[8, 4096]", "ids:[0]"),
        ("session.name_based_layer_assignment", "gpu(layers.0,layers.1);cpu(embed)", "gpu"),
        ("session.moe_expert_counter_alpha", "0.9", "nan"),
        ("optimization.minimal_build_optimizations", "", "1"),
        ("ep.cuda.fpa_intb_profile_m", "1,64,2048", "1,,2"),
        ("mlas.kleidiai.conv_igemm_max_work", "0", "-7"),
        ("session.dynamic_block_base", "4", "٤"),
        ("session.external_data_loader.threads", "64", "65"),
        ("session.external_data_loader.chunk_bytes", "8192", "8193"),
        ("session.external_data_loader.pinned_memory_bytes", "1048576", "1052672"),
        ("session.kernel_dispatch_policy", "", "fast"),
        ("session.moe.offload.device_expert_bytes", "auto", "much"),
        ("session.moe.offload.node_overrides", "a:max_resident_slots=8;b:device_expert_bytes=4", "a"),
    ],
)
def test_values_are_held_to_their_form(key, good, bad):
    assert check_options("session", {key: good}, version=NEWEST) == ()
    (problem,) = check_options("session", {key: bad}, version=NEWEST)
    assert "bad value" in problem


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("cudnn_conv_algo_search", "HEURISTIC", "heuristic"),
        ("arena_extend_strategy", "kSameAsRequested", "1"),
        ("gpu_mem_limit", 2**34, 0),
        ("external_data_loader_reading_threads", 64, 65),
        ("use_tf32", False, "no"),
    ],
)
def test_cuda_options_are_held_to_their_form(name, good, bad):
    assert check_options(CUDA, {name: good}, version=NEWEST) == ()
    (problem,) = check_options(CUDA, {name: bad}, version=NEWEST)
    assert "bad value" in problem


@pytest.mark.parametrize("piece", ["a", " ", "a:", "a(", "1,", "1-", "a(b);", "a:[1];"])
def test_a_hostile_value_is_judged_in_time_and_told_in_short(piece):
    # A pattern that backtracks without bound would not come back from these in a lifetime.
    for option in SETTABLE:
        problems = check_options("session", {option.name: piece * 2000 + "!"}, version=NEWEST)
        assert all(len(problem) < 400 for problem in problems), option


@pytest.mark.parametrize("version", ["", "latest", "v1.31"])
def test_a_version_without_numbers_is_refused(version):
    with pytest.raises(SpecError, match="not a version"):
        check_options("session", {}, version=version)


@pytest.mark.parametrize(
    ("value", "text"), [(True, "1"), (False, "0"), (4, "4"), (0.5, "0.5"), ("HEURISTIC", "HEURISTIC")]
)
def test_scalars_become_the_strings_onnxruntime_takes(value, text):
    assert format_option(value) == text


# What the installed ONNX Runtime says to it


@cache
def read_installed():
    """Returns the module and the bytes of its compiled part."""
    onnxruntime = pytest.importorskip("onnxruntime")
    found = util.find_spec("onnxruntime.capi.onnxruntime_pybind11_state")
    return onnxruntime, Path(found.origin).read_bytes()


def literal_pieces(name, names):
    """Returns what a compiler may leave of a literal: all of it, or its first 32 or 16 bytes as one constant.

    Pieces that another name starts with too prove nothing and are left out.
    """
    starts = (name[:length] for length in (32, 16) if len(name) > length)
    own = (start for start in starts if sum(other.startswith(start) for other in names) == 1)
    return tuple(piece.encode() for piece in (name, *own))


def test_every_listed_key_is_in_the_installed_onnxruntime():
    onnxruntime, binary = read_installed()
    names = {option.name for option in SESSION}
    elsewhere = ("ep.cuda.", "mlas.enable_gemm_fastmath_arm64_bfloat16")  # CUDA's provider, Arm
    for option in known_options("session", onnxruntime.__version__):
        if option.owner is None and not option.name.startswith(elsewhere):
            assert any(piece in binary for piece in literal_pieces(option.name, names)), option.name


def test_every_key_in_the_installed_onnxruntime_is_listed():
    onnxruntime, binary = read_installed()
    version = onnxruntime.__version__
    if version_parts(version) > version_parts(NEWEST):
        pytest.skip(f"the table ends at {NEWEST}; this is {version}")
    keys = {
        key.decode()
        for key in re.findall(rb"\0((?:session|optimization|mlas)\.[a-z0-9_.]*[a-z0-9_])(?=\0)", binary)
    }
    listed = {option.name for option in known_options("session", version)}
    pieces = {name[: 16 * count] for name in listed for count in range(1, len(name) // 16 + 1)}
    assert len(keys) > 30
    assert keys <= listed | pieces


def test_every_listed_attribute_is_one_of_the_installed_onnxruntime_and_no_other_is():
    onnxruntime, _ = read_installed()
    there = {
        name
        for name in dir(onnxruntime.SessionOptions)
        if not name.startswith("_") and not callable(getattr(onnxruntime.SessionOptions, name))
    }
    assert there == {option.name for option in known_options("attribute", onnxruntime.__version__)}


def test_every_choice_of_an_enumerated_attribute_is_a_member():
    onnxruntime, _ = read_installed()
    options = onnxruntime.SessionOptions()
    for option in known_options("attribute", onnxruntime.__version__):
        if option.kind == "choice":
            members = type(getattr(options, option.name)).__members__
            assert set(option.values) <= set(members)


CHECKED_BY_ONNXRUNTIME = tuple(
    option
    for option in SETTABLE
    if option.name.startswith(("session.external_data_loader.", "session.moe.offload."))
    and option.kind in ("integer", "number", "choice")
)


def takes(model, name, value):
    """Says whether ONNX Runtime makes a session with an entry."""
    onnxruntime, _ = read_installed()
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.add_session_config_entry(name, str(value))
    try:
        onnxruntime.InferenceSession(model, options, providers=[CPU])
    except onnxruntime.capi.onnxruntime_pybind11_state.InvalidArgument:
        return False
    return True


@pytest.mark.parametrize("option", CHECKED_BY_ONNXRUNTIME, ids=lambda option: option.name)
def test_onnxruntime_takes_and_refuses_the_values_that_the_table_does(option):
    onnxruntime, _ = read_installed()
    if not option.exists_in(onnxruntime.__version__):
        pytest.skip(f"came with ONNX Runtime {option.since}")
    model, step = add_model(), option.multiple or 1
    good = [*option.values, *(x for x in (option.minimum, option.maximum) if x is not None)]
    bad = ["banana", -1]
    if option.maximum is not None and option.maximum < 2**62:
        bad.append(option.maximum + step)
    if option.multiple is not None and option.minimum is not None:
        bad.append(option.minimum + 1)
    assert [value for value in good if not takes(model, option.name, value)] == []
    assert [value for value in bad if takes(model, option.name, value)] == []


@pytest.mark.attack
def test_a_file_of_unknown_options_takes_no_long_check_and_makes_no_long_message():
    """25 KB of them took 5.5 s, since each one was compared with all that there are."""
    entries = {f"session.intra_op{number:x}": "" for number in range(50_000)}
    started = time.perf_counter()
    problems = check_options("session", entries, version=NEWEST)
    assert len(problems) == 20
    assert time.perf_counter() - started < 5
