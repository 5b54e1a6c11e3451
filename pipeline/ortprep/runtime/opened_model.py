"""A model opened in a process of a node."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import cast

from ortprep.bundle.loader_config import read_loader_config
from ortprep.errors import LoadError, RunError
from ortprep.quoting import quoted
from ortprep.runtime.loading.bundle_loader import open_folder
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
from ortprep.runtime.tensors.signatures import read_signature


def open_model(
    bundle: str,
    options: ModelLoadOptions,
    *,
    name: str = "",
    device_id: int | None = None,
    for_fork: bool = False,
) -> OpenedModel:
    """Opens a bundle's variant; it answers its golden sample.

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
    return OpenedModel(name or opened.config.name, opened)


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
    """A model's session, run the way its types need it.

    Attributes:
        name: Name of the model in errors.
        config: The bundle's loader config.
        session: The session.
        root: The bundle's folder.
        variant: Name of the variant that is open.
    """

    def __init__(self, name: str, opened: OpenedBundle) -> None:
        self.name, self.config, self.session, self.root = name, opened.config, opened.session, opened.root
        self.signature = read_signature(name, opened.config)
        self._outputs = list(self.signature.outputs)
        self._variant = opened.variant
        self.variant = self._variant.name
        outputs = [value.type for value in opened.session.get_outputs()]
        self._is_native = BFLOAT16 not in self.signature.inputs.values() and BFLOAT16_TENSOR not in outputs
        self._errors = onnxruntime_errors()

    def check(self) -> None:
        """Runs the golden sample; raises as `check_answers`."""
        check_answers(self.session, self.config, self.root, variant=self._variant)

    def find_unfit(self) -> str:
        """Returns why its session cannot be inherited by a fork; empty if it can be."""
        others = sorted({*self.session.get_providers()} - {"CPUExecutionProvider"})
        return f"{self.name} uses {', '.join(others)}" if others else ""

    def run(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        """Runs on arrays that `check_inputs` returned; returns outputs in its order, or raises `RunError`."""
        try:
            if self._is_native:
                return dict(zip(self._outputs, self.session.run(self._outputs, arrays), strict=True))
            answers = run_session(self.session, arrays)
            return {name: answers[name] for name in self._outputs}
        except self._errors as error:
            raise RunError(
                f"ONNX Runtime cannot run {self.name}\n  {type(error).__name__}: {error}"
            ) from None
