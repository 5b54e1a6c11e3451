"""A model opened in a process of a node: every batch runs on the session that is there for its shapes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

from ortprep.bundle.loader_config import read_loader_config
from ortprep.errors import LoadError, RunError
from ortprep.quoting import quoted
from ortprep.runtime.loading.buckets import choose_bucket, with_runnable_buckets
from ortprep.runtime.loading.bundle_loader import open_bucket, open_folder
from ortprep.runtime.loading.forking import with_one_thread
from ortprep.runtime.loading.golden import check_answers
from ortprep.runtime.loading.load_options import DigestPolicy, LoadOptions
from ortprep.runtime.loading.model_load_options import ModelLoadOptions
from ortprep.runtime.loading.opened_bundle import OpenedBundle, find_threads
from ortprep.runtime.loading.session import onnxruntime_errors
from ortprep.runtime.loading.sources import locate
from ortprep.runtime.loading.variant_selection import needs_gpu, read_machine, select_variant
from ortprep.runtime.tensors.arrays import BFLOAT16_TENSOR, run_session
from ortprep.runtime.tensors.element_types import BFLOAT16, Array
from ortprep.runtime.tensors.signatures import Signature, read_signature

if TYPE_CHECKING:
    import onnxruntime

_MAX_CACHED = 1024


def open_model(
    bundle: str, options: ModelLoadOptions, *, name: str = "", device_id: int | None = None
) -> OpenedModel:
    """Opens a bundle's variant for all shapes, and its buckets; each answers its golden sample.

    Args:
        bundle: A folder of this machine, or a reference to a registry, which is pulled unless it is here.
        options: How.
        name: Name of the model in errors; by default the bundle's.
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
    buckets: list[OpenedBundle] = []
    if options.buckets:
        runnable = with_runnable_buckets(opened.config, opened.variant, device_id=device_id)
        buckets = [
            open_bucket(opened.root, opened.config, one, load_options) for one in runnable.variants[1:]
        ]
    return OpenedModel(name or opened.config.name, opened, buckets)


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


class SessionRunner:
    """A session, run the way its types need it."""

    def __init__(self, signature: Signature, opened: OpenedBundle) -> None:
        self._name, self._opened, self._outputs = signature.model, opened, list(signature.outputs)
        self.session = opened.session
        outputs = [value.type for value in opened.session.get_outputs()]
        self._is_native = BFLOAT16 not in signature.inputs.values() and BFLOAT16_TENSOR not in outputs
        self._errors = onnxruntime_errors()

    def check(self) -> None:
        """Runs the golden sample; raises as `check_answers`."""
        opened = self._opened
        check_answers(self.session, opened.config, opened.root, variant=opened.variant)

    def run(self, feeds: Mapping[str, Array]) -> list[Array]:
        """Runs on a batch; returns outputs in the model's order, or raises `RunError`."""
        try:
            if self._is_native:
                return list(self.session.run(self._outputs, feeds))
            answers = run_session(self.session, feeds)
            return [answers[name] for name in self._outputs]
        except self._errors as error:
            raise RunError(
                f"ONNX Runtime cannot run {self._name}\n  {type(error).__name__}: {error}"
            ) from None


class OpenedModel:
    """A model's sessions, one per variant that is open.

    Attributes:
        name: Name of the model in errors.
        config: The bundle's loader config.
        variant: Name of the variant for all shapes.
        buckets: Names of the others.
    """

    def __init__(self, name: str, opened: OpenedBundle, buckets: Sequence[OpenedBundle] = ()) -> None:
        self.name = name
        self.signature = read_signature(name, opened.config)
        self._names, self._general = tuple(self.signature.inputs), opened
        everything = (opened, *buckets)
        self.config = opened.config
        self._open_variants = opened.config._replace(variants=tuple([one.variant for one in everything]))
        self._runners = {one.variant.name: SessionRunner(self.signature, one) for one in everything}
        self._known: dict[tuple[tuple[int, ...], ...], SessionRunner] = {}
        self.variant, *rest = self._runners
        self.buckets = tuple(rest)

    @property
    def session(self) -> onnxruntime.InferenceSession:
        """The session for all shapes."""
        return self._general.session

    @property
    def root(self) -> Path:
        """The bundle's folder."""
        return self._general.root

    def check(self) -> None:
        """Runs the golden sample of every variant; raises as `check_answers`."""
        for runner in self._runners.values():
            runner.check()

    def find_unfit(self) -> str:
        """Returns why its sessions cannot be inherited by a fork; empty if they can be."""
        providers = {name for one in self._runners.values() for name in one.session.get_providers()}
        others = sorted(providers - {"CPUExecutionProvider"})
        return f"{self.name} uses {', '.join(others)}" if others else ""

    def run(self, arrays: Sequence[Array]) -> list[Array]:
        """Runs on arrays in the model's order; returns outputs in its order, or raises `RunError`."""
        shapes = tuple([array.shape for array in arrays])
        runner = self._known.get(shapes)
        if runner is None:
            named = dict(zip(self._names, shapes, strict=True))
            chosen = choose_bucket(self._open_variants, self._general.variant, shapes=named)
            if len(self._known) >= _MAX_CACHED:
                self._known.clear()
            runner = self._known[shapes] = self._runners[self.variant if chosen is None else chosen.name]
        return runner.run(dict(zip(self._names, arrays, strict=True)))
