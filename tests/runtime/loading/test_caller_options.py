"""Laws of an application's own session options beside a bundle's."""

import logging

import onnxruntime
import pytest

from ortprep.bundle.session_record import SessionOptionsRecord
from ortprep.errors import LoadError
from ortprep.runtime import load, wait_steady
from tests.runtime.builders import assert_answers, write_bundle

pytestmark = pytest.mark.runtime

SPINNING, PREPACKING = "session.intra_op.allow_spinning", "session.disable_prepacking"
MODEL = "cpu/linear_optimized.onnx"
OWN = SessionOptionsRecord("ORT_DISABLE_ALL", {"intra_op_num_threads": 2}, {PREPACKING: "1"})


@pytest.fixture
def bundle(tmp_path):
    return write_bundle(tmp_path / "b", options=OWN, first=OWN)


def as_mapping(chosen):
    return chosen


def as_object(chosen):
    options = onnxruntime.SessionOptions()
    for name, value in chosen.items():
        if "." in name:
            options.add_session_config_entry(name, value)
        else:
            setattr(options, name, value)
    return options


FORMS = {"mapping": as_mapping, "object": as_object}


@pytest.mark.parametrize("form", FORMS)
def test_the_callers_values_win_in_both_phases_and_the_bundle_adds_what_they_leave(tmp_path, form):
    one_thread = SessionOptionsRecord(
        "ORT_DISABLE_ALL", {"intra_op_num_threads": 1, "enable_mem_pattern": False}
    )
    bundle = write_bundle(tmp_path / "phases", options=OWN, first=one_thread)
    chosen = {"enable_cpu_mem_arena": False, "log_severity_level": 3, SPINNING: "0"}
    given = FORMS[form](chosen)
    session = load(bundle, session_options=given)
    if form == "object":
        given.log_severity_level = 1  # later than the load, so it does not count
    assert_answers(session)
    wait_steady(session, 60)
    options = session.get_session_options()
    assert options.enable_mem_pattern is True
    assert options.enable_cpu_mem_arena is False
    assert options.log_severity_level == 3
    assert options.get_session_config_entry(SPINNING) == "0"
    assert options.intra_op_num_threads == 2
    assert options.get_session_config_entry(PREPACKING) == "1"
    assert options.graph_optimization_level == onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL


@pytest.mark.parametrize("form", FORMS)
def test_a_contradiction_is_logged_once(bundle, form, caplog):
    with caplog.at_level(logging.WARNING, logger="ortprep"):
        for _ in range(3):
            chosen = {"intra_op_num_threads": 1, PREPACKING: "0"}
            session = load(bundle, session_options=FORMS[form](chosen))
    assert session.get_session_options().intra_op_num_threads == 1
    assert session.get_session_options().get_session_config_entry(PREPACKING) == "0"
    (record,) = caplog.records
    message = record.getMessage()
    assert "intra_op_num_threads=1 instead of 2" in message
    assert f"{PREPACKING}='0' instead of '1'" in message


def test_an_object_is_left_as_it_is_and_serves_for_several_bundles(bundle, tmp_path, caplog):
    other = SessionOptionsRecord("ORT_ENABLE_BASIC", {"intra_op_num_threads": 1}, {PREPACKING: "0"})
    options = as_object({"enable_cpu_mem_arena": False})
    with caplog.at_level(logging.WARNING, logger="ortprep"):
        for folder, threads, prepacking in (
            (bundle, 2, "1"),
            (write_bundle(tmp_path / "other", options=other), 1, "0"),
            (bundle, 2, "1"),
        ):
            made = load(folder, session_options=options, timeout_s=600).get_session_options()
            assert (made.intra_op_num_threads, made.enable_cpu_mem_arena) == (threads, False)
            assert made.get_session_config_entry(PREPACKING) == prepacking
            assert options.intra_op_num_threads == 0
            assert options.graph_optimization_level == onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
            with pytest.raises(RuntimeError):
                options.get_session_config_entry(PREPACKING)
    assert caplog.records == []
    assert_answers(onnxruntime.InferenceSession(str(bundle / MODEL), options))


@pytest.mark.parametrize("given", [{"enable_arena": True}, {1: 2}, 3, ["intra_op_num_threads"]])
def test_what_is_no_option_is_an_error_that_names_those_there_are(bundle, given):
    with pytest.raises(LoadError, match="bad argument of load: session_options") as caught:
        load(bundle, session_options=given)
    assert "attribute" in str(caught.value)


def test_another_level_is_logged_and_not_taken(bundle, caplog):
    with caplog.at_level(logging.WARNING, logger="ortprep"):
        session = load(bundle, session_options={"graph_optimization_level": "ORT_ENABLE_BASIC"})
    level = session.get_session_options().graph_optimization_level
    assert level == onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    assert "graph_optimization_level stays ORT_DISABLE_ALL, not ORT_ENABLE_BASIC" in caplog.text
