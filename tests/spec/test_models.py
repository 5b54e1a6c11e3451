"""Laws of specs as values: frozen, recorded without secrets, and never an error of another kind."""

import copy
import json
import math
import pickle
import time

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ortprep.bundle.codec import canonical_json
from ortprep.errors import SpecError
from ortprep.options import known_options
from ortprep.spec.conversion import GateSpec
from ortprep.spec.models import ModelSpec, SourceSpec, resolved_spec, spec_schema
from ortprep.spec.validation import known_keys, parse_spec

FULL = {
    "name": "m",
    "source": {"url": "hf://org/repo/x.onnx", "sha256": "A" * 64},
    "inputs": {"x": {"shapes": [[1, 3], [8, 3]], "range": [0, 1]}, "y": {"values": ["a", 1, 0.5, True]}},
    "samples": "samples/*.npz",
    "targets": ["cpu", "cuda"],
    "optimize": {"level": "extended", "timeout_s": 60},
    "runtime": {"intra_op_num_threads": 4, "session_config": {"a": "1"}, "cuda": {"use_tf32": False}},
    "verify": {"rtol": 1, "atol": 0, "seed": 3, "outputs": {"z": {"rtol": 0.1, "atol": 0.2}}},
    "measure": {"rounds": 9, "cold_rounds": 0, "steady_s": 1, "timeout_s": 5},
}


def test_a_spec_survives_copying_and_pickling():
    spec = parse_spec(FULL)
    for twin in (parse_spec(FULL), copy.deepcopy(spec), pickle.loads(pickle.dumps(spec))):
        assert twin == spec


def test_a_digest_reads_the_same_however_it_was_written():
    written = ["ab" * 32, "AB" * 32, "sha256:" + "ab" * 32]
    assert {SourceSpec(path="x", sha256=digest).sha256 for digest in written} == {"sha256:" + "ab" * 32}


def test_a_recorded_spec_reads_back_as_the_same_spec():
    spec = parse_spec(FULL)
    assert parse_spec(json.loads(canonical_json(resolved_spec(spec)))) == spec


def test_every_attribute_that_a_user_may_set_is_a_key_of_runtime_with_the_table_s_values():
    junk = {"switch": 2, "integer": -2, "choice": "ORT_SIDEWAYS", "text": "a\x1b[2J"}
    good = {"switch": False, "integer": 2, "text": "mine"}
    for option in known_options("attribute", "1.31.1"):
        sound = option.values[-1] if option.values else good[option.kind]
        document = {"name": "m", "source": {"path": "x"}, "runtime": {option.name: sound}}
        if option.owner is not None:
            with pytest.raises(SpecError, match=f"runtime.{option.name}: unknown key"):
                parse_spec(document)
            continue
        assert parse_spec(document).runtime.attributes == {option.name: sound}
        with pytest.raises(SpecError, match=f"runtime.{option.name}: expected"):
            parse_spec({**document, "runtime": {option.name: junk[option.kind]}})


_JSON = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(),
        st.text(max_size=8),
        st.sampled_from(["cpu", "auto", "http://u:p@h/x", "..", "10" * 3000, 10**400, 1e300, math.inf]),
    ),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


def _sections():
    """Mappings whose keys are mostly those of specs, and whose values are anything."""
    known = {
        key: st.dictionaries(st.sampled_from(known_keys((key,)) or ("x",)), _JSON, max_size=3) | _JSON
        for key in known_keys(())
    }
    return st.fixed_dictionaries({}, optional=known).flatmap(
        lambda some: st.dictionaries(st.text(max_size=5), _JSON, max_size=2).map(
            lambda more: FULL | some | more
        )
    )


@given(_sections() | st.dictionaries(st.text(max_size=5), _JSON))
def test_any_mapping_is_a_spec_or_a_spec_error_and_never_another(data):
    try:
        spec = parse_spec(data, onnxruntime="1.23.2")
    except SpecError:
        return
    assert isinstance(spec, ModelSpec)
    canonical_json(resolved_spec(spec))


@pytest.mark.attack
@given(st.sampled_from(["inputs", "verify", "runtime"]), st.integers(1, 5000))
def test_depth_is_never_more_than_a_spec_error(key, depth):
    value = {}
    for _ in range(depth):
        value = {"a": value}
    with pytest.raises(SpecError):
        parse_spec({"name": "m", "source": {"path": "x"}, key: value, "bogus": 1})


@pytest.mark.attack
def test_a_spec_has_a_bounded_number_of_shapes():
    model = {"name": "m", "source": {"path": "x"}}
    inputs = {f"x{number}": {"shapes": [[1]]} for number in range(999)}
    many = {"shapes": [[size] for size in range(1, 1002)]}
    for refused in ({"x": many}, inputs | {"y": {}, "z": {}}):
        with pytest.raises(SpecError, match="at most 1000"):
            parse_spec(model | {"inputs": refused})
    begun_s = time.process_time()
    parse_spec(model | {"inputs": inputs | {"x": {"shapes": many["shapes"][1:]}}})
    assert time.process_time() - begun_s < 0.5


def test_an_output_s_thresholds_change_the_common_ones_and_none_stands_for_no_threshold():
    gate = GateSpec.model_validate(
        {"snr_db": 9.0, "top1": 0.9, "outputs": {"y": {"snr_db": None, "max_abs": 1.0}, "z": {"top1": 0.8}}}
    )
    common = {"snr_db": 9.0, "top1": 0.9}
    own = {"max_abs": 1.0, "top1": 0.9}
    assert gate.thresholds() == {"": common, "y": own, "z": common | {"top1": 0.8}}
    assert gate.thresholds(of_all=False)["y"] == {"max_abs": 1.0}


# -- what a spec says of automatic precision, and of the application that judges it


def convert(**section):
    spec = parse_spec({"name": "net", "source": {"path": "net.onnx"}, "convert": section})
    return spec.convert


def test_auto_tries_what_a_target_can_run_faster_and_steps_down_to_fp32():
    section = convert(precision="auto")
    assert section.precisions("cpu") == ("int8",)
    assert section.precisions("cuda") == ("fp16",)
    assert section.steps_below == ("fp32",)
    assert convert(precision="int8").steps_below == ()
    assert convert(precision="auto", ladder=["bf16", "fp32"]).steps_below == ("bf16", "fp32")


def test_a_judge_replaces_the_default_thresholds_and_no_others():
    judge = {"run": ["python", "app.py"]}
    assert convert(precision="auto").thresholds() == {"": {"snr_db": 20.0}}
    assert convert(precision="auto", judge=judge).thresholds() == {"": {}}
    gate = {"top1": 0.9, "outputs": {"y": {"max_abs": 2.0}}}
    own = convert(precision="auto", judge=judge, gate=gate).thresholds()
    assert own == {"": {"top1": 0.9}, "y": {"max_abs": 2.0, "top1": 0.9}}


@pytest.mark.parametrize(
    "judge",
    [
        {},
        {"run": []},
        {"run": [""]},
        {"run": ["app", "a\0b"]},
        {"run": ["app"], "min_agreement": 1.1},
        {"run": ["app"], "timeout_s": 0},
        {"run": ["app"], "compare": ""},
        {"run": ["app"], "speed": 2},
    ],
)
def test_a_judge_that_cannot_be_is_refused(judge):
    with pytest.raises(SpecError):
        convert(precision="auto", judge=judge)


# -- laws of the JSON Schema


def test_what_the_schema_takes_and_refuses_is_what_the_reader_does():
    validator = jsonschema.Draft202012Validator(spec_schema())
    assert validator.is_valid(FULL)
    wrong = [
        FULL | {"name": "a/b"},
        FULL | {"source": {"path": "a", "url": "https://b/c"}},
        FULL | {"targets": ["tpu"]},
        FULL | {"verify": {"rtl": 1}},
        {"name": "x"},
    ]
    assert not any(validator.is_valid(data) for data in wrong)
