"""Every error the package raises.

All of them survive pickling, because they cross process borders, and all of them read the same way:

    what failed: which one
      expected …, got …

    hint: a command the user can run
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import islice
from typing import Any, ClassVar

from ortprep.quoting import printable, quoted

DISK_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS})
"""What `OSError.errno` is when the disk, a quota or a limit is the cause, and not what was written."""

_SHOWN_CHOICES = 40
_COMPARED_CHOICES, _COMPARED_CHARACTERS = 1000, 100


class PipelineError(Exception):
    """Root of everything this package raises on purpose.

    Args:
        message: The failure and its subject; a second, indented line may say what was expected and got.
        hint: A remedy, best a command to run.
    """

    exit_code = 1
    details: ClassVar[tuple[str, ...]] = ()
    """Names of further attributes that cross process borders."""

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        # Messages quote models, servers and ONNX Runtime, and programs log them as they are.
        self.message = printable(message)
        self.hint = None if hint is None else printable(hint)
        super().__init__(self.message)

    def __str__(self) -> str:
        return self.message if self.hint is None else f"{self.message}\n\nhint: {self.hint}"


def nearest_choice(name: str, choices: Iterable[str]) -> str | None:
    """Returns the choice that a misspelt name most likely stands for, None if none is near.

    Ends of names are compared, with those of the first choices: the time grows with the square of a length.
    """
    import difflib

    ends = {choice[-_COMPARED_CHARACTERS:]: choice for choice in islice(choices, _COMPARED_CHOICES)}
    nearest = difflib.get_close_matches(name[-_COMPARED_CHARACTERS:], ends, n=1)
    return ends[nearest[0]] if nearest else None


def propose(name: str, choices: Iterable[str]) -> str:
    """Returns what a message says of a name that is no choice: the nearest one, or what is expected."""
    listed = list(dict.fromkeys(choices))
    nearest = nearest_choice(name, listed)
    if nearest is not None:
        return f"did you mean {nearest!r}?"
    more = f" and {len(listed) - _SHOWN_CHOICES} more" if len(listed) > _SHOWN_CHOICES else ""
    return f"expected one of {', '.join(listed[:_SHOWN_CHOICES]) or 'none'}{more}"


def require_known(
    what: str, name: str, choices: Collection[str], *, hint: Callable[[str], str] | None = None
) -> None:
    """Refuses a user's name for something that does not exist.

    Args:
        what: Kind of thing that is named, for the message.
        name: Name that the user gave.
        choices: The names that exist.
        hint: Returns the hint, given the nearest choice, or the first one if none is near.

    Raises:
        SpecError: The name is no choice.
    """
    if name in choices:
        return
    nearest = nearest_choice(name, choices) or next(iter(choices), None)
    raise SpecError(
        f"unknown {what}: {name!r}\n  {propose(name, choices)}",
        hint=None if hint is None or nearest is None else hint(nearest),
    )


def to_dict(error: BaseException) -> dict[str, Any]:
    """Returns an error as JSON types, to be sent to another process.

    Args:
        error: Any error; one that is not a `PipelineError` becomes a `RunError` that quotes it.

    Returns:
        `kind`, `message`, `hint` and, where the class has any, `details`.
    """
    if not isinstance(error, PipelineError):
        return {"kind": RunError.__name__, "message": f"{type(error).__name__}: {error}", "hint": None}
    data: dict[str, Any] = {"kind": type(error).__name__, "message": error.message, "hint": error.hint}
    if error.details:
        data["details"] = {name: getattr(error, name) for name in error.details}
    return data


def from_dict(data: Mapping[str, Any]) -> PipelineError:
    """Returns the error that `to_dict` described; data that makes no sense never raises.

    Args:
        data: Output of `to_dict` in another process. A class that this version does not know becomes a
            `PipelineError`, and details that its class does not have, or has as another type, are left out.
    """
    hint = data.get("hint")
    kind = error_named(str(data.get("kind")))
    error = kind(str(data.get("message")), hint=None if hint is None else str(hint))
    found = data.get("details")
    details = found if isinstance(found, Mapping) else {}
    for name in kind.details:
        value, default = details.get(name), getattr(kind, name)
        if isinstance(value, int if default is None else type(default)):
            setattr(error, name, value)
    return error


class SpecError(PipelineError):
    """A model spec, or a command's use of one, is wrong; no work was started."""

    exit_code = 2


class StageError(PipelineError):
    """A stage of the build failed; the old bundle, if any, is untouched."""


class SourceError(StageError):
    """A source model could not be fetched, or is not a model that can be prepared."""


class VerificationError(StageError):
    """A prepared model does not answer as its source does."""


class ChildError(PipelineError):
    """A child process died, hung past its deadline, or answered with something unreadable."""


class ChildKilledError(ChildError):
    """A child process got no more memory, or was killed from outside, mostly by the kernel for want of it."""


class ChildTimeoutError(ChildError):
    """A child process was stopped because its deadline passed."""


class BundleError(PipelineError):
    """A bundle cannot be read or written."""

    exit_code = 3


class IntegrityError(BundleError):
    """The bytes of a bundle are not the bytes that were recorded."""


class LoadError(PipelineError):
    """No session could be made from a bundle on this machine."""

    exit_code = 4


class NoVariantError(LoadError):
    """A bundle is intact, and has no variant for this machine or for what was asked for."""


class LoadTimeoutError(LoadError):
    """A load was cancelled because its deadline passed."""

    HINT = "give a longer timeout_s, or none to wait for as long as it takes"


class LaunchError(PipelineError):
    """A program of the user's cannot be run."""

    exit_code = 126  # as of a shell


class ProgramNotFoundError(LaunchError):
    """There is no program of the name that was given."""

    exit_code = 127


class ExportError(PipelineError):
    """A bundle cannot be laid out for another server as it was asked for, or not in that place."""


class PoolError(PipelineError):
    """A pool of sessions cannot be made, or a request cannot be served by it."""


class PoolClosedError(PoolError):
    """A pool was closed before, or while, it was asked."""


class NoRoomError(PoolError):
    """A pool has no memory for a request or an answer now."""


class RequestTimeoutError(PoolError):
    """A request was not answered before its deadline."""


class InvalidRequestError(PoolError):
    """A request names inputs that the model lacks, leaves some out, or brings arrays of another type."""


class RunError(PoolError):
    """ONNX Runtime refused a request in a worker, which goes on."""


class WorkerDiedError(PoolError):
    """A worker process ended while it had a request, or before it was ready.

    Attributes:
        pid: Its process number; 0 if it never had one.
        returncode: Exit code; negative for a signal's number; None if that is not known.
    """

    details = ("pid", "returncode")
    pid: int = 0
    returncode: int | None = None


class HostError(PipelineError):
    """The host of loaded models does not run, cannot be started or trusted, or broke the protocol."""


class HostDiedError(HostError):
    """The host ended while it had a request, which may be sent again."""


class RegistryError(PipelineError):
    """A registry cannot do what it was asked for."""

    exit_code = 5


class RegistryUnavailableError(RegistryError):
    """A registry cannot be reached, is overloaded, or stops in the middle of an answer; later it may do.

    Attributes:
        retry_after_s: Seconds it asked to be left alone for; 0 if it did not say.
    """

    details = ("retry_after_s",)
    retry_after_s: float = 0.0


class AccessDeniedError(RegistryError):
    """A registry wants other credentials than those it was given, or knows them and says no."""


class NotPublishedError(RegistryError):
    """A registry has no model, version, label or alias of that name."""


class ConflictError(RegistryError):
    """Somebody else changed the same thing in a registry, again and again."""


class SignatureError(IntegrityError):
    """A bundle that has to be signed is not, or not by the key that was asked for."""


class MissingExtraError(PipelineError):
    """A feature was used whose optional dependency is not installed."""


class CacheError(PipelineError):
    """A private folder, such as the cache, cannot be made, or others could change what is in it."""


def hint_of_os_error(error: OSError, *folders: str) -> str | None:
    """Returns the command that shows how full the disks of some folders are, where that is what failed."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    return quoted("df", "-h", *folders) if full else None


def describe_exit(code: int) -> str:
    """Returns how a process ended, from its exit code, negative for a signal."""
    import signal  # a load needs none of it

    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def error_named(name: str) -> type[PipelineError]:
    """Returns the error class of that name, or `PipelineError` for a name this version does not know."""
    kind = globals().get(name)
    return kind if isinstance(kind, type) and issubclass(kind, PipelineError) else PipelineError
