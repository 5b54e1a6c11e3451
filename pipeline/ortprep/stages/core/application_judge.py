"""The application as the judge: does it answer with converted models as it does without?

    convert: {judge: {run: [python, app.py, pages/], compare: stdout}}

It runs as the user would run it, in a process group of its own with a deadline; the first two runs take no
bundle, the others take their sessions from bundles, as under `ortprep run`. The first two must agree as the
spec requires of a candidate: an answer that changes by itself says nothing of a conversion. Runs in one
folder take turns. A process that the program moves into another session (`setsid`) is not ended with it.

What the program writes can be private, so it is said and never recorded.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from ortprep.bundle.conversion_record import ApplicationVerdict
from ortprep.bundle.digest import DigestCache, digest_json
from ortprep.bundle.scratch_folder import scratch_folder
from ortprep.children.process_group import start_program, wait_for_end
from ortprep.errors import DISK_ERRORS, SpecError, StageError
from ortprep.measuring.device_lock import hold_folder
from ortprep.quoting import quoted
from ortprep.runtime.dropin.import_hook import STARTUP_VARIABLE
from ortprep.runtime.dropin.launch import BUNDLES_VARIABLE, SIGNATURE_VARIABLE, dropin_environment
from ortprep.runtime.loading.load_options import DIGESTS_VARIABLE, PRECISION_VARIABLE
from ortprep.spec.conversion import JudgeSpec
from ortprep.spec.models import ModelSpec
from ortprep.stages.core.accuracy import FunctionCall, call_user_function, convert_section, metric_digest

MAX_ANSWER_BYTES = 64 * 2**20
"""Largest answer of an application that is compared, in bytes."""

MAX_FOLDER_FILES = 1000
"""Maximum number of files of a folder in a judge's key, in order of their names."""

_FIELD = "convert.judge"
_TRACEBACK = b"Traceback (most recent call last)"
_ERROR_LINES = 8
_SESSION = re.compile(r"ortprep: session of .*: (?P<bundle>.+), variant (?P<variant>[^;]+)(;.*)?")
_OWN_VARIABLES = (
    BUNDLES_VARIABLE,
    STARTUP_VARIABLE,
    SIGNATURE_VARIABLE,
    PRECISION_VARIABLE,
    DIGESTS_VARIABLE,
)


def judge_key(spec: ModelSpec) -> Mapping[str, Any]:
    """Returns what decides an application's verdict: digests of its arguments, and of files they name."""
    judge = convert_section(spec).judge
    if judge is None:
        return {}
    key, folder = judge.model_dump(mode="json"), spec.folder / judge.folder
    answer, cache = (folder / judge.compare).resolve(), DigestCache()
    key["run"], key["files"] = digest_json(judge.run), {}  # arguments may be secrets
    if judge.function is not None:
        place, name = judge.function
        key["function"] = metric_digest(name, spec.folder / place)
    # A program without a slash is looked up in PATH.
    for argument in judge.run[0 if "/" in judge.run[0] else 1 :]:
        digests = [
            (os.path.relpath(path, folder), _digest_or_reason(path, cache))
            for path in islice(_find_files(folder, argument), MAX_FOLDER_FILES)
            if path.is_file() and path.resolve() != answer
        ]
        if digests:
            key["files"][argument] = digest_json(digests)
    return {"judge": key}


def _digest_or_reason(path: Path, cache: DigestCache) -> str:
    """Returns a file's digest; the reason why there is none if it cannot be read, or grows meanwhile."""
    try:
        return cache.digest(path)
    except OSError as error:
        return os.strerror(error.errno or 0)


def _find_files(folder: Path, argument: str) -> Iterator[Path]:
    """Yields the files that an argument names: of a script those beside it too, of a folder what is in it."""
    path = folder / argument
    if not os.access(path, os.R_OK):  # takes any text, unlike methods of Path
        return
    if path.is_file():
        yield from sorted(path.parent.glob("*.py")) if path.suffix == ".py" else [path]
    elif not folder.resolve().is_relative_to(path.resolve()):
        for root, folders, names in os.walk(path):
            folders[:] = sorted(name for name in folders if not name.startswith((".", "__pycache__")))
            yield from (Path(root, name) for name in sorted(names) if not name.startswith("."))


@dataclass(frozen=True)
class _Run:
    """One run of the program: what it answered, what it wrote to stderr, and why that is no answer."""

    answer: bytes
    stderr: bytes
    seconds: float
    problem: str


class ApplicationJudge:
    """Compares an application's answers with those it gives without bundles.

    Raises:
        SpecError: The program cannot be run, fails, writes nothing, or answers differently every time.
        OSError: The disk is full.
    """

    def __init__(self, spec: ModelSpec, judge: JudgeSpec, say: Callable[[str], None]) -> None:
        self._spec, self._judge, self._say = spec, judge, say
        self._program = describe_program(judge.run)
        self._folder = (spec.folder / judge.folder).resolve()
        self._output = "stdout" if judge.function else judge.compare
        self._file = None if self._output == "stdout" else self._folder / judge.compare
        say(f"judge runs: {quoted(self._program)}")
        key = judge_key(spec)
        first, second = (self._run_plain() for _ in range(2))
        repeated = self._compare(first, second)
        say(f"judge {self._program}: {first.seconds:.1f} s and {second.seconds:.1f} s without bundles")
        if not repeated.holds:
            raise SpecError(
                f"{_FIELD} is not stable from run to run: {self._program}\n"
                f"  expected an agreement of at least {judge.min_agreement:g} without any bundle, "
                f"got {repeated.agreement:.4g}",
                hint="compare: compare.py:agreement   (a function that ignores times and random parts)",
            )
        if judge_key(spec) != key:
            say(f"judge {self._program} changes files that its arguments name, so each build judges again")
        self._plain = min(first, second, key=lambda run: run.seconds)

    def judge(self, bundle: Path, variant: str, *, others: Sequence[Path] = ()) -> ApplicationVerdict:
        """Runs the application once with a bundle.

        Args:
            bundle: The bundle that is judged.
            variant: Its variant that the application has to load.
            others: Further bundles that its sessions may come from.

        Raises:
            SpecError: The user's function does not work.
            StageError: The application did not load the variant, so its answers say nothing of it.
        """
        places = [str(path.absolute()) for path in (bundle, *others)]
        run = self._run(dropin_environment(places, self._environment(), verbose=True))
        if run.problem:
            self._say(f"judge {self._program}: with the converted model it {run.problem}")
            reason = f"with the converted model it {run.problem.splitlines()[0]}"
            return self._verdict(self._plain, run, agreement=0.0, reason=reason)
        sessions = [_SESSION.fullmatch(line) for line in _lines(run.stderr)]
        used = [(Path(one["bundle"]).resolve(), one["variant"]) for one in sessions if one is not None]
        if (bundle.resolve(), variant) not in used:
            lines = [line for line in _lines(run.stderr) if line.startswith("ortprep: ")]
            got = "; ".join(lines[-_ERROR_LINES:]) or "no session"
            self._say(f"judge {self._program}: expected a session of {bundle}, got {got}")
            raise StageError(f"the application did not use the converted model: {self._program}")
        return self._compare(self._plain, run)

    def _compare(self, plain: _Run, run: _Run) -> ApplicationVerdict:
        """Returns the verdict on a run: how far its answer agrees with the plain run's."""
        judge, lines, equal = self._judge, 0, 0
        if judge.function is None:
            left, right = plain.answer.splitlines(), run.answer.splitlines()
            lines = max(len(left), len(right))
            equal = sum(one == other for one, other in zip(left, right, strict=False))
            agreement = equal / lines
        else:
            texts = tuple(one.answer.decode(errors="replace") for one in (plain, run))
            folder, function = judge.function
            place = (self._spec.folder / folder).resolve()
            call = FunctionCall(function, place, f"{_FIELD}.compare", texts)
            agreement = call_user_function(call, timeout_s=judge.timeout_s)
            if not 0 <= agreement <= 1:
                raise SpecError(
                    f"{_FIELD}.compare returned no agreement: {judge.compare}\n"
                    f"  expected a number from 0 to 1, got {agreement:g}"
                )
        return self._verdict(plain, run, agreement=agreement, lines=lines, equal=equal)

    def _verdict(self, plain: _Run, run: _Run, **outcome: Any) -> ApplicationVerdict:
        judge = self._judge
        outcome |= {"plain_s": plain.seconds, "run_s": run.seconds}
        return ApplicationVerdict(self._program, judge.compare, min_agreement=judge.min_agreement, **outcome)

    def _run_plain(self) -> _Run:
        """Runs the program without any bundle; raises `SpecError` if it gives no answer."""
        run = self._run(self._environment())
        problem = run.problem or ("" if run.answer else f"wrote nothing to {self._output}")
        if problem:
            raise SpecError(
                f"{_FIELD} gave no answer: {self._program}\n  without any bundle it {problem}",
                hint="run it by hand in convert.judge.folder; it must work there and end by itself",
            )
        return run

    def _environment(self) -> dict[str, str]:
        return {name: value for name, value in os.environ.items() if name not in _OWN_VARIABLES}

    def _run(self, environment: Mapping[str, str]) -> _Run:
        """Runs the program to its end or its deadline; nothing of its process group is left afterwards."""
        waiting = f"judge {self._program}: waiting for another run in {self._folder}"
        try:
            # Two runs in one folder could read each other's answers.
            with (
                hold_folder(self._folder, on_wait=lambda: self._say(waiting)),
                scratch_folder("ortprep-judge-") as scratch,
            ):
                return self._run_alone(environment, scratch)
        except OSError as error:
            if error.errno in DISK_ERRORS:
                raise
            raise SpecError(
                f"{_FIELD} cannot be run: {self._judge.run[0]}\n  {error.strerror}, in {self._folder}"
            ) from error

    def _run_alone(self, environment: Mapping[str, str], scratch: Path) -> _Run:
        """Runs the program while no other run is in its folder; an OSError says why it cannot be started."""
        file, timeout_s = self._file, self._judge.timeout_s
        before = _stamp(file)
        out, err = scratch / "stdout", scratch / "stderr"
        began_s = time.monotonic()
        with out.open("wb") as stdout, err.open("wb") as stderr:
            process = start_program(
                self._judge.run,
                folder=self._folder,
                environment=environment,
                stdout=stdout,
                stderr=stderr,
            )
            expired = wait_for_end(process, timeout_s)
        seconds, errors = time.monotonic() - began_s, _read(err)
        if not shutil.disk_usage(scratch).free:  # the answer may be cut off, whatever the program says
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(scratch))
        problem = _describe_end(None if expired else process.returncode, errors, timeout_s)
        if not problem and file is not None and _stamp(file) in (None, before):
            problem = f"did not write {self._judge.compare}"
        source = out if file is None else file
        if not problem and source.stat().st_size > MAX_ANSWER_BYTES:
            problem = f"wrote more than {MAX_ANSWER_BYTES} bytes to {self._output}"
        return _Run(b"" if problem else _read(source), errors, seconds, problem)


def describe_program(command: Sequence[str]) -> str:
    """Returns the names of a program and of the Python script it runs; other arguments may be secrets."""
    program = Path(command[0]).name
    is_python = program.startswith("python")
    scripts = [
        Path(argument).name
        for argument in command[1:2]
        if not argument.startswith("-") and (is_python or argument.endswith(".py"))
    ]
    return " ".join((program, *scripts))


def _describe_end(code: int | None, stderr: bytes, timeout_s: float) -> str:
    """Returns how a program failed, with the last lines of stderr; "" if it did not."""
    if code is None:
        return f"took longer than {timeout_s:g} s (convert.judge.timeout_s)"
    problem = f"ended with exit code {code}" if code > 0 else f"was ended by signal {-code}" if code else ""
    if not problem and _TRACEBACK in stderr:
        problem = "printed a traceback"
    lines = [line for line in _lines(stderr) if line.strip() and not line.startswith("ortprep: ")]
    tail = "".join(f"\n  {line[:400]}" for line in lines[-_ERROR_LINES:])
    return f"{problem}{tail}" if problem else ""


def _lines(text: bytes) -> list[str]:
    return text.decode(errors="replace").splitlines()


def _stamp(file: Path | None) -> tuple[int, int, int] | None:
    """Returns what changes when a file is written; None if there is none."""
    try:
        status = None if file is None else file.stat()
    except OSError:
        return None
    return status and (status.st_mtime_ns, status.st_size, status.st_ino)


def _read(file: Path) -> bytes:
    with file.open("rb") as stream:
        return stream.read(MAX_ANSWER_BYTES)
