"""Which variant and which files a load takes, remembered for the next process.

To read a bundle, select a variant and check it takes longer than a small model's session, and comes out the
same as long as neither the bundle nor the machine changes. So it is remembered, beside the digests: by the
stamps of `loader.json` and of the variant's files, the caller's options, and everything of the machine
that the selection looks at. If any of it changed, the load decides again.
"""

from __future__ import annotations

import ast
import os
import sys
from typing import TYPE_CHECKING, Any

from ortprep import __version__
from ortprep.bundle import LOADER_FILE
from ortprep.bundle.file_memory import (
    Stamp,
    cache_folder,
    entry_path,
    find_stamp,
    read_entry,
    write_entry,
)
from ortprep.bundle.session_record import ProviderRecord, SessionOptionsRecord, SessionPlan
from ortprep.runtime.loading.load_options import Settings
from ortprep.runtime.loading.session import CPU, CUDA, KNOWN_ATTRIBUTES
from ortprep.runtime.machine.processor import read_cpuid

if TYPE_CHECKING:
    from ortprep.bundle.loader_config import FirstPhase, LoaderConfig, Variant
    from ortprep.runtime.loading.load_options import LoadOptions
    from ortprep.runtime.loading.variant_files import Comparison

_RULES = 3
"""Counted up whenever something is refused that was not before."""

_MAX_ENTRY_BYTES = 64 * 1024
_BOOT_ID = "/proc/sys/kernel/random/boot_id"


SWITCHES = frozenset(
    {
        "enable_cpu_mem_arena",
        "enable_mem_pattern",
        "enable_mem_reuse",
        "session.disable_cpu_ep_fallback",
        "session.disable_prepacking",
        "session.inter_op.allow_spinning",
        "session.intra_op.allow_spinning",
        "session.prepack.enable_parallel",
        "session.set_denormal_as_zero",
        "session.use_device_allocator_for_initializers",
        "session.use_memory_mapped_ort_model",
        "session.use_ort_model_bytes_for_initializers",
        "cudnn_conv1d_pad_to_nc1d",
        "cudnn_conv_use_max_workspace",
        "enable_cudnn",
        "fuse_conv_bias",
        "prefer_nhwc",
        "use_ep_level_unified_stream",
        "use_tf32",
    }
)
MAX_COUNTS = {
    "device_id": 64,
    "external_data_loader_reading_threads": 64,
    "inter_op_num_threads": 1024,
    "intra_op_num_threads": 1024,
}
CHOICES = {
    "arena_extend_strategy": ("kNextPowerOfTwo", "kSameAsRequested"),
    "cudnn_conv_algo_search": ("DEFAULT", "EXHAUSTIVE", "HEURISTIC"),
    "execution_mode": ("ORT_PARALLEL", "ORT_SEQUENTIAL"),
    "execution_order": ("DEFAULT", "MEMORY_EFFICIENT", "PRIORITY_BASED"),
}
"""With those above, the options that bundles usually set, and their values. A remembered load that sets
others is not used: any program of the user may have written it, and the table of options, which says what a
bundle may set, takes longer to import than a load."""


class ResolvedVariant(Settings):
    """A variant that fits this machine, whose files and options were checked.

    Attributes:
        root: The bundle's folder, free of links.
        loader: Stamp of its `loader.json`.
        files: Path, free of links, and stamp of every file that was checked.
        passed_over: Variants the bundle prefers to it, each with what this machine lacks for it.
        compute_capabilities: Compute capability per CUDA ordinal; None where no variant asks for one.
        config: The bundle's loader config, once it was read.
        comparison: What is still being compared: no session may be given out before it ends.
        is_settled: Whether every file would have shown, by its stamp, that it was written to since then.
    """

    root: str
    loader: Stamp
    bundle: str
    name: str
    steady: SessionPlan
    first: SessionPlan | None
    files: tuple[tuple[str, Stamp], ...]
    passed_over: tuple[tuple[str, tuple[str, ...]], ...]
    compute_capabilities: tuple[tuple[int, int], ...] | None
    config: LoaderConfig | None = None
    comparison: Comparison | None = None
    is_settled: bool = False

    @property
    def uses_gpu(self) -> bool:
        """Whether it runs on a GPU."""
        return any(provider.name == CUDA for provider in self.steady.providers)

    def find_changed(self) -> tuple[str, ...]:
        """Returns the names of the files that were replaced or written to since they were checked.

        The change time does not count: a build that shares a file by a hard link sets it.
        """
        return tuple(
            os.path.basename(path) for path, stamp in self.files if find_stamp(path)[:4] != stamp[:4]
        )


_REMEMBERED = tuple(name for name in ResolvedVariant.__annotations__ if name not in vars(ResolvedVariant))
"""What is the same for later processes."""


def recall(root: str, options: LoadOptions) -> ResolvedVariant | None:
    """Returns what was decided for the same bundle, request and machine; None if any of it changed."""
    loader = find_stamp(f"{root}/{LOADER_FILE}")
    key = _key(root, options)
    if key is None or not loader[1]:
        return None
    content = read_entry(_entry(loader, options), max_bytes=_MAX_ENTRY_BYTES)
    if content is None:
        return None
    try:
        remembered, values = ast.literal_eval(content.decode())
        if remembered != key:
            return None
        resolved = _restore(values)
        if resolved.loader != loader or any(find_stamp(path) != stamp for path, stamp in resolved.files):
            return None
        checked = {path for path, _ in resolved.files}
        plans = [plan for plan in (resolved.steady, resolved.first) if plan is not None]
        if not {plan.model for plan in plans} <= checked or not all(map(is_usual, plans)):
            return None
        if not all(path.startswith(f"{root}/") for path in checked):
            return None
    except (ValueError, TypeError, KeyError, AttributeError, SyntaxError, RecursionError, MemoryError):
        return None
    capabilities = resolved.compute_capabilities
    return resolved if capabilities is None or capabilities == read_compute_capabilities() else None


def remember(resolved: ResolvedVariant, options: LoadOptions) -> None:
    """Has `recall` return it from now on, unless a file changed so lately that it may do so again unseen."""
    key = _key(resolved.root, options)
    is_same = find_stamp(f"{resolved.root}/{LOADER_FILE}") == resolved.loader
    plans = (resolved.steady, resolved.first or resolved.steady)
    if key is None or not is_same or not resolved.is_settled or not all(map(is_usual, plans)):
        return
    values = {name: _plain(getattr(resolved, name)) for name in _REMEMBERED}
    content = repr((key, values)).encode()
    if len(content) > _MAX_ENTRY_BYTES:
        return
    try:
        write_entry(_entry(resolved.loader, options), content)
    except OSError as error:
        import logging

        logging.getLogger(__name__).debug("cannot remember what was loaded: %s", error)


def read_compute_capabilities() -> tuple[tuple[int, int], ...]:
    """Returns the compute capability of every GPU, by CUDA ordinal."""
    from ortprep.runtime.machine.hardware import read_hardware

    return tuple(gpu.compute_capability for gpu in read_hardware(gpus=True).gpus)


def _entry(loader: Stamp, options: LoadOptions) -> str | None:
    selection = "".join(f"-{value}" for value in options.selection_key)
    return entry_path(cache_folder("loads"), loader, selection)


def _key(root: str, options: LoadOptions) -> tuple[Any, ...] | None:
    """Returns all that a decision depends on beside the files; None if it is not to be remembered."""
    named = (options.target or "any", options.precision)
    if options.digests != "changed" or not all(map(_is_plain_name, named)):
        return None
    machine = _read_machine()
    if machine is None:
        return None
    onnxruntime = sys.modules["onnxruntime"]
    software = (__version__, _RULES, onnxruntime.__version__, tuple(onnxruntime.get_available_providers()))
    return root, options.selection_key, software, machine


def _is_plain_name(name: object) -> bool:
    """Returns whether a caller's text can be part of a file's name."""
    if not isinstance(name, str) or not name.isascii() or len(name) > 128:
        return False
    return name.replace("-", "").replace("_", "").replace(".", "").isalnum()


def _read_machine() -> tuple[Any, ...] | None:
    """Returns what identifies the processor; None if the system does not have it.

    Its features are listed by the kernel, so they stay until the next boot; but an emulator, which has the
    host's boot number, may show others.
    """
    try:
        handle = os.open(_BOOT_ID, os.O_RDONLY | os.O_CLOEXEC)
        try:
            boot = os.read(handle, 64).decode("ascii").strip()
        finally:
            os.close(handle)
    except (OSError, UnicodeDecodeError):
        return None
    return boot, os.uname().machine, read_cpuid()


def _plain(value: Any) -> Any:
    """Returns named tuples as tuples and mappings as dictionaries, which Python's literals can express."""
    if isinstance(value, tuple):
        return tuple(map(_plain, value))
    return {key: _plain(item) for key, item in value.items()} if hasattr(value, "items") else value


def is_usual(plan: SessionPlan | Variant | FirstPhase) -> bool:
    """Returns whether a plan sets nothing but the usual options, where and to what they may be set."""
    attributes, entries = plan.session_options.attributes, plan.session_options.config_entries
    options = [attributes, entries, *(provider.options for provider in plan.providers)]
    return (
        KNOWN_ATTRIBUTES.issuperset(attributes)
        and all("." in name for name in entries)
        and all(provider.name == CUDA or provider == (CPU, {}) for provider in plan.providers)
        and not any("." in name or name in KNOWN_ATTRIBUTES for one in plan.providers for name in one.options)
        and all(_is_usual_value(name, value) for chosen in options for name, value in chosen.items())
    )


def _is_usual_value(name: str, value: object) -> bool:
    """Returns whether an option that a cache entry has is one that bundles may set."""
    if name in SWITCHES:
        return value in (True, False, "0", "1")
    if name in MAX_COUNTS:
        text = str(value)
        return text.isascii() and text.isdecimal() and len(text) < 5 and int(text) <= MAX_COUNTS[name]
    return value in CHOICES.get(name, ())


def _restore(values: Any) -> ResolvedVariant:
    if tuple(values) != _REMEMBERED:
        raise ValueError
    first = values["first"]
    plans = {
        "steady": _restore_plan(values["steady"]),
        "first": None if first is None else _restore_plan(first),
    }
    return ResolvedVariant(**{**values, **plans})


def _restore_plan(values: Any) -> SessionPlan:
    model, options, providers = values
    return SessionPlan(
        model, SessionOptionsRecord(*options), tuple(ProviderRecord(*provider) for provider in providers)
    )
