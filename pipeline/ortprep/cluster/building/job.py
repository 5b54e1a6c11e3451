"""One model on one kind of hardware: what a node is asked for, and every stage that it runs for it.

A spec travels with the files that it names beside its source, and with the receipt of the fetched source.
Arguments and results are JSON, as everywhere in ortprep; how Ray itself carries them is Ray's affair. What
happens meanwhile goes to stderr, which Ray forwards to the driver.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

import ortprep
from ortprep.build.build_plan import STAGES
from ortprep.build.execution import Task, as_pipeline_errors, build_tasks, why_other
from ortprep.build.observers import LineObserver, Observer
from ortprep.build.receipts import RECEIPT_VERSION, TaskReceipt, outcome_key, read_receipt, write_receipt
from ortprep.build.runner import run_tasks
from ortprep.bundle.codec import decode, encode
from ortprep.bundle.digest import DigestCache, digest_json
from ortprep.bundle.file_memory import require_cache_folder
from ortprep.bundle.loader_config import FileEntry
from ortprep.bundle.paths import resolve_inside
from ortprep.children.availability import unavailable_reason
from ortprep.cluster.building.work_store import JobOutcome, WorkStore
from ortprep.errors import ClusterError, NotPublishedError, PipelineError, SourceError, SpecError, to_dict
from ortprep.quoting import printable, quoted, terminal_handler
from ortprep.registry.catalogue import open_catalogue
from ortprep.registry.publish import publish
from ortprep.spec.models import ModelSpec
from ortprep.stages.core.accuracy import metric_files
from ortprep.stages.core.contract import Plan
from ortprep.stages.core.sample_files import find_sample_files
from ortprep.transport.transfer import with_retries
from ortprep.versions import install_command

log = logging.getLogger(__name__)

MAX_REGISTRY_ATTEMPTS = 8
"""How often a job asks a registry that refuses it for its load: for three quarters of a minute."""

_STALE_S = 24 * 3600.0


@dataclass(frozen=True)
class ShippedSpec:
    """A spec as it travels.

    Attributes:
        data: The spec, as JSON types.
        file: Name of its file, for messages.
        place: Path of its folder relative to that of `files`, `.` for the same.
        files: Samples and metric.
    """

    data: Mapping[str, Any]
    file: str
    place: str
    files: tuple[FileEntry, ...]


@dataclass(frozen=True)
class BuildJob:
    """A model that a node has to build.

    Attributes:
        spec: Spec of the model.
        source: Receipt of the fetched source.
        kind: Kind of hardware.
        target: Target of the bundle: `cpu` or `cuda`.
        store: URL of the work store.
        registry: URL of the registry.
    """

    spec: ShippedSpec
    source: TaskReceipt
    kind: str
    target: str
    store: str
    registry: str

    @property
    def model(self) -> str:
        """Name of the model."""
        return str(self.spec.data["name"])

    @property
    def name(self) -> str:
        """Name of the job, for people."""
        return f"{self.model}@{self.kind}"

    @property
    def source_digest(self) -> str:
        """Digest of the fetched source, whenever and wherever it was fetched."""
        return digest_json(outcome_key(self.source))

    @property
    def digest(self) -> str:
        """Digest of all that decides what is built, and where it is published."""
        others = (self.kind, self.target, self.store, self.registry)
        return digest_json([encode(self.spec), self.source_digest, *others])


@dataclass(frozen=True)
class JobResult:
    """Result of a job.

    Attributes:
        part: Digest of the part that is in the registry; None if something failed.
        is_current: Whether an earlier job had done all of it.
        failures: Errors by `ortprep.errors.to_dict`.
    """

    part: str | None = None
    is_current: bool = False
    failures: tuple[Mapping[str, Any], ...] = ()


def describe_spec(spec: ModelSpec) -> tuple[ShippedSpec, Path]:
    """Returns a spec as it travels, and the folder that has its files.

    Raises:
        SpecError: An application judges, which runs on its own machine only.
        SourceError: A file of the spec cannot be read.
    """
    if spec.convert is not None and spec.convert.judge is not None:
        raise SpecError(
            f"convert.judge cannot be run on other machines: {spec.name}\n"
            f"  expected a gate, got the program {spec.convert.judge.run[0]}",
            hint=f"ortprep prepare {quoted(spec.name)}   (on the machine of the application)",
        )
    folder = Path(os.path.realpath(spec.folder))
    # Links of folders are followed, as a glob with `..` follows them; files go by the names they have.
    paths = sorted({Path(os.path.realpath(path.parent), path.name) for path in _find_files(spec)})
    root = Path(os.path.commonpath([folder, *(path.parent for path in paths)]))
    digest = DigestCache().digest
    try:
        files = tuple(
            FileEntry(path.relative_to(root).as_posix(), path.stat().st_size, digest(path)) for path in paths
        )
    except OSError as error:
        raise SourceError(
            f"cannot read a file of the spec {spec.name}: {error.filename}\n  {error.strerror}"
        ) from error
    place = folder.relative_to(root).as_posix()
    return ShippedSpec(spec.model_dump(mode="json"), Path(spec.place).name, place, files), root


def place_spec(shipped: ShippedSpec, folder: Path) -> ModelSpec:
    """Returns the spec as if its file lay below a folder that has its files."""
    spec_folder = folder if shipped.place == "." else resolve_inside(folder, shipped.place)
    spec_folder.mkdir(parents=True, exist_ok=True)
    return ModelSpec.model_validate(shipped.data).located_in(spec_folder, file=shipped.file)


def _find_files(spec: ModelSpec) -> tuple[Path, ...]:
    """Returns the files that a spec names; raises `SourceError` for a sample that links to no `.npz` file.

    A stranger's spec may come with links to the user's private files, of which the store would get copies.
    """
    metric = None if spec.convert is None else spec.convert.gate.metric
    samples = find_sample_files(spec)
    for path in samples:
        target = os.path.realpath(path)
        if not target.endswith(".npz"):
            raise SourceError(
                f"bad sample of {spec.name}: {path}\n  expected a link to an .npz file, got one to {target}",
                hint=quoted("cp", "--remove-destination", target, path),
            )
    return (
        *samples,
        *(() if metric is None else metric_files(metric, spec.folder)),
    )


def run_job(text: str, version: str, log_level: int) -> str:
    """Runs a job on this node, and returns what came of it.

    Args:
        text: A `BuildJob`, as JSON.
        version: Version of ortprep that asks; another one may write jobs otherwise.
        log_level: Lowest level of the package's log records that the driver shows.

    Returns:
        A `JobResult`, as JSON; whatever fails is in it.
    """
    package_log = logging.getLogger("ortprep")
    package_log.setLevel(log_level)
    if not package_log.handlers:
        package_log.addHandler(terminal_handler("%(levelname)s %(name)s: %(message)s"))
    try:
        with as_pipeline_errors("a job of this node"):
            result = _run(text, version)
    except PipelineError as error:
        result = JobResult(failures=(to_dict(error),))
    return json.dumps(encode(result))


def _run(text: str, version: str) -> JobResult:
    """Checks that this node can do a job, and does it in its folder."""
    if version != ortprep.__version__:
        raise ClusterError(
            f"a node has another version of ortprep\n  expected {version}, got {ortprep.__version__}",
            hint=f"install the same checkout or wheel on every node; here: {install_command('build', 'ray')}",
        )
    job = decode(BuildJob, json.loads(text))
    reason = unavailable_reason(job.target)
    if reason is not None:
        raise SpecError(
            f"a node of kind {job.kind} lacks what target {job.target} needs\n  {reason}",
            hint="ortprep doctor env   # on that node",
        )
    reset_niceness()
    with working_folder(job) as folder:
        result = build_job(job, folder, LineObserver(_write_line, suffix=f"@{job.kind}"))
        if result.part is not None:
            shutil.rmtree(folder, ignore_errors=True)
        return result


def build_job(job: BuildJob, folder: Path, observer: Observer) -> JobResult:
    """Runs every stage of a model that the driver has fetched, and publishes the bundle.

    Nothing runs if an earlier job left an outcome whose keys are those of this machine. Of a job that was
    killed on this node, the finished tasks count.

    Raises:
        PipelineError: The store or the registry fails; what fails in a stage is in the result.
    """
    store = WorkStore(job.store, job.model)
    files, stored = folder / "spec", folder / "stored"
    for left in (files, stored):
        shutil.rmtree(left, ignore_errors=True)
    with _lost_as_error(job):
        store.fetch_files(files, job.spec.files)
    plan = Plan(spec=place_spec(job.spec, files), targets=(job.target,), missing={})
    part = _published_part(job, store, build_tasks(plan, STAGES, stored))
    if part is not None:
        return JobResult(part, is_current=True)
    fetched, *tasks = build_tasks(plan, STAGES, folder / "artifacts")
    with _lost_as_error(job):
        store.fetch_files(fetched.folder, job.source.files)
    write_receipt(fetched.receipt, job.source)
    failures = run_tasks((tasks,), observer)
    if failures:
        return JobResult(failures=tuple(map(to_dict, failures)))
    with open_catalogue(job.registry) as catalogue:
        # Registries limit a fleet that publishes at once; hours of work are worth a minute's wait.
        part = with_retries(lambda: publish(tasks[-1].folder, catalogue), attempts=MAX_REGISTRY_ATTEMPTS).part
    receipts = [receipt for task in tasks if (receipt := read_receipt(task.receipt)) is not None]
    outcome = JobOutcome(RECEIPT_VERSION, job.registry, part, tuple(receipts))
    store.write_outcome(job.kind, job.source_digest, outcome)
    return JobResult(part)


@contextmanager
def _lost_as_error(job: BuildJob) -> Iterator[None]:
    """Says what to do where the store does not have a file that the driver sent."""
    try:
        yield
    except NotPublishedError as error:
        raise ClusterError(
            f"the work store has lost the source of {job.model}",
            hint="run it again to store it again; if that does not help, check that this node sees the store",
        ) from error


def _published_part(job: BuildJob, store: WorkStore, tasks: tuple[Task, ...]) -> str | None:
    """Returns the part that an equal job left in the registry; None if any key differs, or it is gone."""
    outcome = store.read_outcome(job.kind, job.source_digest)
    if outcome is None or outcome.registry != job.registry:
        return None
    recorded = {receipt.task: receipt for receipt in (job.source, *outcome.receipts)}
    for task in tasks:
        if (receipt := recorded.get(str(task.id))) is not None:
            write_receipt(task.receipt, receipt)
    if any(why_other(task) for task in tasks[1:]):
        return None
    with open_catalogue(job.registry) as catalogue:
        state = with_retries(lambda: catalogue.read_state(job.model), attempts=MAX_REGISTRY_ATTEMPTS)
    is_there = any(outcome.part in version.part_digests for version in state.versions.values())
    return outcome.part if is_there else None


@contextmanager
def working_folder(job: BuildJob) -> Iterator[Path]:
    """Yields the folder of a job; waits while another process has it.

    A job that has published removes it. What a job that failed or was killed leaves here, the next one with
    an equal job takes up: it goes on with the finished tasks. What none took up for a day is removed.

    Raises:
        CacheError: Others could change what is in the cache folder.
    """
    root = Path(require_cache_folder("cluster"))
    name = job.digest.partition(":")[2][:32]
    # Locks stay, since waiting processes have them open.
    for folder in [folder for folder in root.iterdir() if folder.suffix != ".lock" and folder.name != name]:
        with suppress(Timeout, OSError), FileLock(root / f"{folder.name}.lock", timeout=0):
            if time.time() - folder.stat().st_mtime > _STALE_S:
                shutil.rmtree(folder, ignore_errors=True)
    with FileLock(root / f"{name}.lock"):
        folder = root / name
        folder.mkdir(exist_ok=True)
        yield folder


def _write_line(text: str) -> None:
    sys.stderr.write(printable(text) + "\n")
    sys.stderr.flush()


def reset_niceness() -> None:
    """Takes back the niceness that Ray gives its workers: what is measured has to run as jobs will."""
    niceness = os.getpriority(os.PRIO_PROCESS, 0)
    if niceness <= 0:
        return
    try:
        os.setpriority(os.PRIO_PROCESS, 0, 0)
    except PermissionError:
        log.warning(
            "measuring at niceness %d, so other processes on this node "
            "disturb it; start Ray with RAY_worker_niceness=0",
            niceness,
        )
