"""How processes that serve a model open its bundle; JSON types only, so that they can be sent."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from dataclasses import dataclass

from ortprep.bundle.loader_config import PRECISIONS
from ortprep.errors import PoolError
from ortprep.runtime.loading.load_options import DIGEST_POLICIES, check_choice
from ortprep.runtime.loading.variant_selection import FASTEST


@dataclass(frozen=True)
class ModelLoadOptions:
    """How models are opened, whatever they are.

    Attributes:
        target: As `load` takes it; so are `precision`, `digests` and `require_signature`.
        threads: Most threads of a session; None for what Ray reserved, else for the process's share.
        may_spin: Whether idle threads may spin.
        session_options: The caller's, of every session; they win over the bundle's and over `threads`.

    Raises:
        PipelineError: A choice is not one of those there are, or a number is no count.
    """

    target: str | None = None
    precision: str = FASTEST
    digests: str = "changed"
    require_signature: str | None = None
    threads: int | None = None
    may_spin: bool = False
    session_options: Mapping[str, str | int | bool] | None = None

    def __post_init__(self) -> None:
        check_choice("precision", self.precision, (FASTEST, *PRECISIONS))
        check_choice("digests", self.digests, DIGEST_POLICIES)
        require_counts(threads=self.threads)


def require_counts(*, minimum: int = 1, **values: int | None) -> None:
    """Raises `PoolError` unless all values are whole numbers from `minimum`, or None."""
    for name, value in values.items():
        number: object = value
        is_whole = isinstance(number, numbers.Integral) and not isinstance(number, bool)
        if value is not None and not (is_whole and value >= minimum):
            raise PoolError(f"bad {name}\n  expected a whole number from {minimum}, got {value!r}")


def require_numbers(**values: object) -> None:
    """Raises `PoolError` unless all values are numbers, infinity included."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, numbers.Real) or value != value:
            raise PoolError(f"bad {name}\n  expected a number, got {value!r}")


def require_positive(**values: float | None) -> None:
    """Raises `PoolError` unless all values are numbers above 0, infinity included, or None."""
    for name, value in values.items():
        number: object = value
        is_number = isinstance(number, numbers.Real) and not isinstance(number, bool)
        if value is not None and not (is_number and 0 < value <= math.inf):
            raise PoolError(f"bad {name}\n  expected a number above 0, got {value!r}")
