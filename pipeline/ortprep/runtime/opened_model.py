"""A model opened in a process of a node: every batch runs on the session that is there for its shapes."""

from __future__ import annotations

from collections.abc import Sequence
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
from ortprep.runtime.machine.hardware import read_hardware
from ortprep.runtime.tensors.arrays import BFLOAT16_TENSOR, run_session
from ortprep.runtime.tensors.element_types import BFLOAT16, Array
from ortprep.runtime.tensors.signatures import read_signature

if TYPE_CHECKING:
    import onnxruntime

_MAX_CACHED = 1024


def open_model(
    bundle: str,
    options: ModelLoadOptions,
    *,
    name: str = "",
    device_id: int | None = None,
    for_fork: bool = False,
) -> OpenedModel:
    """Opens a bundle's variant for all shapes, and its buckets; each answers its golden sample.

    Args:
        bundle: A folder of this machine, or a reference to a registry, which is pulled unless it is here.
        options: How.
        name: Name of the model in errors; by default the bundle's.
        device_id: CUDA ordinal as this process sees it; None for the CPU.
        for_fork: Whether the process is forked afterwards: sessions have one thread and one phase then.

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
        phases="steady" if for_fork else "auto",
        adapt=with_one_thread if for_fork else None,
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
    runnable = with_runnable_buckets(opened.config, opened.variant, device_id=device_id)
    buckets = [open_bucket(opened.root, opened.config, one, load_options) for one in runnable.variants[1:]]
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
    variant = select_variant(config, criteria, read_machine(read_hardware(gpus=False))).variant
    return None if variant is None else variant.name


class OpenedModel:
    """A model's sessions, one per variant that is open, run the way its types need it.

    Attributes:
        name: Name of the model in errors.
        config: The bundle's loader config.
        session: The session for all shapes.
        root: The bundle's folder.
        variant: Name of the variant for all shapes.
        buckets: Names of the others.
    """

    def __init__(self, name: str, opened: OpenedBundle, buckets: Sequence[OpenedBundle] = ()) -> None:
        self.name, self.config, self.session, self.root = name, opened.config, opened.session, opened.root
        self.signature = read_signature(name, opened.config)
        self._inputs, self._outputs = tuple(self.signature.inputs), list(self.signature.outputs)
        self._opened = {one.variant.name: one for one in (opened, *buckets)}
        self.variant, *rest = self._opened
        self.buckets = tuple(rest)
        variants = tuple([one.variant for one in self._opened.values()])
        self._open_variants = opened.config._replace(variants=variants)
        self._known: dict[tuple[tuple[int, ...], ...], onnxruntime.InferenceSession] = {}
        outputs = [value.type for value in opened.session.get_outputs()]
        self._is_native = BFLOAT16 not in self.signature.inputs.values() and BFLOAT16_TENSOR not in outputs
        self._errors = onnxruntime_errors()

    def check(self) -> None:
        """Runs the golden sample of every variant; raises as `check_answers`."""
        for one in self._opened.values():
            check_answers(one.session, one.config, one.root, variant=one.variant)

    def find_unfit(self) -> str:
        """Returns why its sessions cannot be inherited by a fork; empty if they can be."""
        providers = {name for one in self._opened.values() for name in one.session.get_providers()}
        others = sorted(providers - {"CPUExecutionProvider"})
        return f"{self.name} uses {', '.join(others)}" if others else ""

    def run(self, arrays: Sequence[Array]) -> list[Array]:
        """Runs on arrays in the model's order; returns outputs in its order, or raises `RunError`."""
        shapes = tuple([array.shape for array in arrays])
        session = self._known.get(shapes) or self._find_session(shapes)
        feeds = dict(zip(self._inputs, arrays, strict=True))
        try:
            if self._is_native:
                return list(session.run(self._outputs, feeds))
            answers = run_session(session, feeds)
            return [answers[name] for name in self._outputs]
        except self._errors as error:
            raise RunError(
                f"ONNX Runtime cannot run {self.name}\n  {type(error).__name__}: {error}"
            ) from None

    def _find_session(self, shapes: tuple[tuple[int, ...], ...]) -> onnxruntime.InferenceSession:
        """Returns the session for some shapes, in the order of the inputs."""
        config, named = self._open_variants, dict(zip(self._inputs, shapes, strict=True))
        chosen = choose_bucket(config, config.variants[0], shapes=named)
        if len(self._known) >= _MAX_CACHED:
            self._known.clear()
        session = self._known[shapes] = self._opened[self.variant if chosen is None else chosen.name].session
        return session
