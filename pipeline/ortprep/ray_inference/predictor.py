"""Datasets of Ray Data through a bundle: `OnnxPredictor`, which users pass to `map_batches`.

Nodes need nothing of the build.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from ortprep.bundle.loader_config import LoaderConfig, golden_of
from ortprep.errors import InvalidRequestError, PoolError
from ortprep.ray_inference.device import prepare_device, reserved_cpus
from ortprep.runtime.loading.load_options import check_choice
from ortprep.runtime.loading.model_load_options import ModelLoadOptions
from ortprep.runtime.tensors.element_types import Array
from ortprep.runtime.tensors.signatures import Signature, check_inputs

Batch = Mapping[str, Array]


class Piece(NamedTuple):
    """Rows from `start` to `stop`, run as a batch of `size`; the rest of it repeats the last row."""

    start: int
    stop: int
    size: int


def plan_pieces(count: int, sizes: Sequence[int]) -> Iterator[Piece]:
    """Yields how rows are cut into batches: the largest size, then the smallest that takes the remainder.

    Args:
        count: Number of rows.
        sizes: Lengths of batches that the model was prepared for; none for any.
    """
    lengths = sizes or (max(1, count),)
    for start in range(0, count, max(lengths)):
        stop = min(count, start + max(lengths))
        yield Piece(start, stop, min(size for size in lengths if size >= stop - start))


def find_batch_sizes(config: LoaderConfig, constants: Iterable[str]) -> tuple[int, ...]:
    """Returns the lengths of batches that a model, or the opened buckets of its bundle, are for; () for any.

    Raises:
        PoolError: An input has no axis for rows, or two fix different lengths.
    """
    fixed: dict[str, int] = {}
    free: set[str] = set()
    for tensor in config.inputs:
        if tensor.name in constants or tensor.shape is None:
            continue
        if not tensor.shape:
            raise PoolError(
                f"input {tensor.name!r} has no axis for rows\n  expected one, got a scalar",
                hint=f"OnnxPredictor(constants={{{tensor.name!r}: value}})",
            )
        if isinstance(tensor.shape[0], int):
            fixed[tensor.name] = tensor.shape[0]
        else:
            free.add(tensor.shape[0] or f"{tensor.name}[0]")
    if len(set(fixed.values())) > 1:
        raise PoolError(
            f"inputs have different fixed batch sizes\n  expected one, got {fixed}",
            hint="OnnxPredictor(constants={INPUT: value}) for an input that is the same for every row",
        )
    bindings = [item for bucket in config.variants[1:] for item in bucket.binding.items()]
    return tuple(sorted(set(fixed.values()) or {size for name, size in bindings if name in free}))


def cut(array: Array, piece: Piece) -> Array:
    """Returns a piece of a column as a batch; the last row is repeated where it is too short."""
    rows = array[piece.start : piece.stop]
    missing = piece.size - len(rows)
    return rows if not missing else np.concatenate([rows, np.repeat(rows[-1:], missing, axis=0)])


class OnnxPredictor:
    """A bundle's model as a function of batches, for `ray.data.Dataset.map_batches`.

        ds.map_batches(
            OnnxPredictor,
            fn_constructor_kwargs={"bundle": "/models/resnet50", "columns": {"data_0": "image"}},
            batch_size=64,
            concurrency=4,
            num_gpus=1,
        )

    Every actor opens the bundle once, on the device that Ray gave it, and checks the golden sample. Where the
    model, or its shape buckets, are for batches of certain lengths, rows are cut into those, and the last one
    is padded with copies of its last row. So rows must not depend on each other.

    Args:
        bundle: A bundle for `ortprep.runtime.load`, on every node; see `pin_bundle`.
        columns: Column of each input; by default the one of its name.
        outputs: Names of the outputs to return, or the column of each; None for all, by their names.
        constants: Inputs that are the same for every row, as arrays of the model's types.
        keep: Columns to pass through; True for all but those that an output has the name of.
        device: `auto` (the GPU that Ray gave the actor or task, or the CPU), `cpu` or `cuda`.
        load: Options for the bundle; without `threads`, as many as processors are reserved.

    Raises:
        PipelineError: The bundle cannot be loaded here, as `load` raises it.
        PoolError: An argument does not fit the model, or an input or output is no tensor of numbers or
            booleans.
    """

    def __init__(
        self,
        bundle: str | os.PathLike[str],
        *,
        columns: Mapping[str, str] | None = None,
        outputs: Mapping[str, str] | Sequence[str] | None = None,
        constants: Mapping[str, Any] | None = None,
        keep: bool | Sequence[str] = False,
        device: str = "auto",
        load: ModelLoadOptions | None = None,
    ) -> None:
        check_choice("device", device, ("auto", "cpu", "cuda"))
        on_gpu = prepare_device(device)
        # Only then: ONNX Runtime looks for GPUs when it is imported.
        from ortprep.runtime.opened_model import open_model

        options = load or ModelLoadOptions()
        if options.threads is None:
            options = replace(options, threads=reserved_cpus())
        self._model = open_model(os.fspath(bundle), options, device_id=0 if on_gpu else None)
        self._name, self._signature = self._model.name, self._model.signature
        columns, constants = columns or {}, constants or {}
        inputs, results = list(self._signature.inputs), list(self._signature.outputs)
        chosen = results if outputs is None else outputs
        renamed = chosen if isinstance(chosen, Mapping) else {name: name for name in chosen}
        for argument, names, known in (
            ("columns", columns, inputs),
            ("constants", constants, inputs),
            ("outputs", renamed, results),
        ):
            if unknown := [name for name in names if name not in known]:
                raise PoolError(
                    f"bad {argument}: {self._name} has no {unknown[0]!r}\n"
                    f"  expected some of {', '.join(known)}"
                )
        self._columns = {name: columns.get(name, name) for name in inputs if name not in constants}
        if not self._columns:
            raise PoolError(
                f"bad constants: {self._name} has no input left\n  expected at least one with a value per row"
            )
        self._constants = {name: array.copy() for name, array in self._check(constants).items()}
        self._outputs = {column: results.index(name) for name, column in renamed.items()}
        if len(self._outputs) < len(renamed):
            raise PoolError(f"bad outputs of {self._name}\n  expected a column for each, got {dict(renamed)}")
        self._keep = keep
        self.batch_sizes = find_batch_sizes(self._model.config, constants)
        """Lengths of batches that rows are cut into; none where they are run as they come."""

    def _check(self, arrays: Mapping[str, Any]) -> dict[str, Array]:
        """Returns arrays of some inputs in the model's types; raises InvalidRequestError for other types."""
        types = {name: self._signature.inputs[name] for name in arrays}
        checked = check_inputs(Signature(self._name, types, {}), arrays)
        # Not `ascontiguousarray`, which makes a scalar an array of one axis.
        return {
            name: np.asarray(array, types[name], order="C")
            for name, array in zip(types, checked, strict=True)
        }

    @property
    def variant(self) -> str:
        """Name of the bundle's variant that was taken."""
        return self._model.variant

    def __call__(self, batch: Batch) -> dict[str, Array]:
        """Runs the model on a batch and returns its outputs as columns, a row for every row.

        Raises:
            InvalidRequestError: A column is missing or of another type, or columns differ in length.
            RunError: ONNX Runtime refused the rows, as those of another shape.
            PoolError: An output does not have a row for every row.
        """
        kept = () if isinstance(self._keep, bool) else self._keep
        missing = [name for name in (*self._columns.values(), *kept) if name not in batch]
        if missing:
            raise InvalidRequestError(
                f"no column {missing[0]!r} for {self._name}\n"
                f"  expected it among {', '.join(batch) or 'none'}",
                hint="OnnxPredictor(columns={INPUT: COLUMN})",
            )
        lengths = {column: len(batch[column]) for column in self._columns.values()}
        if len(set(lengths.values())) > 1:
            raise InvalidRequestError(f"columns of different lengths\n  expected one, got {lengths}")
        if count := max(lengths.values()):
            arrays = self._check({name: batch[column] for name, column in self._columns.items()})
            answers = self._run(arrays, count)
        else:
            answers = self._empty
        kept = tuple(batch) if self._keep is True else kept
        return {**{name: batch[name] for name in kept if name not in answers}, **answers}

    def _run(self, arrays: Mapping[str, Array], count: int) -> dict[str, Array]:
        """Returns the answers to some rows, by column, without those to padding."""
        parts: dict[str, list[Array]] = {column: [] for column in self._outputs}
        for piece in plan_pieces(count, self.batch_sizes):
            feeds = {name: cut(array, piece) for name, array in arrays.items()} | self._constants
            answers = self._model.run([feeds[name] for name in self._signature.inputs])
            for column, position in self._outputs.items():
                answer = answers[position]
                if answer.ndim == 0 or answer.shape[0] != piece.size:
                    output = list(self._signature.outputs)[position]
                    raise PoolError(
                        f"output {output!r} of {self._name} does not have one row per input row\n"
                        f"  expected {piece.size} along the first axis, got shape {list(answer.shape)}",
                        hint=f"OnnxPredictor(outputs=…) without {output!r}",
                    )
                parts[column].append(answer[: piece.stop - piece.start])
        return {column: rows[0] if len(rows) == 1 else np.concatenate(rows) for column, rows in parts.items()}

    @functools.cached_property
    def _empty(self) -> dict[str, Array]:
        """The answer to no rows: types and further axes are those of the golden sample's answers."""
        from ortprep.runtime.loading.golden import read_golden

        config = self._model.bundle_config
        variant = next(candidate for candidate in config.variants if candidate.name == self._model.variant)
        sample, _ = read_golden(golden_of(config, variant), self._model.root)
        rows = {name: sample[name] for name in self._columns}
        answers = self._run(rows, len(next(iter(rows.values()))))
        return {name: answer[:0] for name, answer in answers.items()}
