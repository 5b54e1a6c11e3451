"""What to ask a pool whose answers are to be checked: the golden samples of the variants that answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.bundle.loader_config import Golden, LoaderConfig, Variant, golden_of
from pipeline.errors import PoolError
from pipeline.runtime.bucket_choice import choose_bucket
from pipeline.runtime.element_types import Array
from pipeline.runtime.golden import RecordedOutput, find_problems, read_golden

Tensors = Mapping[str, Array]


@dataclass(frozen=True)
class Sample:
    """A golden sample.

    Attributes:
        golden: Its tolerances.
        inputs: By name.
        expected: What was recorded of the outputs, by name.
    """

    golden: Golden
    inputs: Tensors
    expected: Mapping[str, RecordedOutput]


@dataclass(frozen=True)
class Question:
    """Inputs, and what may be answered.

    Attributes:
        inputs: By name.
        samples: What was recorded for them, of each variant that may answer.
    """

    inputs: Tensors
    samples: tuple[Sample, ...]

    def find_problems(self, got: Tensors) -> list[str]:
        """Returns what is wrong with an answer, by the sample that it is nearest to."""
        return min((find_problems(one.golden, one.expected, got) for one in self.samples), key=len)


def read_questions(served: Sequence[LoaderConfig], root: Path) -> tuple[Question, ...]:
    """Returns the golden samples that workers can be asked.

    Which worker answers is not known. So where workers have different variants, a sample is asked only if
    each variant that may answer has recorded what it answers to the same inputs.

    Args:
        served: What workers have: the bundle with the variant for all shapes first, then their buckets.
        root: The bundle's folder.

    Raises:
        PoolError: There is no such sample.
        BundleError: A sample cannot be read.
    """
    samples = {
        variant.name: _read_sample(config, variant, root) for config in served for variant in config.variants
    }
    questions: dict[tuple[str, ...], Question] = {}
    for sample in samples.values():
        names = tuple(dict.fromkeys(_answering(config, sample.inputs).name for config in served))
        answering = tuple(samples[name] for name in names)
        if all(_are_same(one.inputs, sample.inputs) for one in answering):
            questions.setdefault(names, Question(sample.inputs, answering))
    if not questions:
        variants = ", ".join(config.variants[0].name for config in served)
        raise PoolError(
            f"no golden sample to check answers with: {root}\n"
            f"  expected one with the same inputs for all of {variants}, which workers took",
            hint="name devices of one kind, or a precision",
        )
    return tuple(questions.values())


def _read_sample(config: LoaderConfig, variant: Variant, root: Path) -> Sample:
    golden = golden_of(config, variant)
    return Sample(golden, *read_golden(golden, root))


def _answering(config: LoaderConfig, inputs: Tensors) -> Variant:
    general = config.variants[0]
    shapes = {name: array.shape for name, array in inputs.items()}
    return choose_bucket(config, general, shapes=shapes) or general


def _are_same(one: Tensors, other: Tensors) -> bool:
    return one.keys() == other.keys() and all(
        (array.dtype, array.shape) == (other[name].dtype, other[name].shape)
        and array.tobytes() == other[name].tobytes()
        for name, array in one.items()
    )
