"""What do readers of outside bytes do with any bytes? `python -m bench.fuzz TARGET --seconds N`.

Needs atheris (`pip install atheris`), best in an environment of its own. The law of every target: its reader
returns, or raises an error of the package, within seconds and bounded memory. What breaks it is written to
the working folder and belongs into `tests/corpus/TARGET`, which `tests/test_bench.py` replays.
"""

from __future__ import annotations

import argparse
import ast
import atexit
import contextlib
import functools
import io
import json
import os
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

from ortprep.errors import BundleError, PipelineError

CORPUS = Path(__file__).parents[1] / "tests/corpus"
MAX_INPUT_BYTES = 16 * 1024
TIMEOUT_S, MAX_RSS_MB = 10, 2048

Check = Callable[[bytes], None]
"""Feeds bytes to a reader; raises what breaks the law."""


def onnx_wire() -> Check:
    """Skeletons of models; the external files that they name include all that protobuf finds."""
    import onnx
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

    from ortprep.bundle import onnx_wire as wire

    file = _scratch_file()
    wire.SMALL_BYTES = 16  # else small inputs are never descended into

    def check(data: bytes) -> None:
        file.write_bytes(data)
        try:
            skeleton = wire.read_skeleton(file)
            found = wire.external_locations(skeleton)
            assert set(wire.external_locations(skeleton, in_subgraphs_only=True)) <= set(found)
        except wire.WireError:
            return
        with contextlib.suppress(DecodeError):
            assert set(_external_files(onnx.ModelProto.FromString(data))) <= set(found)

    return check


def npz() -> Check:
    """Arrays of `.npz` files: a whole file, or (first byte odd) one member whose checksum is right."""
    from ortprep.runtime.tensors.arrays import read_headers, read_tensors

    file = _scratch_file()

    def check(data: bytes) -> None:
        method = {1: zipfile.ZIP_STORED, 3: zipfile.ZIP_DEFLATED}.get(data[0] % 4 if data else 0)
        content = io.BytesIO()
        if method is None:
            content.write(data[1:])
        else:
            with zipfile.ZipFile(content, "w", method) as archive:
                archive.writestr("x.npy", data[1:])
        file.write_bytes(content.getvalue())
        for read in (read_headers, functools.partial(read_tensors, max_bytes=2**24)):
            with contextlib.suppress(BundleError):
                read(file)

    return check


def documents() -> Check:
    """`loader.json` and `manifest.json` with right digests of their own, and a registry's documents."""
    from ortprep.bundle.digest import digest_json
    from ortprep.bundle.loader_config import read_loader_config
    from ortprep.bundle.manifest import read_manifest
    from ortprep.registry.documents import parse_part, parse_version
    from ortprep.runtime.dropin import source_index

    folder = _scratch_file().parent

    def check(data: bytes) -> None:
        sealed = data
        with contextlib.suppress(ValueError, RecursionError):
            fields: Any = json.loads(data)
            if isinstance(fields, dict):
                fields.pop("self_digest", None)
                sealed = json.dumps(fields | {"self_digest": digest_json(fields)}).encode()
        for name in ("loader.json", "manifest.json"):
            (folder / name).write_bytes(sealed)
        for read in (read_loader_config, read_manifest):
            with contextlib.suppress(BundleError):
                read(folder)
        source_index._read_source(str(folder))
        for parse in (parse_part, parse_version):
            with contextlib.suppress(PipelineError):
                parse(data)

    return check


def cache_entries() -> Check:
    """Remembered digests and loads: anything that is none is as if it were not there."""
    import ortprep.runtime.loading.resolved_variant as loads
    from ortprep.bundle import file_memory as memory
    from ortprep.runtime.loading.load_options import LoadOptions
    from ortprep.runtime.loading.session import import_onnxruntime

    import_onnxruntime()
    folder = _scratch_file().parent
    os.environ[memory.CACHE_VARIABLE] = str(folder)
    loader = folder / "loader.json"
    loader.write_bytes(b"{}")
    stamp, options, root = memory.read_stamp(loader), LoadOptions(), str(folder)
    digests, load = folder / "digests", loads._entry(stamp, options)
    assert load is not None

    def check(data: bytes) -> None:
        memory.write_entry(memory.entry_path(str(digests), stamp), data)
        digest = memory.read_digest(stamp, str(digests))
        assert digest is None or memory.is_digest(digest)
        key = repr(loads._key(root, options)).encode()
        for content in (data, b"(%b, %b)" % (key, data)):
            memory.write_entry(load, content)
            resolved = loads.recall(root, options)
            assert resolved is None or not resolved.find_changed()

    return check


def inference_protocol() -> Check:
    """Requests of the inference protocol; a zero byte ends the JSON if binary tensors follow."""
    from ortprep.bundle.loader_config import TensorSpec, read_loader_config
    from ortprep.ray_inference.inference_protocol import ProtocolError, parse_request

    inputs = TensorSpec("x", "float32", ("n", 2)), TensorSpec("s", "string", ("n",))
    bundle = read_loader_config(CORPUS.parent / "compat/0.1.0/conv")
    config = bundle._replace(inputs=inputs)

    def check(data: bytes) -> None:
        header, separator, tensors = data.partition(b"\0")
        with contextlib.suppress(ProtocolError):
            parse_request(header + tensors, len(header) if separator else None, config)

    return check


TARGETS = {
    target.__name__: target for target in (onnx_wire, npz, documents, cache_entries, inference_protocol)
}


VALUES: tuple[Any, ...] = (None, True, -1, 0, 2**64, 1e308, "", "\x1b\ud800", "x" * 300, "../x", [], {}, [[]])


def mutate_values(data: bytes, max_size: int, seed: int) -> bytes:
    """Changes one value of JSON or of a Python literal; other bytes, and half of those, as libFuzzer does."""
    import atheris

    random = Random(seed)
    text, separator, rest = data.partition(b"\0")
    for parse, write in ((json.loads, json.dumps), (ast.literal_eval, repr)):
        with contextlib.suppress(ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            value = _mutate(parse(text.decode()), random)
            changed = write(value).encode() + separator + rest
            if random.random() < 0.5 and len(changed) <= max_size:
                return changed
    mutated: bytes = atheris.Mutate(data, max_size)
    return mutated


def _mutate(value: Any, random: Random) -> Any:
    if not isinstance(value, dict | list | tuple) or not value or random.random() < 0.1:
        return random.choice(VALUES)
    items = dict(value.items() if isinstance(value, dict) else enumerate(value))
    chosen = random.choice(list(items))
    if random.random() < 0.1:
        del items[chosen]
    else:
        items[chosen] = _mutate(items[chosen], random)
    return items if isinstance(value, dict) else type(value)(items.values())


def _scratch_file() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="ortprep-fuzz-", dir="/dev/shm"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder / "file"


def _external_files(message: Any) -> Iterator[str]:
    """Yields the location of every external tensor in a protobuf message."""
    if message.DESCRIPTOR.full_name == "onnx.TensorProto":
        # What is no UTF-8 is left as bytes by protobuf.
        yield from (os.fsdecode(entry.value) for entry in message.external_data if entry.key == "location")
    for field, value in message.ListFields():
        if field.type == field.TYPE_MESSAGE:
            for item in value if hasattr(value, "add") else (value,):
                yield from _external_files(item)


def main() -> None:
    """Fuzzes a target until its time is up or its law is broken."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", choices=TARGETS)
    parser.add_argument("--seconds", type=int, default=600)
    parser.add_argument("--corpus", type=Path, help="inputs to begin with beside the tests', and to add to")
    arguments = parser.parse_args()
    import atheris

    corpus = arguments.corpus or Path(tempfile.mkdtemp(prefix="ortprep-corpus-"))
    with atheris.instrument_imports(include=["ortprep", "zipfile", "json", "numpy.lib"]):
        check = TARGETS[arguments.target]()
    flags = {
        "max_total_time": arguments.seconds,
        "max_len": MAX_INPUT_BYTES,
        "timeout": TIMEOUT_S,
        "rss_limit_mb": MAX_RSS_MB,
        "print_final_stats": 1,
    }
    folders = [str(folder) for folder in (corpus, CORPUS / arguments.target) if folder.is_dir()]
    options = [f"-{name}={value}" for name, value in flags.items()]
    atheris.Setup([sys.argv[0], *options, *folders], check, custom_mutator=mutate_values)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
