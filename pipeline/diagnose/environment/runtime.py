"""ONNX Runtime as it really is here: imported, its libraries loaded, a session made on every provider."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.bundle.codec import decode
from pipeline.diagnose.environment import inside
from pipeline.diagnose.environment.facts import Library, Provider, Runtime
from pipeline.diagnose.environment.packages import is_known, requirement_for
from pipeline.errors import ChildError
from pipeline.runtime.child import run_child

_TIMEOUT_S = 120.0
_WITHOUT_KERNELS = frozenset({"AzureExecutionProvider"})
"""Providers that compute nothing on this machine; the CPU wheel lists one that sends inputs elsewhere."""

_CAUSES = (
    re.compile(r"Failed to load library \S+ with error: (?P<cause>[^\n]+)"),
    re.compile(r"(?P<cause>(?:CUDA|CUDNN|CUBLAS) failure \d+: [^;\n]+)"),
    re.compile(r"(?P<cause>Please install [^\n]+)"),
    re.compile(r"(?P<cause>Failed to create \w+ExecutionProvider[^\n]*)"),
)
"""How ONNX Runtime says why a provider was not obtained, the most telling first."""

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def read_runtime() -> tuple[Runtime, tuple[dict[str, Any], ...]]:
    """Imports ONNX Runtime in a child, and tries to load what its providers link to.

    Returns:
        What the import came to, and what `parse_libraries` makes libraries of.
    """
    try:
        reply = run_child(f"{inside.__name__}:describe_runtime", {}, timeout_s=_TIMEOUT_S).value
    except ChildError as error:
        return Runtime(error=_one_line(error.message)), ()
    return decode(Runtime, reply["runtime"]), tuple(reply["libraries"])


def parse_libraries(
    found: Sequence[Mapping[str, Any]], cuda_version: str, requirements: Sequence[str]
) -> tuple[Library, ...]:
    """Returns libraries with the packages that bring them, those that are missing first.

    Args:
        found: What the child said of each.
        cuda_version: CUDA that ONNX Runtime was built with.
        requirements: What its wheel requires, extras included.
    """
    libraries = [
        decode(Library, {**entry, "package": requirement_for(str(entry["name"]), cuda_version, requirements)})
        for entry in found
    ]
    return tuple(sorted(libraries, key=lambda library: (library.error is None, library.name)))


def try_providers(names: Sequence[str]) -> tuple[Provider, ...]:
    """Makes a session on each provider, each in a fresh process."""
    return tuple(_try_provider(name) for name in names if name not in _WITHOUT_KERNELS)


def _try_provider(name: str) -> Provider:
    try:
        reply = run_child(f"{inside.__name__}:try_provider", {"provider": name}, timeout_s=_TIMEOUT_S).value
    except ChildError as error:
        return Provider(name, usable=False, reason=_one_line(error.message))
    return parse_attempt(name, reply)


def parse_attempt(name: str, reply: Mapping[str, Any]) -> Provider:
    """Returns what a child's attempt at a session came to.

    Args:
        name: The provider.
        reply: `failure`, `said` and `maps`, as the child gave them.
    """
    libraries = tuple(file for file in reply["maps"] if _is_telling(Path(file).name))
    failure = reply["failure"]
    if failure is None:
        return Provider(name, usable=True, libraries=libraries)
    return Provider(name, usable=False, reason=parse_reason(reply["said"], failure), libraries=libraries)


def parse_reason(said: str, failure: str) -> str:
    """Returns why a provider was not obtained, in one line.

    Args:
        said: What ONNX Runtime printed; it says the cause there, and nowhere else.
        failure: What was raised; taken where nothing that was printed tells.
    """
    text = _COLOURS.sub("", said)
    for source in (text, failure):
        for cause in _CAUSES:
            found = cause.search(source)
            if found is not None:
                return _one_line(found["cause"])
    # The first line names a model that the user does not know of.
    return _one_line(failure.partition("\n")[2] or failure)


def _is_telling(name: str) -> bool:
    return is_known(re.sub(r"(\.so\.\d+)\..*", r"\1", name)) or name.startswith("libonnxruntime")


def _one_line(text: str) -> str:
    return " ".join(text.split())
