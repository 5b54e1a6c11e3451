"""The inputs a model is verified and measured with, as files: the user's samples, and seeded ones."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from ortprep.bundle.model_facts import ModelInterface
from ortprep.children.answers import describe_shapes
from ortprep.children.child import run_child
from ortprep.errors import SourceError, StageError
from ortprep.measuring.feeds import draw_feed, generator
from ortprep.runtime.machine.memory import available_bytes
from ortprep.runtime.tensors.arrays import read_tensors, write_tensors
from ortprep.runtime.tensors.element_types import Array
from ortprep.spec.models import InputSpec, ModelSpec
from ortprep.stages.core.sample_files import MAX_SAMPLE_BYTES, find_sample_files
from ortprep.stages.core.spec_fit import require_fit, shape_sets


@dataclass(frozen=True)
class Sample:
    """One input of a model, on disk.

    Attributes:
        file: An `.npz` of arrays by input name.
        shapes: Their shapes, as `name=[…]` joined by spaces.
        real: Position among the spec's own samples; None for one that was drawn.
    """

    file: str
    shapes: str
    elements: int
    real: int | None = None

    @property
    def path(self) -> Path:
        """The file."""
        return Path(self.file)


def make_samples(spec: ModelSpec, interface: ModelInterface, folder: Path) -> tuple[Sample, ...]:
    """Writes the inputs a model is verified with: `0.npz`, `1.npz`, …, arrays by input name.

    They are the spec's samples, and a seeded one for every declared shape that no sample has. The first is of
    the primary shapes. A child process writes them: one batch can be gigabytes.

    Raises:
        SpecError: The spec, or a sample of it, does not fit the model.
        BundleError: A sample cannot be read.
        SourceError: All together are too large.
        StageError: They cannot be written.
    """
    require_fit(spec, interface)
    request = spec, spec.folder.resolve(), interface, folder.resolve()
    return run_child(write_samples, request, memory_bytes=available_bytes()).value


def write_samples(request: tuple[ModelSpec, Path, ModelInterface, Path]) -> tuple[Sample, ...]:
    """Child function of `make_samples`: a spec, its folder, the interface and the folder for the samples."""
    spec, location, interface, folder = request
    spec = spec.located_in(location)
    declared = [dict(shapes) for shapes in shape_sets(spec, interface)]
    files = find_sample_files(spec)
    real, total_bytes = {}, 0
    for index, file in enumerate(files):
        arrays = _read_sample(file, interface)
        real[index] = {name: array.shape for name, array in arrays.items()}
        total_bytes += sum(array.nbytes for array in arrays.values())
        if total_bytes > MAX_SAMPLE_BYTES:
            raise SourceError(
                f"too large: the samples of {spec.name}\n"
                f"  expected at most {MAX_SAMPLE_BYTES} bytes as arrays, got more with {file.name}",
                hint="set samples in the spec to a pattern that matches fewer files",
            )
    seeded = [(None, shapes) for shapes in declared if shapes not in real.values()]
    samples = sorted([*real.items(), *seeded], key=lambda sample: sample[1] != declared[0])
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return tuple(
            _write_sample(
                folder / f"{position}.npz",
                build_feeds(interface, shapes, spec, seed=spec.verify.seed)
                if index is None
                else _read_sample(files[index], interface),
                index,
            )
            for position, (index, shapes) in enumerate(samples)
        )
    except OSError as error:
        place = f"cannot write samples to {folder}"
        raise StageError(f"{place}\n  {error.strerror or error}") from error


def draw_sample(spec: ModelSpec, interface: ModelInterface, file: Path) -> Sample:
    """Writes a seeded input of the smallest declared shapes.

    Raises:
        SpecError: A string input has no `values`.
        OSError: The disk is full.
    """
    sets = shape_sets(spec, interface)
    smallest = min(sets, key=lambda shapes: sum(math.prod(shape) for shape in shapes.values()))
    return _write_sample(file, build_feeds(interface, smallest, spec, seed=spec.verify.seed), None)


def _write_sample(file: Path, feeds: Mapping[str, Array], real: int | None) -> Sample:
    write_tensors(file, feeds)
    return Sample(str(file), describe_shapes(feeds), sum(array.size for array in feeds.values()), real)


def calibrates(sample: Sample) -> bool:
    """Returns whether a sample calibrates, where samples also judge: every other one of the spec's own."""
    return sample.real is not None and sample.real % 2 == 0


def _read_sample(path: Path, interface: ModelInterface) -> dict[str, Array]:
    """Reads a user's sample in the order of the model's inputs; arrays that are no inputs are left out.

    Raises:
        BundleError: The file cannot be read.
    """
    arrays = read_tensors(path)
    return {tensor.name: arrays[tensor.name] for tensor in interface.inputs}


Shapes: TypeAlias = Mapping[str, tuple[int, ...]]
"""One shape per input, by name."""


def build_feeds(interface: ModelInterface, shapes: Shapes, spec: ModelSpec, *, seed: int) -> dict[str, Array]:
    """Makes one input for a model: arrays by input name, in the model's order.

    Each array depends on the seed and its own name, shape and declaration only, so that adding an input
    changes no other. `ortprep.measuring.feeds` says what is drawn where nothing is declared.

    Raises:
        SpecError: A string input has no `values`.
    """
    feeds = {}
    for tensor in interface.inputs:
        declared = spec.inputs.get(tensor.name, InputSpec())
        feeds[tensor.name] = draw_feed(
            tensor,
            shapes[tensor.name],
            generator(seed, tensor.name),
            span=declared.range,
            values=declared.values,
            bound=interface.index_bounds.get(tensor.name),
        )
    return feeds
