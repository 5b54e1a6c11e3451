"""Datasets of Ray Data through a bundle: `OnnxPredictor`, which users pass to `map_batches`.

Nodes need nothing of the build.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from ortprep.bundle.loader_config import LoaderConfig, TensorSpec, golden_of
from ortprep.cluster.device import prepare_device, reserved_cpus
from ortprep.errors import InvalidRequestError, PoolError
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


def plan_pieces(count: int, sizes: Sequence[int]) -> tuple[Piece, ...]:
    """Returns how rows are cut into batches.

    As many as fit go in batches of the largest size. The remainder goes in one of the smallest size that
    takes all of it, unless more than half of that would be padding: then a smaller one is filled first.

    Args:
        count: Number of rows.
        sizes: Lengths of batches that the model was prepared for; none for any.
    """
    lengths, pieces, start = set(sizes) or {count}, [], 0
    while start < count:
        left = count - start
        filled = max((size for size in lengths if size <= left), default=0)
        padded = min((size for size in lengths if size >= left), default=0)
        size = filled if not padded or (filled and padded > 2 * left) else padded
        pieces.append(Piece(start, min(count, start + size), size))
        start += size
    return tuple(pieces)


def find_fixed_size(inputs: Sequence[TensorSpec], *, constant: Iterable[str] = ()) -> int | None:
    """Returns the length of a batch that a model fixes, None where it takes any.

    Raises:
        PoolError: An input has no axis for rows, or two fix different lengths.
    """
    sizes: dict[str, int] = {}
    for tensor in inputs:
        if tensor.name in constant or tensor.shape is None:
            continue
        if not tensor.shape:
            raise PoolError(
                f"input {tensor.name!r} has no axis for rows\n  expected one, got a scalar",
                hint=f"OnnxPredictor(constants={{{tensor.name!r}: value}})",
            )
        first = tensor.shape[0]
        if isinstance(first, int):
            sizes[tensor.name] = first
    if len(set(sizes.values())) > 1:
        raise PoolError(
            f"inputs have different fixed batch sizes\n  expected one, got {sizes}",
            hint="OnnxPredictor(constants={INPUT: value}) for an input that is the same for every row",
        )
    return next(iter(sizes.values()), None)


def find_bucket_sizes(config: LoaderConfig) -> tuple[int, ...]:
    """Returns the lengths of batches that the opened buckets of a bundle are there for, in order."""
    names = {
        tensor.shape[0] if isinstance(tensor.shape[0], str) else f"{tensor.name}[0]"
        for tensor in config.inputs
        if tensor.shape
    }
    sizes = {size for bucket in config.variants[1:] for name, size in bucket.binding.items() if name in names}
    return tuple(sorted(sizes))


def cut(array: Array, piece: Piece) -> Array:
    """Returns a piece of a column as a batch; the last row is repeated where it is too short."""
    rows = array[piece.start : piece.stop]
    missing = piece.size - len(rows)
    return rows if not missing else np.concatenate([rows, np.repeat(rows[-1:], missing, axis=0)])


def join(parts: Sequence[tuple[Piece, Array]], *, output: str, model: str) -> Array:
    """Returns the answers to some pieces as one column, without those to padding.

    Raises:
        PoolError: An answer does not have a row for every row.
    """
    for piece, part in parts:
        if part.ndim == 0 or part.shape[0] != piece.size:
            raise PoolError(
                f"output {output!r} of {model} does not have one row per input row\n"
                f"  expected {piece.size} along the first axis, got shape {list(part.shape)}",
                hint=f"OnnxPredictor(outputs=…) without {output!r}",
            )
    trimmed = [part[: piece.stop - piece.start] for piece, part in parts]
    return trimmed[0] if len(trimmed) == 1 else np.concatenate(trimmed)


class OnnxPredictor:
    """A bundle's model as a function of batches, for `ray.data.Dataset.map_batches`.

        ds.map_batches(
            OnnxPredictor,
            fn_constructor_kwargs={"bundle": "/models/resnet50", "columns": {"data_0": "image"}},
            batch_size=64,
            concurrency=4,
            num_gpus=1,
        )

    It is made once in every actor: it opens the bundle with optimisation disabled on the device that Ray gave
    the actor, and checks the golden sample. Where the model, or its shape buckets, are for batches of certain
    lengths, rows are cut into those; the last batch is padded with copies of its last row, and the answers to
    those are dropped. So rows must not depend on each other.

    Args:
        bundle: A bundle for `ortprep.runtime.load`, on every node. `pin_bundle` turns an alias into what it
            names now, for all actors to have the same.
        columns: The column that each input is taken from; inputs that are not named, from those of their
            name.
        outputs: Names of the outputs' columns; None for all, by their names. Outputs that are not named are
            left out, as those without a row for every row must be.
        constants: Inputs that are the same for every row, whole, as arrays of the model's types.
        keep: Columns of the batch to be returned too; True for all but those that answers have the names of.
        device: `auto` (the GPU that Ray gave the actor or task, or the CPU), `cpu` or `cuda`. In an actor
            other GPUs are hidden from the process; elsewhere its environment is left alone.
        load: Options for the bundle; without `threads`, with as many as processors are reserved.

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
        from ortprep.runtime.session.opened_model import open_model

        options = load or ModelLoadOptions()
        if options.threads is None:
            options = replace(options, threads=reserved_cpus())
        self._model = open_model(os.fspath(bundle), options, device_id=0 if on_gpu else None)
        self._name, self._signature = self._model.name, self._model.signature
        columns, constants = columns or {}, constants or {}
        self._require("columns", columns, self._signature.inputs)
        self._require("constants", constants, self._signature.inputs)
        self._columns = {
            name: columns.get(name, name) for name in self._signature.inputs if name not in constants
        }
        if not self._columns:
            raise PoolError(
                f"bad constants: {self._name} has no input left\n  expected at least one with a value per row"
            )
        self._constants = {name: array.copy() for name, array in self._check(constants).items()}
        self._outputs = self._place_outputs(outputs)
        self._keep = keep
        fixed = find_fixed_size(self._model.config.inputs, constant=constants)
        self.batch_sizes = find_bucket_sizes(self._model.config) if fixed is None else (fixed,)
        """Lengths of batches that rows are cut into; none where they are run as they come."""

    def _place_outputs(self, outputs: Mapping[str, str] | Sequence[str] | None) -> list[tuple[str, int]]:
        """Returns the column and the position of every output that is returned."""
        names = list(self._signature.outputs)
        chosen = names if outputs is None else outputs
        self._require("outputs", chosen, names)
        renamed = chosen if isinstance(chosen, Mapping) else {name: name for name in chosen}
        if len(set(renamed.values())) < len(renamed):
            raise PoolError(f"bad outputs of {self._name}\n  expected a column for each, got {dict(renamed)}")
        return [(column, names.index(name)) for name, column in renamed.items()]

    def _require(self, argument: str, names: Iterable[str], known: Iterable[str]) -> None:
        """Raises unless all names are those of the model's inputs or outputs."""
        unknown = [name for name in names if name not in known]
        if unknown:
            raise PoolError(
                f"bad {argument}: {self._name} has no {unknown[0]!r}\n  expected some of {', '.join(known)}"
            )

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
        """Returns the answers to some rows, by column."""
        parts = []
        for piece in plan_pieces(count, self.batch_sizes):
            feeds = {name: cut(array, piece) for name, array in arrays.items()} | self._constants
            parts.append((piece, self._model.run([feeds[name] for name in self._signature.inputs])))
        names = list(self._signature.outputs)
        return {
            column: join(
                [(piece, answers[position]) for piece, answers in parts],
                output=names[position],
                model=self._name,
            )
            for column, position in self._outputs
        }

    @functools.cached_property
    def _empty(self) -> dict[str, Array]:
        """The answer to no rows: types and further axes are those of the golden sample's answers."""
        from ortprep.runtime.verification.golden import read_golden

        config = self._model.bundle_config
        variant = next(candidate for candidate in config.variants if candidate.name == self._model.variant)
        sample, _ = read_golden(golden_of(config, variant), self._model.root)
        rows = {name: sample[name] for name in self._columns}
        answers = self._run(rows, len(next(iter(rows.values()))))
        return {name: answer[:0] for name, answer in answers.items()}
