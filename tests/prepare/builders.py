"""A user's folder in miniature: specs, models and bundles, worked on by the real commands."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import shutil
import signal
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from unittest.mock import patch

import numpy as np

from bench.demo_models import write_demo_model
from ortprep.bundle.digest import digest_file
from ortprep.bundle.loader_config import read_loader_config
from ortprep.bundle.verification import compare_bundle
from ortprep.measuring.device_lock import lock_file
from tests.builders import parse, write_model
from tests.fakes import is_alive, stat_of, wait_for

REPOSITORY = Path(__file__).resolve().parents[2]

QUICK = {"rounds": 3, "cold_rounds": 0, "steady_s": 0.01}
"""Measurements that take a second or two and prove nothing."""

UNTUNED = {"max_trials": 0}
"""No search: the plan is the one without."""

AS_PREPARED = {**UNTUNED, "max_private_mb": 1}
"""No search, and the prepared plan is shipped, however noisy the machine: no plan keeps this limit.

A small model that gains little would be measured twice as long.
"""

SHAPES = {"x": {"shapes": [[1, 64], [2, 64]]}}
"""What the specs here say of `folding_net`."""


@dataclass(frozen=True)
class Outcome:
    """How a command ended."""

    code: int
    out: str
    err: str


@dataclass(frozen=True)
class Project:
    """A folder with `configs/`, `models/` and `artifacts/`, and a cache and locks of its own."""

    root: Path

    @property
    def configs(self):
        return self.root / "configs"

    @property
    def models(self):
        return self.root / "models"

    @property
    def artifacts(self):
        return self.root / "artifacts"

    def bundle(self, name="net"):
        return self.artifacts / name

    def work(self, name="net"):
        return self.artifacts / ".work" / name

    def write_spec(self, name="net", **sections):
        """Writes a spec of `models/NAME.onnx` with quick measurements; sections given replace the usual."""
        usual = {"name": name, "source": {"path": f"../models/{name}.onnx"}, "targets": ["cpu"]}
        path = self.configs / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({**usual, "measure": QUICK, "tune": UNTUNED, **sections}))  # JSON is YAML
        return path

    def add(self, model, name="net", **sections):
        """Writes a model and its spec; returns the model's path."""
        self.write_spec(name, **sections)
        return write_model(model, self.models / f"{name}.onnx")

    def environment(self):
        """Nothing is shared with other projects: no digests, no device, no temporary files."""
        for name in ("cache", "locks", "tmp"):
            (self.root / name).mkdir(parents=True, exist_ok=True)
        return {
            **os.environ,
            "ORTPREP_CACHE_DIR": str(self.root / "cache"),
            "XDG_RUNTIME_DIR": str(self.root / "locks"),
            "TMPDIR": str(self.root / "tmp"),
            "PYTHONPATH": str(REPOSITORY),
            # Threads of an interrupted build end with the process, and leave it what they held.
            "PYTHONWARNINGS": "error,ignore:Implicitly cleaning up:ResourceWarning",
            "COLUMNS": "120",
        }

    def start(self, *arguments, **options):
        """Starts `python ARGUMENTS` in the project."""
        usual = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen(
            [sys.executable, *arguments],
            cwd=self.root,
            text=True,
            **{**usual, "env": self.environment(), **options},
        )

    def python(self, *arguments, **options):
        """Runs `python ARGUMENTS` in the project, to its end."""
        return finish(self.start(*arguments, **options))

    def run(self, *arguments, **options):
        """Runs `ortprep ARGUMENTS`."""
        return self.python("-m", "ortprep", *arguments, **options)

    def on_terminal(self, *arguments):
        """Runs `python ARGUMENTS` on a pseudo-terminal; returns its exit code and all it wrote."""
        ours, theirs = pty.openpty()
        process = self.start(
            *arguments, stdin=theirs, stdout=theirs, stderr=theirs, env=self.environment() | {"TERM": "xterm"}
        )
        os.close(theirs)
        written = bytearray()
        try:
            while block := os.read(ours, 65536):
                written += block
        except OSError:
            pass  # how a pseudo-terminal tells that nobody holds its other end any more
        finally:
            os.close(ours)
        return process.wait(timeout=600), written.decode()

    def call(self, *arguments):
        """Does what `run` does, in this process: for many short runs, it spares the imports."""
        from ortprep.cli.app import run

        out, err = io.StringIO(), io.StringIO()
        with (
            contextlib.chdir(self.root),
            patch.dict(os.environ, self.environment()),
            patch.object(sys, "argv", ["ortprep", *arguments]),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
        ):
            code = run()
        return Outcome(code, out.getvalue(), err.getvalue())

    def doit(self, *arguments):
        """Runs `doit ARGUMENTS` with the repository's dodo.py on this project's folders."""
        return self.python(*self.doit_arguments(*arguments))

    def doit_arguments(self, *arguments):
        """Returns what Python is given for that: doit would look for folders beside dodo.py."""
        folders = (f"configs={self.configs}", f"artifacts={self.artifacts}")
        return ["-m", "doit", "-f", str(REPOSITORY / "dodo.py"), *folders, *arguments]

    def explain(self, *arguments):
        """Returns the reasons of every task that would run, by task."""
        outcome = self.call("explain", "--json", *arguments)
        assert outcome.code == 0, outcome.err
        return {item["task"]: item["reasons"] for item in json.loads(outcome.out) if item["reasons"]}

    def copy_to(self, root):
        """Returns a copy: same content, other inodes."""
        shutil.copytree(self.root, root, symlinks=True)
        return Project(root)

    def leftovers(self):
        """Returns what unfinished work is visible below artifacts/."""
        return [str(path.relative_to(self.artifacts)) for path in self.artifacts.rglob(".tmp-*")]


def folding_net(*, seed=0):
    """`x` [batch, 64] → `y` [batch, 64], through weights that 256 nodes compute from constants at every load.

    Preparing it once is worth so much that even three rounds beside other programs show it.
    """
    rng = np.random.default_rng(seed)
    nodes, weights, hidden = [], {}, "x"
    for layer in range(4):
        name = f"w{layer}"
        weights[name] = rng.normal(0, 0.2, (64, 64)).astype(np.float32)
        for fold in range(64):
            nodes.append(f"w{layer}_{fold} = Transpose <perm = [1, 0]> ({name})")
            name = f"w{layer}_{fold}"
        nodes.append(f"product{layer} = MatMul({hidden}, {name})")
        hidden = "y" if layer == 3 else f"hidden{layer}"
        nodes.append(f"{hidden} = Tanh(product{layer})")
    return parse(f"(float[batch, 64] x) => (float[batch, 64] y) {{ {' '.join(nodes)} }}", **weights)


def finish(process):
    """Waits for a process and returns what it said; one that hangs is killed and fails the test."""
    try:
        out, err = process.communicate(timeout=600)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        raise AssertionError(f"still running after 600 s\n{out}\n{err}") from None
    return Outcome(process.returncode, out, err)


def done(outcome):
    """Returns the tasks that a build says it did."""
    assert outcome.code == 0, outcome.err
    return {line.split()[1] for line in outcome.err.splitlines() if line.startswith("done ")}


ALL_TASKS = {
    "fetch:net",
    *(f"{stage}:net/{variant}" for stage in ("optimize", "verify") for variant in ("cpu", "portable")),
    "measure:net/cpu",
    "package:net",
}
"""Every task of the model."""


def stamps(folder):
    """Returns inode, size, modification time and digest of everything below a folder."""
    return {
        path.relative_to(folder).as_posix(): (
            (status := path.lstat()).st_ino,
            status.st_size,
            status.st_mtime_ns,
            digest_file(path) if path.is_file() else "",
        )
        for path in sorted(folder.rglob("*"))
    }


@contextlib.contextmanager
def untouched(project):
    """Fails the test unless the block leaves the bundle as it was, to the inode, and nothing half-made."""
    before = stamps(project.bundle())
    yield
    assert stamps(project.bundle()) == before
    assert project.leftovers() == []


def preferred_model(bundle):
    """Returns the model file that a job on this machine opens, relative to the bundle."""
    return read_loader_config(bundle).variants[0].model


def is_intact(bundle):
    """Says whether every byte of a bundle is as recorded."""
    return compare_bundle(bundle) == ()


def children_of(pid):
    """Returns the processes, alive, whose parent is `pid`, and theirs."""
    stats = {int(path.name): stat_of(path.name) for path in Path("/proc").glob("[0-9]*")}
    parents = {one: int(fields[1]) for one, fields in stats.items() if fields[0] != "Z"}
    found, seen = {pid}, set[int]()
    while found != seen:
        seen = set(found)
        found |= {child for child, parent in parents.items() if parent in seen}
    return found - {pid}


STAGES = {
    "fetch": ".work/net/.tmp-fetch~*",
    "optimize": ".work/net/.tmp-optimize-cpu~*",
    "verify": ".work/net/.tmp-verify-cpu~*",
    "measure": ".work/net/.tmp-measure-cpu~*",
    "package": ".tmp-net~*",
}
"""Every stage, and the folder that shows it is under way."""

PAUSING = """
import os, runpy, signal, sys, threading
from pathlib import Path

artifacts, under_way = Path(sys.argv[1]), sys.argv[2]
open_of = os.pidfd_open
first = threading.Lock()

def pause_and_open(*arguments):
    if any(artifacts.glob(under_way)) and first.acquire(blocking=False):
        os.kill(os.getpid(), signal.SIGSTOP)
    return open_of(*arguments)

os.pidfd_open = pause_and_open
module, sys.argv[1:] = sys.argv[3], sys.argv[4:]
runpy.run_module(module, run_name="__main__")
"""
"""A build, which stops itself where it waits for a child while that folder is there."""


def pause_in(project, stage, *options, with_doit=False):
    """Starts a build and returns it stopped in that stage, a child of it at work; `kill` lets it go on.

    A build that ran on would be somewhere else by the time it is killed.
    """
    command = project.doit_arguments("run")[1:] if with_doit else ["ortprep", "prepare"]
    process = project.start("-c", PAUSING, str(project.artifacts), STAGES[stage], *command, *options)

    def is_stopped():
        assert process.poll() is None, f"ended before {stage}: {finish(process).err}"
        return stat_of(process.pid)[0] == "T"

    wait_for(is_stopped, what=f"{stage} is under way")
    return process


def kill(process, *, with_signal=signal.SIGKILL):
    """Ends a process alone and returns when its children are gone too; that they go is part of the test."""
    children = children_of(process.pid)
    process.send_signal(with_signal)
    process.send_signal(signal.SIGCONT)  # one that is stopped takes notice of SIGKILL alone
    outcome = finish(process)
    wait_for(lambda: not any(map(is_alive, children)), what="the children end with their parent")
    return outcome


def answers(session, feeds):
    """Runs a session on feeds and returns its outputs by name."""
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, dict(feeds)), strict=True))


def source_answers(model, feeds):
    """Returns what plain ONNX Runtime answers with the source."""
    import onnxruntime

    return answers(onnxruntime.InferenceSession(str(model), providers=["CPUExecutionProvider"]), feeds)


def prepare_once(root, write):
    """Writes a project and prepares its models, once for all processes of a run; not to be changed."""
    record = root.with_suffix(".json")
    root.parent.mkdir(exist_ok=True)
    with lock_file(root.with_suffix(".lock"), lambda: None):
        if not record.exists():
            shutil.rmtree(root, ignore_errors=True)
            outcome = write(root).run("prepare")
            assert outcome.code == 0, outcome.err
            record.write_text(json.dumps(asdict(outcome)))
    return Project(root), Outcome(**json.loads(record.read_text()))


def new_project(root):
    """Returns a project with one small model and its spec, not built."""
    project = Project(root)
    project.add(folding_net(), inputs=SHAPES)
    return project


def new_squeezenet(root, **sections):
    """Returns a project with SqueezeNet and its spec, not built."""
    project = Project(root)
    project.models.mkdir(parents=True)
    write_demo_model("squeezenet", project.models / "squeezenet.onnx")
    inputs = {"data_0": {"shapes": [[1, 3, 224, 224]], "range": [0, 1]}}
    project.write_spec("squeezenet", source={"path": "../models/squeezenet.onnx"}, inputs=inputs, **sections)
    return project
