"""A model opened in a process of a node: every batch runs on the session that is there for its shapes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from pipeline.bundle.loader_config import read_loader_config
from pipeline.cluster.serving.bound_often import BoundOften
from pipeline.errors import LoadError, PoolError, RunError
from pipeline.runtime.background_import import BackgroundImport, import_onnxruntime
from pipeline.runtime.bucket_choice import choose_bucket, find_buckets
from pipeline.runtime.bucket_opening import open_bucket, with_runnable_buckets
from pipeline.runtime.deadline import Deadline
from pipeline.runtime.element_types import Array, element_type_of
from pipeline.runtime.golden import check_answers
from pipeline.runtime.hardware import read_hardware
from pipeline.runtime.loading import DigestPolicy
from pipeline.runtime.opening import OpenedBundle, Wishes, open_bundle
from pipeline.runtime.pool.requests import Signature, read_signature
from pipeline.runtime.pool.workplaces import limit_threads
from pipeline.runtime.selection import FASTEST, needs_gpu, select_variant
from pipeline.runtime.session import SessionPlan, onnxruntime_errors
from pipeline.runtime.sources import locate
from pipeline.runtime.tensors import fit_feeds, half_inputs, run_session

if TYPE_CHECKING:
    import onnxruntime

    from pipeline.bundle.loader_config import LoaderConfig

_REMEMBERED = 1024


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
    wishes = Wishes(
        target=choose_target(root, opening),
        device_id=opening.device_id,
        digests=cast(DigestPolicy, opening.digests),
        check="golden",
        deadline=Deadline(None, bundle=root),
        adapt=adapt,
        precision=opening.precision,
    )
    opened = open_bundle(root, wishes, BackgroundImport())
    if opening.target is None and needs_gpu(opened.variant.requirements) != on_gpu:
        raise LoadError(
            f"no variant for {'a GPU' if on_gpu else 'the CPU'} here: {root}\n"
            f"  got variant {opened.variant.name!r}; passed over: "
            f"{' | '.join(map(str, opened.passed_over)) or 'none'}",
            hint=f"devices={'cpu' if on_gpu else 'cuda'!r}, or ortprep check {root}",
        )
    buckets: list[OpenedBundle] = []
    if opening.buckets:
        runnable = with_runnable_buckets(opened.chosen, device_id=opening.device_id)
        found = find_buckets(runnable, opened.variant)
        buckets = [open_bucket(opened.chosen, bucket, wishes) for bucket in found]
    return OpenedModel(name or opened.config.name, opened, buckets)


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
    """

    def __init__(self, name: str, opened: OpenedBundle, buckets: Sequence[OpenedBundle] = ()) -> None:
        self.name = name
        self.signature = _read_signature(name, opened.config)
        self._general = opened
        variants = tuple(one.variant for one in (opened, *buckets))
        self.config = dataclasses.replace(opened.config, variants=variants)
        self._runners = {one.variant.name: _Runner(self.signature, one) for one in (opened, *buckets)}
        self._known: dict[tuple[tuple[int, ...], ...], _Runner] = {}

    @property
    def variant(self) -> str:
        """Name of the variant for all shapes."""
        return self._general.variant.name

    @property
    def session(self) -> onnxruntime.InferenceSession:
        """The session for all shapes."""
        return self._general.session

    @property
    def buckets(self) -> tuple[str, ...]:
        """Names of those for certain sizes."""
        return tuple(one.name for one in self.config.variants[1:])

    @property
    def bundle_config(self) -> LoaderConfig:
        """The bundle's loader config, with all its variants."""
        return self._general.config

    @property
    def root(self) -> Path:
        """The bundle's folder."""
        return self._general.chosen.root

    def check(self) -> None:
        """Runs the golden sample of every variant.

        Raises:
            LoadError: It is not answered as recorded.
            BundleError: It cannot be read.
        """
        for runner in self._runners.values():
            runner.check()

    def run(self, arrays: Sequence[Array]) -> list[Array]:
        """Runs on arrays in the model's order and returns its outputs in the model's order.

        Raises:
            RunError: ONNX Runtime refused them.
        """
        shapes = tuple(array.shape for array in arrays)
        runner = self._known.get(shapes)
        if runner is None:
            runner = self._learn(shapes)
        return runner.run(dict(zip(self.signature.inputs, arrays, strict=True)))

    def _learn(self, shapes: tuple[tuple[int, ...], ...]) -> _Runner:
        named = dict(zip(self.signature.inputs, shapes, strict=True))
        general = self._general.variant
        chosen = choose_bucket(self.config, general, shapes=named) or general
        if len(self._known) >= _REMEMBERED:
            self._known.clear()
        runner = self._known[shapes] = self._runners[chosen.name]
        return runner


class _Runner:
    """A session, run the way its variant and its types need it."""

    def __init__(self, signature: Signature, opened: OpenedBundle) -> None:
        self._name, self._opened, self._session = signature.model, opened, opened.session
        self._outputs = list(signature.outputs)
        types = [*signature.inputs.values(), *signature.outputs.values()]
        self._is_native = not any(map(element_type_of, types))
        halves = half_inputs(opened.session)
        self._narrowed = [name for name in halves if signature.inputs[name] == np.float32]
        self._bound = BoundOften(opened.session) if opened.variant.io_binding else None
        self._errors = onnxruntime_errors()

    def check(self) -> None:
        opened = self._opened
        check_answers(self._session, opened.config, opened.chosen.root, variant=opened.variant)

    def run(self, feeds: Mapping[str, Array]) -> list[Array]:
        fitting = fit_feeds(feeds, self._narrowed) if self._narrowed else feeds
        try:
            return self._run(fitting)
        except self._errors as error:
            raise RunError(
                f"ONNX Runtime cannot run {self._name}\n  {type(error).__name__}: {error}"
            ) from None

    def _run(self, feeds: Mapping[str, Array]) -> list[Any]:
        if self._bound is not None:
            answers = self._bound.run(feeds)
        elif self._is_native:
            return list(self._session.run(self._outputs, feeds))
        else:
            answers = run_session(self._session, feeds)
        return [answers[name] for name in self._outputs]
