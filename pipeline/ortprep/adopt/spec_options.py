"""The sections of a spec that keep an application's options. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ortprep.adopt.model_use import ModelUse
from ortprep.options import (
    CUDA,
    Scalar,
    check_attributes,
    check_provider_options,
    check_session_config,
)
from ortprep.runtime.loading.session import CPU
from ortprep.stages.core.inputs.agreement import MIN_AUTO_SAMPLES

_PLACED_BY_JOB = frozenset({"device_id", "user_compute_stream"})
"""Provider options that belong to one process, not to a bundle."""


@dataclass(frozen=True)
class SpecOptions:
    """What a spec says beside its source and inputs.

    Attributes:
        sections: Sections of the spec by name: `targets`, `runtime`, `tune`.
        left_out: Options of the application that a spec cannot keep, one phrase each.
    """

    sections: Mapping[str, Any]
    left_out: tuple[str, ...]

    def with_samples(self, pattern: str, count: int, convert: Mapping[str, Any] | None) -> SpecOptions:
        """Returns the options with real inputs, and with a conversion if there are enough of them.

        Args:
            pattern: The glob of their files.
            count: Number of files.
            convert: Section `convert`; None for none.
        """
        sections, left_out = dict(self.sections), self.left_out
        if count:
            sections["samples"] = pattern
            # The inputs have shapes of their own, which nobody weighed.
            tune = {
                name: value for name, value in sections.pop("tune", {}).items() if name != "shape_weights"
            }
            sections |= {"tune": tune} if tune else {}
        if convert is not None and count >= MIN_AUTO_SAMPLES:
            sections["convert"] = convert
        elif convert is not None:
            left_out += (f"precision: expected at least {MIN_AUTO_SAMPLES} runs with arrays, got {count}",)
        return SpecOptions(sections, left_out)


def options_of(use: ModelUse, *, version: str) -> SpecOptions:
    """Returns the sections that make a bundle keep an application's options.

    What stands in `runtime` is not searched by `tune`.

    Args:
        use: How the application uses the model.
        version: Version of ONNX Runtime that the spec is checked against.
    """
    left_out: list[str] = []
    sections = {
        "targets": ["cuda" if CUDA in use.model.obtained else "cpu"],
        "runtime": _runtime_section(use, version, left_out),
        "tune": _tune_section(use),
    }
    if use.excluded_shapes:
        left_out.append(f"sets of shapes with other values of small inputs: {use.excluded_shapes}")
    others = [name for name in use.model.obtained if name not in (CPU, CUDA)]
    left_out += [f"{name}: bundles support only CPU and CUDA" for name in others]
    if use.model.obstacle is not None:
        left_out.append(f"{use.model.obstacle}, so `ortprep run` leaves its session as it is")
    return SpecOptions({name: section for name, section in sections.items() if section}, tuple(left_out))


def _runtime_section(use: ModelUse, version: str, left_out: list[str]) -> dict[str, Any]:
    options = use.model.options

    def keep(chosen: Mapping[str, Scalar], check: Callable[..., tuple[str, ...]]) -> dict[str, Scalar]:
        problems = {name: check({name: value}, version=version) for name, value in chosen.items()}
        left_out.extend(f"{name}={chosen[name]}: {texts[0]}" for name, texts in problems.items() if texts)
        return {name: value for name, value in chosen.items() if not problems[name]}

    section: dict[str, Any] = keep(options.attributes, check_attributes)
    section["session_config"] = keep(options.config_entries, check_session_config)
    for provider in use.model.providers:
        own = {name: value for name, value in provider.options.items() if name not in _PLACED_BY_JOB}
        if provider.name == CUDA and CUDA in use.model.obtained:
            section["cuda"] = keep(
                own, lambda chosen, version: check_provider_options(CUDA, chosen, version=version)
            )
        elif own and provider.name != CPU:
            left_out.append(f"options of {provider.name}: {', '.join(own)}")
    return {name: value for name, value in section.items() if value != {}}


def _tune_section(use: ModelUse) -> dict[str, Any]:
    section: dict[str, Any] = {"runs_per_load": use.runs_per_load} if use.runs else {}
    if len(use.weights) > 1:
        section["shape_weights"] = list(use.weights)
    return section
