"""Worker of `backend_suite`: runs cases of the ONNX backend test suite through optimize → reload → compare.

    python -m bench.backend_case FIRST STEP EVERY

checks cases FIRST, FIRST + STEP, … of every EVERY-th case of the suite. It prints a JSON line before and
after each case, so that a crash can be attributed to its case.
"""

from __future__ import annotations

import json
import sys
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import numpy_helper

from ortprep.bundle.loader_config import Tolerance
from ortprep.bundle.session_record import ProviderRecord, SessionPlan
from ortprep.errors import PipelineError, StageError
from ortprep.runtime.loading.session import CPU, build_session, default_plan, onnxruntime_errors
from ortprep.runtime.tensors.arrays import run_session, to_storable
from ortprep.runtime.tensors.compare import compare_output
from ortprep.runtime.tensors.element_types import BFLOAT16
from ortprep.spec.models import RuntimeSpec
from ortprep.stages.optimize.graph_writer import SaveRequest, save_optimized
from ortprep.stages.optimize.session_plans import Step, loading_options, plan_steps, saving_plan

EQUAL, NOT_RUN, DIFFERENT, CRASHED = "equal", "not run", "different", "crashed"

RUNTIME = RuntimeSpec()
IR_VERSION = 10
"""Every supported ONNX Runtime reads it."""

CPU_ONLY = (ProviderRecord(CPU),)
Value = Any
"""An array, a list of values (a sequence), or None (an empty optional)."""


@dataclass(frozen=True)
class Verdict:
    """Result of one case.

    Attributes:
        case: Its name in the suite.
        outcome: `equal`; `not run` (ONNX Runtime itself does not give the expected answer from the source);
            `different` (the optimised model answers otherwise); `crashed` (the process died).
        detail: Why; for an equal case, why the steps above `step` did not hold.
        step: Step of the optimisation ladder that held, "" if it was not come to that.
    """

    case: str
    outcome: str
    detail: str = ""
    step: str = ""


@dataclass(frozen=True)
class DataSet:
    """Inputs by name and the outputs that belong to them, flattened as `run_session` flattens them."""

    feeds: Mapping[str, Value]
    expected: Mapping[str, np.ndarray[Any, Any]]


def load_cases() -> list[Any]:
    """Returns the suite's node and simple cases, sorted by name; the node cases are computed on the fly."""
    from onnx.backend.test.loader import load_model_tests

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # cases about infinities divide by zero to get them
        cases = [*load_model_tests(kind="node"), *load_model_tests(kind="simple")]
    return sorted(cases, key=lambda case: str(case.name))


def check_case(case: Any, folder: Path) -> Verdict:
    """Runs a case with ONNX Runtime alone, then the optimize stage's output."""
    model = _model_of(case)
    source = folder / "model.onnx"
    onnx.save(model, str(source))
    tolerance = Tolerance(case.rtol, case.atol)
    try:
        data_sets = list(_data_sets(case, model))
        problem = _first_problem(default_plan(str(source)), data_sets, tolerance)
    except _failures() as error:
        return Verdict(case.name, NOT_RUN, _one_line(error))
    if problem:
        return Verdict(case.name, NOT_RUN, problem)
    return _walk_ladder(case.name, source, data_sets, tolerance)


def _walk_ladder(name: str, source: Path, data_sets: Sequence[DataSet], tolerance: Tolerance) -> Verdict:
    """Goes down the ladder as the optimize stage does; the first that passes is judged by its answers."""
    refusals: list[str] = []
    for step in plan_steps("cpu", level="all"):
        try:
            problem = _first_problem(_write(source, source.parent / step.name, step), data_sets, tolerance)
        except _failures() as error:
            refusals.append(f"{step.name}: {_one_line(error)}")
            continue
        return Verdict(name, DIFFERENT if problem else EQUAL, problem or "; ".join(refusals), step.name)
    return Verdict(name, DIFFERENT, "; ".join(refusals))


def _write(source: Path, folder: Path, step: Step) -> SessionPlan:
    """Writes one step's files as the optimize stage does, and returns how a job loads them."""
    if step.level is None:
        return SessionPlan(str(source), loading_options(RUNTIME, level="ORT_ENABLE_ALL"), CPU_ONLY)
    folder.mkdir()
    model = folder / "model.onnx"
    declared = onnx.load(str(source))
    weights = {tensor.name for tensor in declared.graph.initializer}
    inputs = tuple(value.name for value in declared.graph.input if value.name not in weights)
    plan = saving_plan(RUNTIME, "cpu", step, source=source, model=model)
    save_optimized(SaveRequest(model, plan, "cpu", inputs))
    return SessionPlan(str(model), loading_options(RUNTIME, level="ORT_DISABLE_ALL"), CPU_ONLY)


def _failures() -> tuple[type[Exception], ...]:
    return (PipelineError, *onnxruntime_errors())


def _model_of(case: Any) -> onnx.ModelProto:
    model = case.model if case.model is not None else onnx.load(str(Path(case.model_dir) / "model.onnx"))
    # The suite stamps the newest version on models that need nothing of it; most would be refused for that.
    model.ir_version = min(model.ir_version, IR_VERSION)
    return model


def _data_sets(case: Any, model: onnx.ModelProto) -> Iterator[DataSet]:
    inputs = [value.name for value in model.graph.input]
    outputs = [value.name for value in model.graph.output]
    pairs = case.data_sets if case.data_sets is not None else _read_data_sets(Path(case.model_dir), model)
    for given, expected in pairs:
        # Trailing inputs that have an initializer may be left out.
        feeds = {
            name: _to_feed(value) for name, value in zip(inputs, given, strict=False) if value is not None
        }
        yield DataSet(feeds, _flatten_all(outputs, expected))


def _read_data_sets(folder: Path, model: onnx.ModelProto) -> Iterator[tuple[list[Value], list[Value]]]:
    for data in sorted(folder.glob("test_data_set_*")):
        yield (
            _read_values(data, "input", model.graph.input),
            _read_values(data, "output", model.graph.output),
        )


def _read_values(folder: Path, kind: str, declared: Iterable[onnx.ValueInfoProto]) -> list[Value]:
    paths = ((folder / f"{kind}_{i}.pb", value) for i, value in enumerate(declared))
    return [_read_value(path, value) for path, value in paths if path.exists()]


def _read_value(path: Path, declared: onnx.ValueInfoProto) -> Value:
    kind = declared.type.WhichOneof("value")
    if kind == "sequence_type":
        return numpy_helper.to_list(onnx.SequenceProto.FromString(path.read_bytes()))
    if kind == "optional_type":
        return numpy_helper.to_optional(onnx.OptionalProto.FromString(path.read_bytes()))
    return numpy_helper.to_array(onnx.TensorProto.FromString(path.read_bytes()))


def _to_feed(value: Value) -> Value:
    if isinstance(value, list | tuple):
        return [_to_feed(item) for item in value]
    return _to_array(value)


def _to_array(value: Value) -> np.ndarray[Any, Any]:
    """Returns an array in this package's form: bfloat16 is a structured integer."""
    array = np.asarray(numpy_helper.to_array(value) if isinstance(value, onnx.TensorProto) else value)
    return array.view(BFLOAT16) if array.dtype.name == "bfloat16" else array


def _flatten_all(names: Sequence[str], values: Sequence[Value]) -> dict[str, np.ndarray[Any, Any]]:
    return dict(item for name, value in zip(names, values, strict=True) for item in _flatten(name, value))


def _flatten(name: str, value: Value) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    if isinstance(value, list | tuple):
        for position, item in enumerate(value):
            yield from _flatten(f"{name}[{position}]", item)
    elif value is not None:
        yield name, to_storable(_to_array(value), name=name)


def _first_problem(plan: SessionPlan, data_sets: Sequence[DataSet], tolerance: Tolerance) -> str:
    session = build_session(plan)
    for data in data_sets:
        got = _run(session, data.feeds)
        if got.keys() != data.expected.keys():
            return f"expected outputs {list(data.expected)}, got {list(got)}"
        for name, expected in data.expected.items():
            result = compare_output(expected, got[name], tolerance, name=name)
            if not result.ok:
                return f"{name}: {result.reason}"
    return ""


def _run(
    session: onnxruntime.InferenceSession, feeds: Mapping[str, Value]
) -> Mapping[str, np.ndarray[Any, Any]]:
    if all(isinstance(value, np.ndarray) for value in feeds.values()):
        return run_session(session, feeds)
    names = [output.name for output in session.get_outputs()]
    try:
        values = session.run(names, dict(feeds))
    except TypeError as error:
        raise StageError(f"ONNX Runtime's binding does not take the inputs\n  {error}") from error
    return _flatten_all(names, values)


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:400]


def main(arguments: Sequence[str]) -> None:
    """Checks every STEP-th case from FIRST on, of every EVERY-th case of the suite."""
    first, step, every = int(arguments[0]), int(arguments[1]), int(arguments[2])
    onnxruntime.set_default_logger_severity(4)
    for index, case in list(enumerate(load_cases()[::every]))[first::step]:
        print(json.dumps({"index": index, "case": case.name}), flush=True)
        with tempfile.TemporaryDirectory(prefix="ortprep-case-") as folder:
            print(json.dumps(asdict(check_case(case, Path(folder)))), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
