"""Which variant takes a batch: one that is there for its sizes, or the one for all. Functions of values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ortprep.bundle.loader_config import LoaderConfig, TensorSpec, Variant


def find_buckets(config: LoaderConfig, general: Variant) -> tuple[Variant, ...]:
    """Returns the variants for certain sizes that may serve beside one for all, in the bundle's order.

    They are for the same target and in the same precision, so that answers do not change their kind with the
    batch. A bucket that was requested by name has none beside it.
    """
    if general.bucket:
        return ()
    return tuple(
        variant
        for variant in config.variants
        if variant.bucket and (variant.target, variant.precision) == (general.target, general.precision)
    )


def choose_bucket(
    config: LoaderConfig, general: Variant, *, shapes: Mapping[str, Sequence[int]]
) -> Variant | None:
    """Returns the variant that is there for batches of these shapes, None where the general one takes them.

    It is one whose every size the batch has, while all other axes are as the general variant takes them. Of
    several it is the one that binds most dimensions, and among those the bundle's first.

    Args:
        config: The bundle, with those of its variants that this machine can run.
        general: The variant that takes what no other does.
        shapes: Shapes of the batch by input name.
    """
    if shapes.keys() != {tensor.name for tensor in config.inputs}:
        return None
    fitting = [
        bucket
        for bucket in find_buckets(config, general)
        if _has_sizes(config.inputs, shapes, {**general.binding, **bucket.binding})
    ]
    return max(fitting, key=lambda bucket: len(bucket.binding), default=None)


def _has_sizes(
    inputs: Sequence[TensorSpec], shapes: Mapping[str, Sequence[int]], binding: Mapping[str, int]
) -> bool:
    bound: set[str] = set()
    for tensor in inputs:
        shape = shapes[tensor.name]
        declared = (None,) * len(shape) if tensor.shape is None else tensor.shape
        if len(declared) != len(shape):
            return False
        for axis, (expected, size) in enumerate(zip(declared, shape, strict=True)):
            if isinstance(expected, int) and expected != size:
                return False
            names = binding.keys() & {expected, f"{tensor.name}[{axis}]"}
            if any(binding[name] != size for name in names):
                return False
            bound |= names
    # Sizes of dimensions that no input has cannot be read from a batch.
    return bound == binding.keys()
