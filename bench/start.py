"""Measures from outside what a job pays until its first result: a plain script in a fresh process.

The scripts are what a user would write, plus their clock. The parent reads the clock just before it starts
the process, the script once it has its first result: `time.monotonic()` is one clock for all processes.
Reading the sample input is left out.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ortprep.bundle.loader_config import read_loader_config
from ortprep.errors import StageError
from ortprep.runtime.tensors.arrays import read_tensors

ROOT = Path(__file__).resolve().parent.parent

_SCRIPT = """\
import time
{before}
started = time.monotonic()
{imports}
called = time.monotonic()
{session}
made, made_processor = time.monotonic(), time.process_time()
import numpy
feeds = {{
{feeds}
}}
read, read_processor = time.monotonic(), time.process_time()
session.run(None, feeds)
answered, answered_processor = time.monotonic(), time.process_time()
{swap}
times = []
for warm_up in range(3 if {steady_s} else 0):
    session.run(None, feeds)
end = time.monotonic() + {steady_s}
while {steady_s} and (time.monotonic() < end or len(times) < 5):
    began = time.monotonic()
    session.run(None, feeds)
    times.append(time.monotonic() - began)
with open("/proc/self/smaps_rollup") as rollup:
    private_kb = next(int(line.split()[1]) for line in rollup if line.startswith("Anonymous:"))
import json
seconds = [answered - (read - made), called - started, made - called, answered - read]
seconds.append(answered_processor - (read_processor - made_processor))
print(json.dumps([*seconds, sorted(times)[len(times) // 2] if times else None, private_kb]))
"""


@dataclass(frozen=True)
class LoadScript:
    """How a script gets its session.

    Attributes:
        imports: What it imports.
        session: What makes `session`.
        before: Imports before its own clock starts.
        swap: What it does between the first result and the later runs.
    """

    imports: str
    session: str
    before: str = ""
    swap: str = ""


@dataclass(frozen=True)
class ScriptTimes:
    """Figures of one process.

    Attributes:
        ready_ms: From before the process was started to its first result.
        import_ms: The script's imports; without those that come before its own clock.
        init_ms: The call that returns the session.
        first_ms: First run.
        processor_ms: Processor time of all threads until the first result, which other work on the machine
            disturbs less than the clock.
        steady_ms: Later runs: median; None if there were none.
        private_mb: Anonymous memory after the last run, in MB of 2**20 bytes.
    """

    ready_ms: float
    import_ms: float
    init_ms: float
    first_ms: float
    processor_ms: float
    steady_ms: float | None
    private_mb: float

    @property
    def call_ms(self) -> float:
        """Imports, session and first run together."""
        return self.import_ms + self.init_ms + self.first_ms


def plain(model: Path) -> LoadScript:
    """Returns the script of a job without this project."""
    return LoadScript("import onnxruntime", f"session = onnxruntime.InferenceSession({str(model)!r})")


def optimize_by_hand(model: Path, *, outside: bool = False) -> LoadScript:
    """Writes an optimised model as ONNX Runtime's documentation shows; returns the script that loads it.

    With `outside`, its weights are in a file of their own, which ONNX Runtime maps into memory.

    The first of the two is the five-line script that a reader thinks of first; it runs here once, in a fresh
    process. The written file lies beside the model, since weights in a data file stay there.

    Raises:
        StageError: ONNX Runtime cannot write the model.
    """
    optimized = model.with_name(f"{model.stem}-by-hand{'-outside' if outside else ''}.onnx")
    lines = ["import onnxruntime", "options = onnxruntime.SessionOptions()"]
    lines += [f"options.optimized_model_filepath = {str(optimized)!r}"]
    if outside:
        entries = {"file_name": f"{optimized.name}.data", "min_size_in_bytes": "1024"}
        keys = {f"session.optimized_model_external_initializers_{key}": entries[key] for key in entries}
        lines += [f"options.add_session_config_entry({key!r}, {value!r})" for key, value in keys.items()]
    lines += [f"onnxruntime.InferenceSession({str(model)!r}, options)"]
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], check=False, capture_output=True, text=True
    )
    if done.returncode:
        raise StageError(f"cannot write {optimized}\n{done.stderr[-2000:]}")
    disabled = "onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL"
    lines = ["options = onnxruntime.SessionOptions()", f"options.graph_optimization_level = {disabled}"]
    lines += [f"session = onnxruntime.InferenceSession({str(optimized)!r}, options)"]
    return LoadScript("import onnxruntime", "\n".join(lines))


def same_file(bundle: Path) -> LoadScript:
    """Returns the script of a job that has the bundle's first variant's file and options in its own code."""
    variant = read_loader_config(bundle).variants[0]
    options = variant.session_options
    level = f"onnxruntime.GraphOptimizationLevel.{options.graph_optimization_level}"
    lines = ["options = onnxruntime.SessionOptions()", f"options.graph_optimization_level = {level}"]
    lines += [f"options.{name} = {value!r}" for name, value in options.attributes.items()]
    lines += [
        f"options.add_session_config_entry({key!r}, {value!r})"
        for key, value in options.config_entries.items()
    ]
    providers = [(provider.name, dict(provider.options)) for provider in variant.providers]
    model = str(bundle / variant.model)
    lines.append(f"session = onnxruntime.InferenceSession({model!r}, options, providers={providers!r})")
    return LoadScript("import onnxruntime", "\n".join(lines))


def load(bundle: Path, *, more: str = "", imported: bool = False, new_container: bool = False) -> LoadScript:
    """Returns the script of a job that calls `load`, with ONNX Runtime imported before if requested.

    Later runs are those of the steady session. A job in a new container has an empty cache folder. `more` has
    further arguments of `load`, such as `, target='portable'`.
    """
    empty = f"import os; os.environ['ORTPREP_CACHE_DIR'] = f'{bundle}.cache/{{os.getpid()}}'\n"
    return LoadScript(
        f"{empty if new_container else ''}from ortprep.runtime import load",
        f"session = load({str(bundle)!r}{more})",
        "import onnxruntime" if imported else "",
        "from ortprep.runtime import wait_steady; wait_steady(session, 120)",
    )


def write_script(script: LoadScript, sample: Path, path: Path, *, steady_s: float) -> None:
    """Writes a script that runs a sample, and the sample's arrays as plain bytes beside it.

    Args:
        script: What it does to get its session.
        sample: `.npz` with one array per input.
        path: The new script.
        steady_s: Seconds of runs after the first; 0 for none.
    """
    feeds = []
    for index, (name, array) in enumerate(read_tensors(sample).items()):
        raw = path.with_name(f"{sample.parent.name}-{index}.raw")
        array.tofile(raw)
        values = f"numpy.fromfile({str(raw)!r}, dtype={array.dtype.str!r}).reshape({array.shape!r})"
        feeds.append(f"    {name!r}: {values},")
    text = _SCRIPT.format(
        before=script.before,
        imports=script.imports,
        session=script.session,
        feeds="\n".join(feeds),
        swap=script.swap,
        steady_s=steady_s,
    )
    path.write_text(text, encoding="utf-8")


def run_script(script: Path, *, python: Path | str = sys.executable, timeout_s: float = 600.0) -> ScriptTimes:
    """Runs a script in a fresh process of an interpreter, without a shell.

    Raises:
        StageError: It failed.
    """
    environment = _environment()
    started = time.monotonic()
    done = subprocess.run(
        [str(python), str(script)],
        check=False,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env=environment,
    )
    if done.returncode:
        raise StageError(f"{script} failed\n{done.stderr[-2000:]}")
    answered, imported, init, first, processor, steady, private_kb = json.loads(done.stdout.splitlines()[-1])
    return ScriptTimes(
        ready_ms=(answered - started) * 1e3,
        import_ms=imported * 1e3,
        init_ms=init * 1e3,
        first_ms=first * 1e3,
        processor_ms=processor * 1e3,
        steady_ms=None if steady is None else steady * 1e3,
        private_mb=private_kb / 1024,
    )


def _environment() -> Mapping[str, str]:
    """Returns this process's, with this checkout as the one that scripts import."""
    return {**os.environ, "PYTHONPATH": str(ROOT)}
