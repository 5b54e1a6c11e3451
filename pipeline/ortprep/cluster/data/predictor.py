"""What users of Ray Data pass to `map_batches`: `OnnxPredictor`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ortprep.bundle.loader_config import TensorSpec, golden_of
from ortprep.cluster.data.batching import (
    Piece,
    check_row_outputs,
    cut,
    find_bucket_sizes,
    find_fixed_size,
    have_named_rows,
    join,
    plan_pieces,
    tile,
)
from ortprep.cluster.device import prepare_device, reserved_cpus
from ortprep.errors import InvalidRequestError, PoolError, RunError
from ortprep.runtime.loading.load_options import check_choice
from ortprep.runtime.loading.model_load_options import ModelLoadOptions
from ortprep.runtime.tensors.element_types import Array
from ortprep.runtime.tensors.signatures import Signature, check_inputs

Batch = Mapping[str, Array]


@dataclass(frozen=True)
class PredictorConfig:
    """How a dataset is run through a bundle.

    Attributes:
        columns: The column that each input is taken from; inputs that are not named, from those of their
            name.
        outputs: What each output's column is called; None for all, by their names. Outputs that are not named
            are left out, as those without a row for every row must be.
        constants: Inputs that are the same for every row, whole, as arrays of the model's types.
        keep: Columns of the batch to be returned too; True for all but those that answers have the names of.
        batch_size: That of `map_batches`, for the first run where batches are run as they come; None for as
            many rows as the golden sample has.
        device: `auto` (the GPU that Ray gave the actor or task, or the CPU), `cpu` or `cuda`. In an actor
            other GPUs are hidden from the process; elsewhere its environment is left alone.
        load: How the bundle is opened; without `threads`, with as many as processors are reserved.
    """

    columns: Mapping[str, str] = field(default_factory=dict)
    outputs: Mapping[str, str] | Sequence[str] | None = None
    constants: Mapping[str, Any] = field(default_factory=dict)
    keep: bool | Sequence[str] = False
    batch_size: int | None = None
    device: str = "auto"
    load: ModelLoadOptions = field(default_factory=ModelLoadOptions)


class OnnxPredictor:
    """A bundle's model as a function of batches, for `ray.data.Dataset.map_batches`.

        ds.map_batches(
            OnnxPredictor,
            fn_constructor_kwargs={
                "bundle": "/models/resnet50",
                "config": PredictorConfig(columns={"data_0": "image"}, batch_size=64),
            },
            batch_size=64,
            concurrency=4,
            num_gpus=1,
        )

    It is made once in every actor: it opens the bundle with optimisation disabled on the device that Ray gave
    the actor, checks the golden sample, and runs a batch of every length that rows are cut into, the longest
    first, or one of `batch_size` rows where they are run as they come. Where the model, or its shape buckets,
    are for batches of certain lengths, rows are cut into those; the last batch is padded with copies of its
    last row, and the answers to those are dropped. So rows must not depend on each other.

    Args:
        bundle: As `ortprep.runtime.load` takes it, from every node. `pin_bundle` turns an alias into what it
            names now, for all actors to have the same.
        config: What of a batch the model takes, and what is returned.

    Raises:
        PipelineError: The bundle cannot be loaded here, as `load` raises it.
        PoolError: A setting does not fit the model, an output has no rows, or an input or output is no
            tensor of numbers or booleans.
    """

    def __init__(self, bundle: str | os.PathLike[str], config: PredictorConfig | None = None) -> None:
        config = config or PredictorConfig()
        check_choice("device", config.device, ("auto", "cpu", "cuda"))
        on_gpu = prepare_device(config.device)
        # Only then: ONNX Runtime looks for GPUs when it is imported.
        from ortprep.runtime.session.opened_model import open_model

        options = config.load
        if options.threads is None:
            options = replace(options, threads=reserved_cpus())
        self._model = open_model(os.fspath(bundle), options, device_id=0 if on_gpu else None)
        self._name, self._signature = self._model.name, self._model.signature
        self._inputs = {tensor.name: tensor for tensor in self._model.config.inputs}
        for argument in ("columns", "constants"):
            self._require(argument, getattr(config, argument), self._signature.inputs)
        self._columns = {
            name: config.columns.get(name, name) for name in self._inputs if name not in config.constants
        }
        if not self._columns:
            raise PoolError(
                f"bad constants: {self._name} has no input left\n  expected at least one with a value per row"
            )
        constants = self._check(config.constants)
        self._constants = {name: array.copy() for name, array in constants.items()}
        names = list(self._signature.outputs)
        outputs = names if config.outputs is None else config.outputs
        self._require("outputs", outputs, names)
        outputs = outputs if isinstance(outputs, Mapping) else {name: name for name in outputs}
        if len(set(outputs.values())) < len(outputs):
            raise PoolError(f"bad outputs of {self._name}\n  expected a column for each, got {dict(outputs)}")
        self._outputs = [(column, names.index(name)) for name, column in outputs.items()]
        self._keep = config.keep
        self._sizes = self._choose_sizes()
        self._empty: dict[str, Array] = {}
        self._warm_up(config.batch_size)

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

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """Lengths of batches that rows are cut into; none where they are run as they come."""
        return self._sizes

    def __call__(self, batch: Batch) -> dict[str, Array]:
        """Runs the model on a batch and returns its outputs as columns, a row for every row.

        Raises:
            InvalidRequestError: A column is missing or of another type, or columns differ in length.
            RunError: ONNX Runtime refused the rows, as those of another shape.
            PoolError: An output has no row for every row.
        """
        missing = [name for name in (*self._columns.values(), *self._kept_names()) if name not in batch]
        if missing:
            raise InvalidRequestError(
                f"no column {missing[0]!r} for {self._name}\n"
                f"  expected it among {', '.join(batch) or 'none'}",
                hint="PredictorConfig(columns={INPUT: COLUMN})",
            )
        lengths = {column: len(batch[column]) for column in self._columns.values()}
        if len(set(lengths.values())) > 1:
            raise InvalidRequestError(f"columns of different lengths\n  expected one, got {lengths}")
        count = max(lengths.values(), default=0)
        answers = self._empty
        if count:
            arrays = self._check({name: batch[column] for name, column in self._columns.items()})
            answers = self._run(arrays, count)
        kept = batch if self._keep is True else self._kept_names()
        return {**{name: batch[name] for name in kept if name not in answers}, **answers}

    def _kept_names(self) -> Sequence[str]:
        return () if isinstance(self._keep, bool) else self._keep

    def _run(self, arrays: Mapping[str, Array], count: int) -> dict[str, Array]:
        parts: list[tuple[Piece, Sequence[Array]]] = []
        for piece in plan_pieces(count, self._sizes):
            feeds = {name: cut(array, piece) for name, array in arrays.items()} | self._constants
            parts.append((piece, self._model.run([feeds[name] for name in self._inputs])))
        return {
            column: join(
                [(piece, answers[position]) for piece, answers in parts],
                output=list(self._signature.outputs)[position],
                model=self._name,
            )
            for column, position in self._outputs
        }

    def _choose_sizes(self) -> tuple[int, ...]:
        fixed = find_fixed_size(tuple(self._inputs.values()), constant=self._constants)
        check_row_outputs(self._output_specs(), fixed=fixed, model=self._name)
        return find_bucket_sizes(self._model.config) if fixed is None else (fixed,)

    def _output_specs(self) -> list[TensorSpec]:
        return [self._model.config.outputs[position] for _, position in self._outputs]

    def _warm_up(self, batch_size: int | None) -> None:
        """Runs a batch of every length, and learns what an answer to no rows is."""
        from ortprep.runtime.verification.golden import read_golden

        config = self._model.bundle_config
        variant = next(candidate for candidate in config.variants if candidate.name == self._model.variant)
        sample, _ = read_golden(golden_of(config, variant), self._model.root)
        rows = {name: sample[name] for name in self._columns}
        length = batch_size or next((len(array) for array in rows.values() if array.ndim), 0) or 1
        # What is run first is what is bound to, and most rows come in the longest.
        for size in reversed(self._sizes or (length,)):
            answers = self._run(tile(rows, size), size)
            self._empty = {name: answer[:0] for name, answer in answers.items()}
        inputs = [self._inputs[name] for name in self._columns]
        if not self._sizes and not have_named_rows(self._output_specs(), inputs):
            # An axis may be as long as the batch by accident, but not twice. Not all models take any length.
            with contextlib.suppress(RunError):
                self._run(tile(rows, length + 1), length + 1)
