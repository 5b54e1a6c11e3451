"""A model opened in a process of a node: every batch runs on the session that is there for its shapes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

from ortprep.bundle.loader_config import read_loader_config
from ortprep.errors import LoadError
from ortprep.quoting import quoted
from ortprep.runtime.loading.bundle_loader import open_folder
from ortprep.runtime.loading.forking import with_one_thread
from ortprep.runtime.loading.load_options import DigestPolicy, LoadOptions
from ortprep.runtime.loading.model_load_options import ModelLoadOptions
from ortprep.runtime.loading.opened_bundle import OpenedBundle, find_threads
from ortprep.runtime.loading.sources import locate
from ortprep.runtime.loading.variant_selection import needs_gpu, read_machine, select_variant
from ortprep.runtime.session.session_runner import SessionRunner, ShapeDispatcher, open_buckets
from ortprep.runtime.tensors.element_types import Array
from ortprep.runtime.tensors.signatures import read_signature

if TYPE_CHECKING:
    import onnxruntime

    from ortprep.bundle.loader_config import LoaderConfig


def open_model(
    bundle: str, options: ModelLoadOptions, *, name: str = "", device_id: int | None = None
) -> OpenedModel:
    """Opens a bundle and its buckets; each is checked with its golden sample, which warms it up.

    Errors name the model `name`, or as the bundle does; raises as `open_variants`.
    """
    opened, buckets = open_variants(bundle, options, device_id=device_id)
    return OpenedModel(name or opened.config.name, opened, buckets)


def open_variants(
    bundle: str, options: ModelLoadOptions, *, device_id: int | None
) -> tuple[OpenedBundle, list[OpenedBundle]]:
    """Opens a bundle's variant for all shapes, and its buckets; each answers its golden sample.

    Args:
        bundle: A folder of this machine, or a reference to a registry, which is pulled unless it is here.
        options: How.
        device_id: CUDA ordinal as this process sees it; None for the CPU.

    Raises:
        PipelineError: As `load`; `LoadError` if there is no variant for the device.
    """
    root = locate(bundle, require_signature=options.require_signature)

    on_gpu = device_id is not None
    load_options = LoadOptions(
        target=choose_target(root, options, on_gpu=on_gpu),
        device_id=device_id,
        digests=cast(DigestPolicy, options.digests),
        check="golden",
        phases="steady" if options.for_fork else "auto",
        adapt=with_one_thread if options.for_fork else None,
        threads=find_threads() if options.threads is None else options.threads,
        may_spin=options.may_spin,
        precision=options.precision,
        session_options=options.session_options,
        require_signature=options.require_signature,
    )
    opened = open_folder(str(root), load_options)
    if options.target is None and needs_gpu(opened.variant.requirements) != on_gpu:
        raise LoadError(
            f"no variant for {'a GPU' if on_gpu else 'the CPU'} here: {root}\n"
            f"  got variant {opened.variant.name!r}; passed over: "
            f"{' | '.join(map(str, opened.passed_over)) or 'none'}",
            hint=f"device={'cpu' if on_gpu else 'cuda'!r}, or ortprep check {quoted(root)}",
        )
    return opened, open_buckets(opened, load_options) if options.buckets else []


def choose_target(root: Path, options: ModelLoadOptions, *, on_gpu: bool) -> str | None:
    """Returns the target to open a bundle for; None for any.

    A process for the CPU may see GPUs that are not its own. Of a bundle that prefers them it takes the first
    variant that needs none, by its name.
    """
    if options.target is not None or on_gpu:
        return options.target
    config = read_loader_config(root)
    if not any(needs_gpu(variant.requirements) for variant in config.variants):
        return None
    criteria = LoadOptions(precision=options.precision)
    variant = select_variant(config, criteria, read_machine(gpus=False)).variant
    return None if variant is None else variant.name


class OpenedModel:
    """A model's sessions; `config` is the bundle's, with no variants but those that are open."""

    def __init__(self, name: str, opened: OpenedBundle, buckets: Sequence[OpenedBundle] = ()) -> None:
        self.name = name
        self.signature = read_signature(name, opened.config)
        self._names, self._general = tuple(self.signature.inputs), opened
        make = partial(SessionRunner, self.signature)
        self._runners = ShapeDispatcher(opened, buckets, make)
        self.config = self._runners.config
        self.variant, self.buckets = self._runners.variant, self._runners.buckets

    @property
    def session(self) -> onnxruntime.InferenceSession:
        """The session for all shapes."""
        return self._general.session

    @property
    def bundle_config(self) -> LoaderConfig:
        """The bundle's loader config, with all its variants."""
        return self._general.config

    @property
    def root(self) -> Path:
        """The bundle's folder."""
        return self._general.root

    def check(self) -> None:
        """Runs the golden sample of every variant; raises as `check_answers`."""
        for runner in self._runners.all:
            runner.check()

    def run(self, arrays: Sequence[Array]) -> list[Array]:
        """Runs on arrays in the model's order; returns outputs in its order, or raises `RunError`."""
        shapes = tuple(array.shape for array in arrays)
        runner = self._runners.find(shapes)
        return runner.run(dict(zip(self._names, arrays, strict=True)))
