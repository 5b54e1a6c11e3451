"""Starts a program whose sessions come from bundles, in place of this process: what `ortprep run` does.

It imports next to nothing, since a job waits for it.
"""

from __future__ import annotations

import os
import sys

from ortprep.runtime.dropin.import_hook import startup_environment

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import NoReturn

    from ortprep.errors import SpecError

BUNDLES_VARIABLE = "ORTPREP_BUNDLES"
"""Where bundles are: folders, separated by `os.pathsep`."""

SIGNATURE_VARIABLE = "ORTPREP_REQUIRE_SIGNATURE"
"""A public key's file: no bundle is used that is not signed with it (`require_signature` of `load`)."""

VERBOSE_VARIABLE = "ORTPREP_VERBOSE"
"""If it is not empty, each session is one line on stderr: its bundle, or why it has none."""

FORK_VARIABLE = "ORTPREP_FORK"
"""If it is not empty, sessions have one thread, and processes that are forked afterwards can run them."""

DEFAULT_BUNDLES = "artifacts"

PULL_HINT = "ortprep pull NAME@VERSION --registry URL --out DIR   (bundles are taken from folders)"
"""What to do about a reference to a registry in a place of bundles."""

_INSTALLER = "ortprep.runtime.dropin.session:install_in"


def start_program(program: Sequence[str], bundles: Sequence[str], *, verbose: bool) -> NoReturn:
    """Runs a program in place of this process; raises as `dropin_environment` and `replace_process`."""
    replace_process(program, dropin_environment(bundles, os.environ, verbose=verbose))


def print_environment(bundles: Sequence[str], *, verbose: bool) -> None:
    """Writes the variables that do what `ortprep run` does, one per line; raises as `dropin_environment`."""
    for name, value in sorted(dropin_environment(bundles, os.environ, verbose=verbose).items()):
        if os.environ.get(name) != value or name in (FORK_VARIABLE, SIGNATURE_VARIABLE):
            sys.stdout.write(f"{name}={value}\n")


def dropin_environment(
    bundles: Sequence[str], environment: Mapping[str, str], *, verbose: bool = False
) -> dict[str, str]:
    """Returns an environment whose Python processes take their sessions from bundles.

    Args:
        bundles: Folders, each a bundle or full of them; if there are none, those of `ORTPREP_BUNDLES` in
            `environment`, else the folder `artifacts`.
        environment: What else the environment has.
        verbose: Whether each session is one line on stderr.

    Raises:
        SpecError: There is no such folder, its path has a separator of paths in it, or a registry is named.
    """
    named = [_absolute(place) for place in bundles]
    if not named and "://" in environment.get(BUNDLES_VARIABLE, ""):
        raise _refused_registry(BUNDLES_VARIABLE)
    if not named and not environment.get(BUNDLES_VARIABLE):
        named = [_absolute(DEFAULT_BUNDLES)]
    added = {BUNDLES_VARIABLE: os.pathsep.join(named)} if named else {}
    if environment.get(SIGNATURE_VARIABLE):
        # Absolute, since programs change their working folder.
        added[SIGNATURE_VARIABLE] = os.path.abspath(environment[SIGNATURE_VARIABLE])
    if verbose:
        added[VERBOSE_VARIABLE] = "1"
    return startup_environment(_INSTALLER, {**environment, **added})


def replace_process(command: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    """Runs a program in place of this process: its streams, its number, its signals, its exit code.

    Raises:
        ProgramNotFoundError: There is no such program.
        LaunchError: It cannot be run.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execvpe(command[0], list(command), dict(environment))
    except OSError as error:
        from ortprep.errors import LaunchError, ProgramNotFoundError

        kind = ProgramNotFoundError if isinstance(error, FileNotFoundError) else LaunchError
        raise kind(f"cannot run {command[0]}\n  {error.strerror}") from error


def _absolute(place: str) -> str:
    """Returns a place of bundles as an absolute path; raises `SpecError` for a bad one."""
    if "://" in place:
        raise _refused_registry("--bundles")
    path = os.path.abspath(os.path.expanduser(place))
    # In a printed environment, a line break would begin a variable of its own.
    is_plain = not any(ord(character) < 32 or 127 <= ord(character) < 160 for character in path)
    if is_plain and os.path.isdir(path) and os.pathsep not in path:
        return path
    from ortprep.errors import SpecError

    if not is_plain:
        raise SpecError(f"bad place of bundles: {path!r}\n  expected no control characters")
    got = "no such folder" if os.pathsep not in path else f"{os.pathsep!r} in it"
    raise SpecError(
        f"no folder of bundles: {place}\n  expected a bundle, or a folder of bundles, got {got}",
        hint=PULL_HINT if "@" in place else "ortprep prepare   (writes bundles below artifacts/)",
    )


def _refused_registry(source: str) -> SpecError:
    """Returns the error for a URL, which is not quoted, since it may have credentials."""
    from ortprep.errors import SpecError

    return SpecError(f"{source} names a registry\n  expected folders of bundles, got a URL", hint=PULL_HINT)
