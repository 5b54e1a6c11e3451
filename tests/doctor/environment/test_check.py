"""The whole check on this machine, whatever it is."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from ortprep.bundle.codec import decode
from ortprep.doctor.diagnosis import Diagnosis
from ortprep.doctor.environment.check import describe, diagnose_environment
from ortprep.doctor.environment.facts.records import Facts
from ortprep.runtime.machine.hardware import read_hardware
from tests.doctor.environment.builders import documented_codes

LONGEST_S = 60.0


@pytest.fixture(scope="module")
def diagnosis(tmp_path_factory: pytest.TempPathFactory) -> Diagnosis:
    started = time.monotonic()
    done = diagnose_environment(artifacts=tmp_path_factory.mktemp("artifacts"), expect=["cpu"])
    # Generous: machines that run tests are busy. Alone it takes one to three seconds.
    assert time.monotonic() - started < LONGEST_S
    return done


def test_findings_have_listed_codes_and_the_worst_come_first(diagnosis: Diagnosis) -> None:
    assert {finding.code for finding in diagnosis.findings} <= set(documented_codes())
    order = ["problem", "advice", "note", "ok"]
    ranks = [order.index(finding.severity) for finding in diagnosis.findings]
    assert ranks == sorted(ranks)


def test_the_cpu_is_usable_here(diagnosis: Diagnosis) -> None:
    texts = [finding.text for finding in diagnosis.findings if finding.code == "provider-usable"]
    assert any(text.startswith("CPU:") for text in texts)


def test_figures_are_json_from_which_the_same_is_found_elsewhere(diagnosis: Diagnosis) -> None:
    facts = decode(Facts, json.loads(json.dumps(diagnosis.figures)))
    assert describe(facts, expect=["cpu"]) == diagnosis


def test_tables_are_complete_and_their_rows_fit(diagnosis: Diagnosis) -> None:
    assert {"ONNX Runtime", "Machine"} <= {table.title for table in diagnosis.tables}
    for table in diagnosis.tables:
        assert {len(row) for row in table.rows} == {len(table.columns)}


@pytest.mark.skipif(bool(read_hardware().gpus), reason="this machine has a GPU")
def test_a_session_without_gpu_that_is_asked_for_cuda_is_a_problem(tmp_path: Path) -> None:
    found = diagnose_environment(artifacts=tmp_path, expect=["cuda"]).findings
    problems = {finding.code for finding in found if finding.severity == "problem"}
    assert problems & {"provider-unusable", "provider-not-in-wheel"}
    assert problems & {"no-gpu", "gpu-without-driver", "gpus-hidden"}
