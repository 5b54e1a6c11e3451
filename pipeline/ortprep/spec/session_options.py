"""A spec's session and provider options, checked against what the installed ONNX Runtime knows.

ONNX Runtime itself accepts unknown session config keys and invalid values silently.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from functools import lru_cache, partial
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from ortprep.options import (
    CUDA,
    NEWEST,
    Scalar,
    check_provider_options,
    check_session_config,
    find_unlisted,
    is_newer,
    known_attributes,
)
from ortprep.spec.fields import SpecSection, Threads
from ortprep.spec.yaml_text import Place

log = logging.getLogger(__name__)

_EFFECTS = {option.name: option.effect for option in known_attributes(NEWEST)}


def _option(name: str) -> Any:
    return Field(default=None, description=_EFFECTS[name])


def _check_printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError("expected text without control characters")
    return text


class SessionAttributes(SpecSection):
    """Attributes of `onnxruntime.SessionOptions`; ONNX Runtime's default holds where none is given."""

    intra_op_num_threads: Threads | None = _option("intra_op_num_threads")
    inter_op_num_threads: Threads | None = _option("inter_op_num_threads")
    execution_mode: Literal["ORT_SEQUENTIAL", "ORT_PARALLEL"] | None = _option("execution_mode")
    execution_order: Literal["DEFAULT", "PRIORITY_BASED", "MEMORY_EFFICIENT"] | None = _option(
        "execution_order"
    )
    enable_cpu_mem_arena: bool | None = _option("enable_cpu_mem_arena")
    enable_mem_pattern: bool | None = _option("enable_mem_pattern")
    enable_mem_reuse: bool | None = _option("enable_mem_reuse")
    use_deterministic_compute: bool | None = _option("use_deterministic_compute")
    log_severity_level: Annotated[int, Field(ge=-1, le=4)] | None = _option("log_severity_level")
    log_verbosity_level: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = _option("log_verbosity_level")
    logid: Annotated[str, AfterValidator(_check_printable)] | None = _option("logid")

    @property
    def attributes(self) -> dict[str, int | bool | str]:
        """Given attributes, with their values."""
        values = {name: getattr(self, name) for name in SessionAttributes.model_fields}
        return {name: value for name, value in values.items() if value is not None}


def find_option_problems(runtime: object, *, version: str) -> Iterator[tuple[Place, str]]:
    """Yields the option problems in a spec's `runtime` data, invalid or not, with their places."""
    checks = (("session_config", check_session_config), ("cuda", partial(check_provider_options, CUDA)))
    for section, find_problems in checks:
        for key, value in _scalars(runtime, section):
            for problem in find_problems({key: value}, version=version):
                yield ("runtime", section, key), problem


def warn_if_newer(runtime: object, *, version: str | None) -> None:
    """Logs, once for each set of options, that an ONNX Runtime is newer than the tables of options.

    Args:
        runtime: A spec's `runtime` data.
        version: The installed ONNX Runtime; None if there is none.
    """
    if version is not None and is_newer(version):
        keys = find_unlisted((key for key, _ in _scalars(runtime, "session_config")), version=version)
        options = find_unlisted((key for key, _ in _scalars(runtime, "cuda")), provider=CUDA, version=version)
        _warn(version, keys + options)


@lru_cache(maxsize=64)
def _warn(version: str, unlisted: tuple[str, ...]) -> None:
    unchecked = f"; accepted unchecked: {', '.join(unlisted)}" if unlisted else ""
    log.warning(
        "ONNX Runtime %s is newer than %s, the newest in the table of options%s",
        version,
        NEWEST,
        unchecked,
    )


def _scalars(runtime: object, section: str) -> Iterator[tuple[str, Scalar]]:
    entries: Any = runtime.get(section) if isinstance(runtime, Mapping) else None
    if isinstance(entries, Mapping):
        yield from ((key, value) for key, value in entries.items() if isinstance(value, Scalar))
