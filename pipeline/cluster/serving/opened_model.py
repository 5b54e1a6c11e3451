"""A model opened in a process of a node: every batch runs on the session that is there for its shapes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

from pipeline.bundle.loader_config import read_loader_config
from pipeline.bundle.session_record import SessionPlan
from pipeline.cluster.serving.bound_often import BoundOften
from pipeline.errors import LoadError, PoolError
from pipeline.runtime.element_types import Array
from pipeline.runtime.hardware import read_hardware
from pipeline.runtime.loading.bundle_loader import DigestPolicy, LoadOptions, OpenedBundle, open_folder
from pipeline.runtime.loading.session import import_onnxruntime
from pipeline.runtime.loading.sources import locate
from pipeline.runtime.loading.variant_selection import FASTEST, needs_gpu, select_variant
from pipeline.runtime.pool.requests import Signature, read_signature
from pipeline.runtime.pool.session_runner import ByShapes, SessionRunner, open_buckets
from pipeline.runtime.pool.workplaces import limit_threads

if TYPE_CHECKING:
    import onnxruntime

    from pipeline.bundle.loader_config import LoaderConfig


@dataclasses.dataclass(frozen=True)
class Opening:
    """How a model is opened.

    Attributes:
        bundle: A folder of this machine, or a reference to a registry, which is pulled unless it is here.
        root: Where it was pulled to on this machine; None if that is not known.
        target: As `load` takes it; so are `precision`, `digests` and `require_signature`.
        buckets: Whether its shape buckets are opened too.
        device_id: CUDA ordinal as this process sees it; None for the CPU.
        threads: Most threads of a session; None for what is recorded.
        may_spin: Whether idle threads may spin.
    """

    bundle: str
    root: str | None = None
    target: str | None = None
    precision: str = FASTEST
    digests: str = "changed"
    require_signature: str | None = None
    buckets: bool = True
    device_id: int | None = None
    threads: int | None = None
    may_spin: bool = True

    def of(self, bundle: str) -> Opening:
        """Returns the same for another bundle."""
        return dataclasses.replace(self, bundle=bundle)


def open_model(name: str, opening: Opening) -> OpenedModel:
    """Opens a bundle and its buckets; each is checked with its golden sample, which warms it up.

    Args:
        name: What to call the model in errors; "" for its own name.
        opening: How.

    Raises:
        LoadError: There is no variant for the device; or as `load`.
        PipelineError: As `load`.
    """
    root = _find(opening)

    def adapt(plan: SessionPlan) -> SessionPlan:
        return limit_threads(plan, opening.threads, may_spin=opening.may_spin)

    on_gpu = opening.device_id is not None
    options = LoadOptions(
        target=choose_target(root, opening),
        device_id=opening.device_id,
        digests=cast(DigestPolicy, opening.digests),
        check="golden",
        adapt=adapt,
        precision=opening.precision,
    )
    opened = open_folder(str(root), options)
    if opening.target is None and needs_gpu(opened.variant.requirements) != on_gpu:
        raise LoadError(
            f"no variant for {'a GPU' if on_gpu else 'the CPU'} here: {root}\n"
            f"  got variant {opened.variant.name!r}; passed over: "
            f"{' | '.join(map(str, opened.passed_over)) or 'none'}",
            hint=f"devices={'cpu' if on_gpu else 'cuda'!r}, or ortprep check {root}",
        )
    return OpenedModel(
        name or opened.config.name, opened, open_buckets(opened, options) if opening.buckets else ()
    )


def choose_target(root: Path, opening: Opening) -> str | None:
    """Returns the target to open a bundle for; None for any.

    A process for the CPU may see GPUs that are not its own. Of a bundle that prefers them it takes the first
    variant that needs none, by its name.

    Args:
        root: The bundle's folder.
        opening: How it is to be opened.

    Raises:
        BundleError: It cannot be read.
    """
    if opening.target is not None or opening.device_id is not None:
        return opening.target
    config = read_loader_config(root)
    if not any(needs_gpu(variant.requirements) for variant in config.variants):
        return None
    onnxruntime = import_onnxruntime()
    found = select_variant(
        config,
        target=None,
        hardware=read_hardware(gpus=False),
        onnxruntime_version=onnxruntime.__version__,
        available_providers=onnxruntime.get_available_providers(),
        precision=opening.precision,
    ).variant
    return None if found is None else found.name


def _read_signature(name: str, config: LoaderConfig) -> Signature:
    try:
        return read_signature(name, config)
    except PoolError:
        types = ", ".join(f"{tensor.name}: {tensor.dtype}" for tensor in (*config.inputs, *config.outputs))
        raise PoolError(
            f"{name} cannot be run here\n  expected tensors of numbers or booleans, got {types}",
            hint="pipeline.runtime.load() gives a session that takes them",
        ) from None


def _find(opening: Opening) -> Path:
    signature = opening.require_signature
    if opening.root is None or not Path(opening.root).is_dir():
        return locate(opening.bundle, require_signature=signature)
    root = locate(opening.root, require_signature=signature)
    if "://" in opening.bundle:
        from pipeline.registry.cache import Cache

        Cache().keep(root)  # as long as this process lives, whatever else the node pulls
    return root


class OpenedModel:
    """A model's sessions.

    Args:
        name: Of the model.
        opened: The variant for all shapes.
        buckets: Those for certain sizes.

    Attributes:
        signature: What it takes and gives.
        config: The bundle's loader config, with no variants but those that are open.
        variant: Name of the variant for all shapes.
        buckets: Names of those for certain sizes.
    """

    def __init__(self, name: str, opened: OpenedBundle, buckets: Sequence[OpenedBundle] = ()) -> None:
        self.name = name
        self.signature = _read_signature(name, opened.config)
        self._names, self._general = tuple(self.signature.inputs), opened
        make = partial(SessionRunner, self.signature, bind=BoundOften)
        self._runners = ByShapes(opened, buckets, make)
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
        """Runs the golden sample of every variant.

        Raises:
            LoadError: It is not answered as recorded.
            BundleError: It cannot be read.
        """
        for runner in self._runners.all:
            runner.check()

    def run(self, arrays: Sequence[Array]) -> list[Array]:
        """Runs on arrays in the model's order and returns its outputs in the model's order.

        Raises:
            RunError: ONNX Runtime refused them.
        """
        shapes = tuple(array.shape for array in arrays)
        runner = self._runners.find(shapes) or self._runners.learn(self._names, shapes)
        return runner.run(runner.fit(dict(zip(self._names, arrays, strict=True))))
