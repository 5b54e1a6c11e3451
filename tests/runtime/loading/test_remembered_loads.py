"""Laws of what is remembered of a load: nothing that changed is taken for what it was."""

import os
import time

import onnxruntime
import pytest

from ortprep.bundle import loader_config
from ortprep.bundle.loader_config import Variant
from ortprep.bundle.session_record import ProviderRecord, SessionOptionsRecord
from ortprep.errors import IntegrityError, LoadError
from ortprep.runtime import load, open_bundle
from ortprep.runtime.loading import resolved_variant, variant_resolver
from ortprep.runtime.loading.variant_resolver import find_invalid_options
from tests.runtime.builders import CPU_ONLY, assert_answers, weights_of, write_bundle, write_linear
from tests.runtime.dropin.builders import run_python

pytestmark = pytest.mark.runtime


@pytest.fixture
def bundle(tmp_path, monkeypatch):
    monkeypatch.setenv("ORTPREP_CACHE_DIR", str(tmp_path / "cache"))
    folder = write_bundle(tmp_path / "b", requirements={"cpu": CPU_ONLY, "portable": CPU_ONLY})
    time.sleep(0.05)  # what changed just now is not remembered
    return folder


@pytest.fixture
def decided(monkeypatch):
    """The folders of the bundles of which it was decided anew what is loaded."""
    folders = []
    resolve = variant_resolver.resolve

    def noted(root, *args):
        folders.append(root)
        return resolve(root, *args)

    monkeypatch.setattr(variant_resolver, "resolve", noted)
    return folders


def entries(bundle):
    return [path for path in (bundle.parent / "cache/loads").rglob("*") if path.is_file()]


def assert_right(bundle, **arguments):
    assert_answers(load(bundle, **arguments))


def test_what_a_memory_would_not_be_believed_is_not_written(bundle, decided):
    options = SessionOptionsRecord("ORT_DISABLE_ALL", {"log_severity_level": 3})
    write_bundle(bundle, options=options)
    time.sleep(0.05)  # what changed just now is not remembered
    for _ in range(2):
        assert load(bundle).get_session_options().log_severity_level == 3
    assert (len(decided), entries(bundle)) == (2, [])


def test_every_request_is_remembered_by_itself(bundle, decided):
    requests = [
        {},
        {"target": "cpu"},
        {"target": "portable"},
        {"precision": "fp32"},
        {"check": "golden"},
        {"device_id": 1},
    ]
    for _ in range(2):
        for request in requests:
            assert open_bundle(bundle, **request).variant.name == request.get("target", "cpu")
    assert len(decided) == len(requests)


@pytest.mark.parametrize("digests", ["full", "off"])
def test_the_other_policies_remember_nothing(bundle, decided, digests):
    for _ in range(2):
        assert_right(bundle, digests=digests)
    assert len(decided) == 2
    assert entries(bundle) == []


@pytest.mark.attack
def test_a_changed_byte_is_found_after_any_number_of_loads(bundle):
    for _ in range(3):
        assert_right(bundle)
    data = bundle / "cpu/linear_optimized.onnx.data"
    status = data.stat()
    data.write_bytes(bytes([data.read_bytes()[0] ^ 1]) + data.read_bytes()[1:])
    os.utime(data, ns=(status.st_atime_ns, status.st_mtime_ns))  # the change time tells all the same
    with pytest.raises(IntegrityError, match="content"):
        load(bundle)


@pytest.mark.attack
def test_a_file_in_the_place_of_another_is_found(bundle, tmp_path):
    assert_right(bundle)
    other = write_bundle(tmp_path / "other", seed=1)
    (other / "cpu/linear_optimized.onnx.data").replace(bundle / "cpu/linear_optimized.onnx.data")
    with pytest.raises(IntegrityError, match="content"):
        load(bundle)


def test_a_bundle_built_anew_is_decided_anew(bundle, decided):
    assert_right(bundle)
    write_bundle(bundle, seed=0, requirements={"portable": CPU_ONLY})
    assert open_bundle(bundle).variant.name == "portable"
    assert len(decided) == 2


CHANGES = {
    "ONNX Runtime's version": lambda patch: patch.setattr(onnxruntime, "__version__", "1.99.0"),
    "its providers": lambda patch: patch.setattr(
        onnxruntime, "get_available_providers", lambda: ["CPUExecutionProvider"] * 2
    ),
    "the processor": lambda patch: patch.setattr(resolved_variant, "read_cpuid", lambda: {0: (1, 2, 3, 4)}),
    "this package": lambda patch: patch.setattr(resolved_variant, "__version__", "99"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_the_decision_depended_on_has_to_be_the_same(bundle, decided, monkeypatch, change):
    assert_right(bundle)
    CHANGES[change](monkeypatch)
    assert_right(bundle)
    assert len(decided) == 2


def test_a_decision_on_a_bundle_that_is_replaced_meanwhile_is_not_remembered(bundle, monkeypatch):
    read = loader_config.read_loader_config

    def read_then_replace(folder):
        config = read(folder)
        monkeypatch.setattr(variant_resolver, "read_loader_config", read)
        write_bundle(bundle, options=SessionOptionsRecord("ORT_DISABLE_ALL", {"intra_op_num_threads": 2}))
        return config

    monkeypatch.setattr(variant_resolver, "read_loader_config", read_then_replace)
    for _ in range(2):
        assert load(bundle).get_session_options().intra_op_num_threads == 2


@pytest.mark.attack
def test_a_memory_of_what_lies_elsewhere_is_not_believed(bundle, decided, tmp_path):
    assert_right(bundle)
    (entry,) = entries(bundle)
    other, _ = write_linear(tmp_path / "other.onnx", weights_of(9))
    text = entry.read_text()
    entry.write_text(text.replace(str(bundle / "cpu/linear_optimized.onnx'"), f"{other}'"))
    assert entry.read_text() != text
    assert_right(bundle)
    assert len(decided) == 2


EVIL = {
    "a file that ONNX Runtime writes": ("{}, {}", "{'optimized_model_filepath': %r}, {}"),
    "a log that it writes": ("{}, {}", "{'enable_profiling': True, 'profile_file_prefix': %r}, {}"),
    "a library that it loads": ("{}, {}", "{}, {'session.custom_library': %r}"),
    "an option of a provider": ("'CPUExecutionProvider', {}", "'CPUExecutionProvider', {'path': %r}"),
    "a provider": ("'CPUExecutionProvider', {}", "'TensorrtExecutionProvider', {}"),
    "a number out of range": ("{}, {}", "{'intra_op_num_threads': 100000}, {}"),
    "a word in place of a number": ("{}, {}", "{}, {'session.disable_prepacking': 'x'}"),
}


@pytest.mark.attack
@pytest.mark.parametrize("kind", EVIL)
def test_an_option_that_no_bundle_may_set_is_not_taken_from_a_memory_either(bundle, decided, tmp_path, kind):
    assert_right(bundle)
    (entry,) = entries(bundle)
    old, new = EVIL[kind]
    changed = entry.read_text().replace(old, new.replace("%r", repr(str(tmp_path / "written"))))
    assert changed != entry.read_text()
    entry.write_text(changed)
    session = load(bundle)
    assert session.get_session_options().intra_op_num_threads == 0
    assert len(decided) == 2
    assert not list(tmp_path.glob("written*"))


def test_what_is_taken_from_a_memory_unasked_is_what_a_bundle_may_set():
    switches = dict.fromkeys(resolved_variant.SWITCHES, "1")
    counts = {name: str(maximum) for name, maximum in resolved_variant.MAX_COUNTS.items()}
    choices = [{name: value} for name, values in resolved_variant.CHOICES.items() for value in values]
    for chosen in (switches, counts, *choices):
        for name, value in chosen.items():
            plain = int(value) if value.isdecimal() else value
            attribute = bool(plain) if name in switches else plain
            possible = (
                variant_with(attributes={name: attribute}),
                variant_with(entries={name: value}),
                variant_with(provider={name: value}),
            )
            assert any(map(resolved_variant.is_usual, possible)), name
            for variant in possible:  # where it may not be set, a bundle is looked at by the table
                assert not resolved_variant.is_usual(variant) or find_invalid_options(variant) == (), variant


def variant_with(attributes=(), entries=(), provider=()):
    options = SessionOptionsRecord("ORT_DISABLE_ALL", dict(attributes), dict(entries))
    providers = (ProviderRecord("CUDAExecutionProvider", dict(provider)),)
    return Variant("cpu", "cpu", "cpu/net.onnx", (), options, providers, CPU_ONLY)


@pytest.mark.parametrize(
    "arguments",
    [{"target": 5}, {"target": ["cpu"]}, {"precision": "a\0b"}, {"precision": "../x"}, {"target": "../x"}],
)
def test_what_names_nothing_is_a_load_error(bundle, arguments):
    with pytest.raises(LoadError):
        load(bundle, **arguments)


JUNK = [b"", b"(", b"None", b"((), ())", b"[" * 60_000, b"\xff", b"(1, 2, 3)", b"x" * 70_000]


@pytest.mark.parametrize("junk", JUNK, ids=range(len(JUNK)))
def test_a_memory_that_is_none_is_not_believed(bundle, decided, junk):
    assert_right(bundle)
    (entry,) = entries(bundle)
    entry.write_bytes(junk)
    assert_right(bundle)
    assert len(decided) == 2
    assert_right(bundle)
    assert len(decided) == 2, "it is remembered again"


@pytest.mark.attack
def test_a_memory_that_others_may_write_to_is_not_believed(bundle, decided):
    assert_right(bundle)
    (entry,) = entries(bundle)
    entry.chmod(0o666)
    assert_right(bundle)
    assert len(decided) == 2


@pytest.mark.parametrize("lacking", ["a cache", "a boot with a name"])
def test_without_a_cache_or_a_name_of_the_boot_nothing_is_remembered(bundle, decided, monkeypatch, lacking):
    if lacking == "a cache":
        monkeypatch.setenv("ORTPREP_CACHE_DIR", os.devnull)
    else:
        monkeypatch.setattr(resolved_variant, "_BOOT_ID", "/no/such/file")
    for _ in range(2):
        assert_right(bundle)
    assert len(decided) == 2


SCRIPT = """
import sys
import numpy, onnxruntime
before = set(sys.modules)
from ortprep.runtime import load
load(sys.argv[1]).run(None, {"x": numpy.zeros((2, 8), numpy.float32)})
print(*sorted(set(sys.modules) - before - set(sys.builtin_module_names)))
"""

LOADS_MODULES = [
    f"ortprep{name}"
    for name in (
        "",
        ".bundle",
        ".bundle.file_memory",
        ".bundle.session_record",
        ".runtime",
        ".runtime.loading",
        ".runtime.loading.bundle_loader",
        ".runtime.loading.load_options",
        ".runtime.loading.opened_bundle",
        ".runtime.loading.resolved_variant",
        ".runtime.loading.session",
        ".runtime.machine",
        ".runtime.machine.processor",
        ".telemetry",
    )
]
"""All that `load` brings in beside what numpy and ONNX Runtime do; each takes 0.1 to 0.6 ms."""


SLOW_MODULES = {"dataclasses", "hashlib", "pathlib", "threading", "ortprep.options"}
"""What would take a first load 0.7 to 4 ms each."""


def modules_of_a_load(bundle):
    done = run_python(SCRIPT, bundle)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_a_load_of_a_bundle_that_is_remembered_brings_in_these_modules_and_no_other(bundle):
    time.sleep(0.05)  # what changed just now is not remembered
    first = modules_of_a_load(bundle)
    assert "ortprep.bundle.loader_config" in first
    assert not SLOW_MODULES & set(first)
    assert modules_of_a_load(bundle) == LOADS_MODULES
