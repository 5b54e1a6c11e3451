"""Every variant that a machine can run is loaded and asked, not the preferred one alone."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from ortprep.bundle.loader_config import FirstPhase, read_loader_config, write_loader_config
from ortprep.bundle.session_record import SessionOptionsRecord
from ortprep.children import variant_check as checking
from ortprep.children.variant_check import Checked, check_variants
from ortprep.errors import ChildError, LoadError
from tests.runtime.builders import CPU_ONLY, UNMET, rewrite_digests, write_bundle, write_linear

pytestmark = pytest.mark.runtime


def test_each_variant_is_answered_for_by_itself(tmp_path: Path) -> None:
    needs = {"cpu": UNMET, "portable": CPU_ONLY, "spare": CPU_ONLY}
    checked = list(check_variants(write_bundle(tmp_path / "b", requirements=needs)))
    assert [found.variant for found in checked] == ["cpu", "portable", "spare"]
    assert [bool(found.reasons) for found in checked] == [True, False, False]
    assert "expected ONNX Runtime >= 99.0" in str(checked[0])
    assert str(checked[1]) == "variant portable answers the golden sample as recorded"


def test_a_variant_that_no_job_here_would_take_fails_too(tmp_path: Path) -> None:
    bundle = write_bundle(tmp_path / "b", requirements={"cpu": CPU_ONLY, "portable": CPU_ONLY})
    write_linear(bundle / "portable" / "linear_optimized.onnx", np.ones((8, 4), np.float32))
    rewrite_digests(bundle)
    found = check_variants(bundle)
    assert next(found) == Checked("cpu")
    with pytest.raises(LoadError, match=r"'portable' of .* does not answer as recorded"):
        next(found)


def test_a_first_phase_has_to_answer_too(tmp_path: Path) -> None:
    bundle = write_bundle(tmp_path / "b")
    config = read_loader_config(bundle)
    first = FirstPhase(SessionOptionsRecord("NO_SUCH_LEVEL"), config.variants[0].providers)
    variants = (dataclasses.replace(config.variants[0], first_phase=first),)
    write_loader_config(bundle, dataclasses.replace(config, variants=variants))
    with pytest.raises(LoadError, match="NO_SUCH_LEVEL"):
        list(check_variants(bundle))


def test_a_bundle_with_nothing_for_this_machine_fails(tmp_path: Path) -> None:
    found = check_variants(write_bundle(tmp_path / "b", requirements={"cpu": UNMET}))
    assert next(found).reasons
    with pytest.raises(LoadError, match=r"no variant of linear runs on this machine: .*\n  cpu: expected"):
        next(found)


def test_a_variant_whose_process_dies_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def die(*arguments: object, **options: object) -> None:
        raise ChildError("child process died")

    monkeypatch.setattr(checking, "run_child", die)
    with pytest.raises(ChildError, match=r"variant 'cpu' of .*: child process died"):
        list(check_variants(write_bundle(tmp_path / "b")))
