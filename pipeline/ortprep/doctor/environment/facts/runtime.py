"""The installed ONNX Runtime, tried: imported, its libraries loaded, a session made on every provider."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from ortprep.bundle.codec import decode
from ortprep.children.child import run_child
from ortprep.doctor.environment.facts import ort_probe
from ortprep.doctor.environment.facts.packages import requirement_for
from ortprep.doctor.environment.facts.records import InstalledRuntime, Library, Provider
from ortprep.errors import ChildError

_TIMEOUT_S = 120.0
_WITHOUT_KERNELS = frozenset({"AzureExecutionProvider"})
"""Providers that compute nothing on this machine; the CPU wheel lists one that sends inputs elsewhere."""

_CAUSES = (
    re.compile(r"Failed to load library \S+ with error: (?P<cause>[^\n]+)"),
    re.compile(r"(?P<cause>(?:CUDA|CUDNN|CUBLAS) failure \d+: [^;\n]+)"),
    re.compile(r"(?P<cause>Please install [^\n]+)"),
    re.compile(r"(?P<cause>Failed to create \w+ExecutionProvider[^\n]*)"),
)
"""Messages in which ONNX Runtime says why a provider is missing, the most specific first."""

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def read_runtime() -> tuple[InstalledRuntime, tuple[Library, ...]]:
    """Imports ONNX Runtime in a child, and tries to load the libraries that its providers compute with.

    Returns:
        The import's result, and the libraries, without the packages that bring them.
    """
    try:
        reply = run_child(ort_probe.describe_runtime, {}, timeout_s=_TIMEOUT_S).value
    except ChildError as error:
        return InstalledRuntime(error=_one_line(error.message)), ()
    return decode(InstalledRuntime, reply["runtime"]), decode(tuple[Library, ...], reply["libraries"])


def add_packages(libraries: Sequence[Library], cuda_version: str) -> tuple[Library, ...]:
    """Returns libraries with the packages that bring them, missing ones first."""
    named = [replace(one, package=requirement_for(one.name, cuda_version)) for one in libraries]
    return tuple(sorted(named, key=lambda library: (library.error is None, library.name)))


def try_providers(names: Sequence[str]) -> tuple[Provider, ...]:
    """Makes a session on each provider, each in a fresh process."""
    return tuple(_try_provider(name) for name in names if name not in _WITHOUT_KERNELS)


def _try_provider(name: str) -> Provider:
    try:
        reply = run_child(ort_probe.try_provider, {"provider": name}, timeout_s=_TIMEOUT_S)
    except ChildError as error:
        return Provider(name, usable=False, reason=_one_line(error.message))
    return judge_attempt(name, decode(ort_probe.ProviderAttempt, reply.value))


def judge_attempt(name: str, attempt: ort_probe.ProviderAttempt) -> Provider:
    """Returns a provider with the outcome of an attempt to make a session on it."""
    if attempt.failure is None:
        return Provider(name, usable=True)
    return Provider(name, usable=False, reason=parse_reason(attempt.output, attempt.failure))


def parse_reason(output: str, failure: str) -> str:
    """Returns why a provider was not obtained, in one line.

    Args:
        output: What ONNX Runtime printed; it says the cause there, and nowhere else.
        failure: What was raised; used if no cause was printed.
    """
    text = _COLOURS.sub("", output)
    for source in (text, failure):
        for cause in _CAUSES:
            if match := cause.search(source):
                return _one_line(match["cause"])
    # The first line names a model that the user does not know of.
    return _one_line(failure.partition("\n")[2] or failure)


def _one_line(text: str) -> str:
    return " ".join(text.split())
