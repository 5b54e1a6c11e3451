"""The options of a load, its deadline, and how it is stopped from another thread."""

from __future__ import annotations

import _thread
import math
import os
import time
from typing import TYPE_CHECKING, Any, Literal, Self, dataclass_transform

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import TypeAlias

    import onnxruntime

    from ortprep.bundle.session_record import SessionPlan
    from ortprep.errors import LoadError

    SessionOptions: TypeAlias = onnxruntime.SessionOptions | Mapping[str, str | int | bool]
    SessionFactory: TypeAlias = Callable[..., onnxruntime.InferenceSession]


PRECISION_VARIABLE = "ORTPREP_PRECISION"
"""Precision of every load that does not name one: `fp32` turns all reduced precision off at once."""

DIGESTS_VARIABLE = "ORTPREP_DIGESTS"
"""Digest policy of every load whose own is `changed`: `off` in an image that is named by its digest."""

DIGEST_POLICIES = ("changed", "full", "off")
DigestPolicy = Literal["changed", "full", "off"]
"""`changed`: hash the variant's files that changed since they were last hashed on this machine; `full`: hash
every file of the bundle in this process and look for added ones, and make every session of files that nobody
else can change, if need be of copies; `off`: trust the disk."""

CheckPolicy = Literal["none", "golden"]
"""`golden`: run the bundle's golden sample and compare, which is a warm-up run as well."""

Phases = Literal["auto", "first", "steady"]
"""`steady`: the variant's own plan, the fastest per run; `first`: that of its first phase, which is ready
sooner, where it records one; `auto`: the first, and the steady one in its place as soon as it is ready,
where that pays."""


class Deadline:
    """A moment after which a load is given up, `timeout_s` from now; None for no deadline."""

    def __init__(self, timeout_s: float | None, *, subject: str) -> None:
        seconds = None if timeout_s is None else float(timeout_s)
        if seconds is not None and not seconds >= 0:
            hint = "load(…, timeout_s=30), or None for no deadline"
            raise _bad_argument("timeout_s", timeout_s, "seconds, 0 or more", hint)
        self._timeout_s = seconds
        self._subject = subject
        self._end = None if seconds is None else time.monotonic() + seconds

    def remaining_s(self) -> float | None:
        """Returns the seconds left, None without deadline; raises `LoadTimeoutError` if there are none."""
        if self._end is None:
            return None
        remaining_s = self._end - time.monotonic()
        if remaining_s <= 0:
            from ortprep.errors import LoadTimeoutError

            raise LoadTimeoutError(
                f"load took too long: {self._subject}\n"
                f"  expected a session within {self._timeout_s:g} s, got none",
                hint=LoadTimeoutError.HINT,
            )
        return remaining_s

    def acquire(self, lock: _thread.RLock) -> None:
        """Waits for a lock, which is then the caller's; raises `LoadTimeoutError` if the deadline passed."""
        while not lock.acquire(timeout=min(self.remaining_s() or math.inf, _thread.TIMEOUT_MAX)):
            pass


NO_DEADLINE = Deadline(None, subject="")


@dataclass_transform(kw_only_default=True, eq_default=False)
class Settings:
    """Base of classes with fields and defaults: to make a dataclass takes longer than to read a bundle."""

    def __init__(self, **values: Any) -> None:
        if unknown := values.keys() - type(self).__annotations__.keys():
            raise TypeError(f"{type(self).__name__} has no {', '.join(sorted(unknown))}")
        vars(self).update(values)

    def replace(self, **changes: Any) -> Self:
        """Returns the same with some of them changed."""
        return type(self)(**{**vars(self), **changes})


class LoadOptions(Settings):
    """The options of a load; they have the names of the arguments of `load`.

    `adapt` changes the plan that the bundle records. `threads` is the most that a session gets, and
    `may_spin` says whether idle ones may spin; the caller's own threads take precedence. `replacement`
    makes the session, with the arguments of `InferenceSession`, where an application asked for one on the
    bundle's source: only variants that take all that the source takes are loaded then. Where a signature is
    required, digests are `full`. A bundle of other files than `source` is refused. `session_options` are as
    `read_options` returns them.
    """

    target: str | None = None
    device_id: int | None = None
    digests: DigestPolicy = "changed"
    check: CheckPolicy = "none"
    precision: str = "fastest-within-gate"
    phases: Phases = "steady"
    deadline: Deadline = NO_DEADLINE
    session_options: Mapping[str, str | int | bool] | None = None
    adapt: Callable[[SessionPlan], SessionPlan] | None = None
    replacement: SessionFactory | None = None
    require_signature: str | os.PathLike[str] | None = None
    threads: int | None = None
    may_spin: bool = True
    source: Sequence[tuple[str, int, str, str]] | None = None

    if not TYPE_CHECKING:

        def __init__(self, **values: Any) -> None:
            super().__init__(**values)
            if self.require_signature is not None:
                self.digests = "full"
            if self.precision == "fastest-within-gate":
                self.precision = os.environ.get(PRECISION_VARIABLE) or self.precision
            if self.digests == "changed":
                self.digests = os.environ.get(DIGESTS_VARIABLE) or self.digests

    @property
    def selection_key(self) -> tuple[object, ...]:
        """Everything here that a variant is selected by."""
        return self.target, self.precision, self.check, self.device_id, self.replacement is not None


class Cancellation:
    """Stops a load, before it begins or during it.

    It takes no lock, since a garbage collector may call it in the middle of anything. Both sides write first
    and look then, so that one of them always sees the other.
    """

    def __init__(self) -> None:
        self._options: Any = None
        self._requested = False

    @property
    def requested(self) -> bool:
        """Whether the load is to stop."""
        return self._requested

    def cover(self, options: Any) -> None:
        """Makes the load with these `onnxruntime.SessionOptions` the one that is stopped."""
        self._options = options
        if self._requested:
            options.set_load_cancellation_flag(True)

    def release(self) -> None:
        """Leaves the options alone from now on: the load is over, and the session may share the flag."""
        self._options = None

    def request(self) -> None:
        """Asks the load to stop; ONNX Runtime does so at its next look."""
        self._requested = True
        options = self._options
        if options is not None:
            options.set_load_cancellation_flag(True)


def check_number(
    name: str, value: Any, *, example: int, whole: bool = False, minimum: float = -math.inf
) -> None:
    """Raises `LoadError` unless an argument is None or a number from `minimum`, a whole one if `whole`."""
    if value is None:
        return
    import numbers

    kind, expected = (numbers.Integral, "an integer") if whole else (numbers.Real, "a number")  # numpy's too
    if isinstance(value, bool) or not isinstance(value, kind) or value < minimum:
        expected += f" from {minimum}" if minimum > -math.inf else ""
        raise _bad_argument(name, value, f"{expected} or None", f"load(…, {name}={example})")


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Raises `LoadError` unless an argument has one of its allowed values."""
    if value not in choices:
        default = f"load(…, {name}={choices[0]!r}), which is the default"
        raise _bad_argument(name, value, f"one of {', '.join(choices)}", default)


def _bad_argument(name: str, value: object, expected: str, hint: str) -> LoadError:
    from ortprep.errors import LoadError

    return LoadError(f"bad argument of load: {name}={value!r}\n  expected {expected}", hint=hint)
