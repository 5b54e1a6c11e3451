"""One data file for variants that have the same weights.

Variants of a model mostly differ in their graphs. The weights of the portable one are then all in the data
file of another, elsewhere and beside packed forms of them. A second copy would double the bundle.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ortprep.bundle.file_links import unlinkable_files

if TYPE_CHECKING:
    import onnx

# A build's own process names this child function, and is to stay small: what reads models is imported below.


class SharingRequest(NamedTuple):
    """What `share_weights` is asked for.

    Attributes:
        model: A model whose weights are in a data file beside it.
        others: Models that are in the bundle already.
        written: The model that is written; another's data file comes to lie beside it, under its own name.
    """

    model: Path
    others: tuple[Path, ...]
    written: Path


def share_weights(request: SharingRequest) -> Path | None:
    """Child function: has a model refer to the data file of another one, if that has all of its weights.

    Neither may have data in a branch or a loop's body, which ONNX Runtime refuses in a file with two links.

    Returns:
        The data file; None, and nothing is written, if there is none.

    Raises:
        OSError: A file cannot be read, or the disk is full.
    """
    import onnx

    from ortprep.stages.core.graph_walk import walk_tensors

    model = onnx.load(request.model, load_external_data=False)
    needed = [tensor for tensor in walk_tensors(model) if tensor.data_location == tensor.EXTERNAL]
    others = () if unlinkable_files(request.model) else request.others
    for other in (other for other in others if needed and not unlinkable_files(other)):
        candidates = walk_tensors(onnx.load(other, load_external_data=False))
        offered = [tensor for tensor in candidates if _reference(tensor).get("length")]
        _refer(offered, [_reference(tensor) for tensor in offered])  # without packed forms: of another graph
        locations = {_reference(tensor)["location"] for tensor in offered}
        lengths = {_reference(tensor)["length"] for tensor in offered}
        if len(locations) != 1 or any(_reference(tensor).get("length") not in lengths for tensor in needed):
            continue
        places = dict(zip(_digests(offered, other.parent), offered, strict=True))
        found = [places.get(digest) for digest in _digests(needed, request.model.parent)]
        if all(found):
            _refer(needed, [_reference(tensor) for tensor in found if tensor is not None])
            request.written.parent.mkdir(parents=True, exist_ok=True)
            request.written.write_bytes(model.SerializeToString())
            return other.with_name(locations.pop())
    return None


def _reference(tensor: onnx.TensorProto) -> dict[str, str]:
    """Returns where a tensor's values are: `location`, `offset`, `length` and, maybe, packed forms."""
    return {"offset": "0", **{entry.key: entry.value for entry in tensor.external_data}}


def _digests(tensors: Iterable[onnx.TensorProto], folder: Path) -> list[bytes]:
    """Returns the digest of each tensor's values, which are in files below a folder."""
    from ortprep.stages.convert.weights import read_pieces

    digests = []
    for tensor in tensors:
        hasher = hashlib.sha256()
        for piece in read_pieces(tensor, folder):
            hasher.update(piece)
        digests.append(hasher.digest())
    return digests


def _refer(tensors: Sequence[onnx.TensorProto], references: Sequence[dict[str, str]]) -> None:
    """Has tensors refer to these places, and to nothing else."""
    for tensor, reference in zip(tensors, references, strict=True):
        del tensor.external_data[:]
        for key in ("location", "offset", "length"):
            tensor.external_data.add(key=key, value=reference[key])
