"""Arrays of every element type survive files and sessions; a file that lies is refused, not believed."""

import io
import os
import struct
import tracemalloc
import zipfile

import numpy as np
import pytest

from ortprep.errors import BundleError, InvalidRequestError
from ortprep.runtime.tensors.arrays import read_headers, read_tensors, run_session, write_tensors
from ortprep.runtime.tensors.element_types import dtype_name, to_bfloat16
from ortprep.runtime.tensors.signatures import Signature, check_inputs
from tests.runtime.builders import one_node_model

pytestmark = pytest.mark.runtime

LARGE = np.arange(400_000, dtype=np.float64)


def same(left, right):
    return left.shape == right.shape and left.dtype == right.dtype and left.tobytes() == right.tobytes()


def test_numpy_reads_what_we_write_and_we_read_what_numpy_writes(tmp_path):
    write_tensors(tmp_path / "ours.npz", {"input:x": LARGE})
    with np.load(tmp_path / "ours.npz", allow_pickle=False) as loaded:
        assert same(loaded["input:x"], LARGE)
    np.savez_compressed(tmp_path / "theirs.npz", x=LARGE.astype(">f8"))
    assert same(read_tensors(tmp_path / "theirs.npz")["x"], LARGE)


def test_object_arrays_of_strings_become_strings_and_others_are_refused(tmp_path):
    write_tensors(tmp_path / "a.npz", {"x": np.array(["a", "bcd"], dtype=object)})
    assert read_tensors(tmp_path / "a.npz")["x"].tolist() == ["a", "bcd"]
    for bad in (np.array([{}], dtype=object), np.array(["2020"], dtype="M8[Y]"), np.array([b"bytes"])):
        with pytest.raises(BundleError, match="'x'"):
            write_tensors(tmp_path / "b.npz", {"x": bad})


@pytest.mark.parametrize("name", ["a\0b", "x" * 70_000])
def test_a_name_that_no_file_can_have_is_refused(tmp_path, name):
    with pytest.raises(BundleError, match="cannot write"):
        write_tensors(tmp_path / "a.npz", {name: np.zeros(1)})


@pytest.mark.attack
def test_f15_pickled_objects_are_never_read(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.array([print], dtype=object))
    with pytest.raises(BundleError, match="pickled"):
        read_tensors(tmp_path / "a.npz")


@pytest.mark.attack
def test_a_small_file_of_large_arrays_is_refused_by_its_size_in_memory(tmp_path):
    np.savez_compressed(tmp_path / "bomb.npz", x=np.zeros(2_000_000, np.uint8))
    assert (tmp_path / "bomb.npz").stat().st_size < 10_000
    with pytest.raises(BundleError, match="too large"):
        read_tensors(tmp_path / "bomb.npz", max_bytes=1_000_000)


@pytest.mark.attack
def test_an_empty_array_has_no_size_that_takes_gigabytes_of_a_graph(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.zeros((0, 200_000_000), np.float32))
    with pytest.raises(BundleError, match="shape"):
        read_tensors(tmp_path / "a.npz")
    signature = Signature("net", {"x": np.dtype(np.float32)}, {})
    with pytest.raises(InvalidRequestError, match="sizes beside the 0"):
        check_inputs(signature, {"x": np.zeros((0, 200_000_000), np.float32)})
    batch = check_inputs(signature, {"x": np.zeros((0, 3, 224, 224), np.float32)})["x"]
    assert batch.shape == (0, 3, 224, 224)


@pytest.mark.attack
def test_what_onnx_runtime_would_read_wrongly_is_turned_or_refused():
    signature = Signature("net", {"x": np.dtype(np.float32)}, {})
    turned = check_inputs(signature, {"x": np.arange(3, dtype=">f4")})["x"]
    assert turned.dtype.isnative
    assert turned.tolist() == [0, 1, 2]
    with pytest.raises(InvalidRequestError, match="no booleans"):  # a worker would take it for an attack
        check_inputs(Signature("b", {"x": np.dtype(bool)}, {}), {"x": np.array([2], np.uint8).view(bool)})


@pytest.mark.attack
@pytest.mark.parametrize("code", [0x110000, 0xD800, 0xFFFFFFFF])
def test_text_that_is_no_unicode_is_refused(tmp_path, code):
    np.savez(tmp_path / "a.npz", x=np.array([65, code], np.uint32).view("U2"))
    with pytest.raises(BundleError, match="not Unicode"):
        read_tensors(tmp_path / "a.npz")


@pytest.mark.attack
def test_only_files_of_ones_own_may_be_compressed(tmp_path):
    # A golden sample of 1 MB cost whoever loaded its bundle 1 GB.
    np.savez_compressed(tmp_path / "a.npz", x=np.zeros(2_000_000, np.uint8))
    assert read_tensors(tmp_path / "a.npz")["x"].size == 2_000_000
    with pytest.raises(BundleError, match=r"compressed arrays in .*a\.npz\n  expected uncompressed ones"):
        read_tensors(tmp_path / "a.npz", only_stored=True)


@pytest.mark.attack
@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_no_method_whose_file_chooses_its_readers_memory(tmp_path, method):
    with zipfile.ZipFile(tmp_path / "a.npz", "w", method) as archive:
        archive.writestr("x.npy", header() + b"1234")
    with pytest.raises(BundleError, match="expected uncompressed or deflated ones"):
        read_tensors(tmp_path / "a.npz")


@pytest.mark.attack
def test_stored_entries_that_share_their_bytes_take_no_more_than_the_file(tmp_path):
    path = zip_of(tmp_path / "a.npz", header(shape=(100_000,)) + bytes(100_000))
    data = path.read_bytes()
    begin, end = data.index(b"PK\1\2"), data.index(b"PK\5\6")
    entry, count = data[begin:end], 100
    entries = b"".join(entry.replace(b"x.npy", b"%05d" % number) for number in range(count))
    counts = struct.pack("<HHL", count, count, len(entries))
    path.write_bytes(data[:begin] + entries + data[end : end + 8] + counts + data[end + 16 :])
    with pytest.raises(BundleError, match=r"arrays too large: .*a\.npz"):
        read_tensors(path, only_stored=True)


@pytest.mark.attack
def test_a_header_of_an_array_is_read_to_its_bound_only(tmp_path):
    large = b"\x93NUMPY\x02\x00" + struct.pack("<L", 20_000_000) + b" " * 20_000_000
    with zipfile.ZipFile(tmp_path / "a.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x.npy", large)
    for read in (read_tensors, read_headers):
        tracemalloc.start()
        with pytest.raises(BundleError):
            read(tmp_path / "a.npz")
        assert tracemalloc.get_traced_memory()[1] < 2_000_000
        tracemalloc.stop()


@pytest.mark.attack
def test_a_long_list_of_entries_is_refused_before_it_is_read(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("x.npy", header() + b"1234")
    data = (tmp_path / "a.npz").read_bytes()
    end = data.index(b"PK\5\6")
    (tmp_path / "a.npz").write_bytes(data[: end + 12] + struct.pack("<L", 5_000_000) + data[end + 16 :])
    with pytest.raises(BundleError, match="list of entries takes more"):
        read_tensors(tmp_path / "a.npz")


def zip_of(path, member, *, count=1):
    with zipfile.ZipFile(path, "w") as archive:
        for _ in range(count):
            archive.writestr(zipfile.ZipInfo("x.npy"), member)
    return path


def literal(descr, shape):
    """A header that numpy itself would not write."""
    text = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}}}\n".encode()
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text


def header(**fields):
    stream = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        stream, {"descr": "|u1", "fortran_order": False, "shape": (4,)} | fields
    )
    return stream.getvalue()


@pytest.mark.attack
@pytest.mark.parametrize(
    "member",
    [
        b"",
        b"not an array",
        header()[:20],
        header() + b"123",
        header() + b"12345",
        header(shape=(2**60,)) + b"1234",
        header(shape=(-4, -1)) + b"1234",
        header(shape=(0, 10**30)),
        header(descr="|O") + b"1234",
        header(descr="<M8[s]", shape=()) + b"12345678",
        header(descr=[("a", "|O")]) + b"1234",
        header(descr=("|u1", (4,)), shape=()) + b"1234",
        b"\x93NUMPY\x09\x00" + header()[8:] + b"1234",
        literal("'|u1'", f"({'-' * 9000}1,)"),
        literal("'|u1'", "(" * 4000),
        literal("'|u1'", "[" * 3000 + "]" * 3000),
        literal("'|u1'", "(True,)") + b"1",
        header(descr="|b1") + b"\0\1\2\1",
        literal("'<U0'", "(1000000000,)"),
        literal("'|V0'", "(1000000000,)"),
        literal("[('a', '<f4')]", "(1,)") + b"1234",
    ],
)
def test_an_array_that_is_not_what_it_says_is_refused(tmp_path, member):
    with pytest.raises(BundleError, match=r"a\.npz"):
        read_tensors(zip_of(tmp_path / "a.npz", member))


@pytest.mark.attack
def test_a_pipe_in_a_files_place_is_never_waited_for(tmp_path):
    os.mkfifo(tmp_path / "a.npz")
    with pytest.raises(BundleError, match="not a regular file"):
        read_tensors(tmp_path / "a.npz")


@pytest.mark.attack
@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_two_arrays_of_one_name_are_refused(tmp_path):
    with pytest.raises(BundleError, match="same name"):
        read_tensors(zip_of(tmp_path / "a.npz", header() + b"1234", count=2))


@pytest.mark.attack
def test_every_cut_and_every_flipped_bit_is_an_error_or_harmless(tmp_path):
    write_tensors(tmp_path / "a.npz", {"x": np.arange(3, dtype=np.uint8)})
    whole = (tmp_path / "a.npz").read_bytes()
    damaged = [whole[:length] for length in range(len(whole))]
    damaged += [whole[:i] + bytes([whole[i] ^ 0x10]) + whole[i + 1 :] for i in range(len(whole))]
    for data in damaged:
        (tmp_path / "b.npz").write_bytes(data)
        try:
            read = read_tensors(tmp_path / "b.npz")
        except BundleError:
            continue
        # What the format does not protect is names, dates and attributes; the array's bytes have a checksum.
        assert [array.tolist() for array in read.values()] in ([[0, 1, 2]], [])


FLOAT, STRING, ONNX_BFLOAT16 = 1, 8, 16


def run(model, feed):
    import onnxruntime

    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    (output,) = run_session(session, {"x": feed}).items()
    assert output[0] == "y"
    return output[1]


def test_bfloat16_goes_into_a_session_and_comes_out():
    numbers = np.array([1, 2, 7], np.float32)
    rounded = run(one_node_model("Cast", FLOAT, ONNX_BFLOAT16, opset=21), numbers)
    assert dtype_name(rounded.dtype) == "bfloat16"
    assert same(rounded, to_bfloat16(numbers))
    assert run(one_node_model("Cast", ONNX_BFLOAT16, FLOAT, opset=21), rounded).tolist() == [1, 2, 7]


def test_strings_go_into_a_session_and_come_out():
    words = np.array(["a", "bé", ""])
    assert same(run(one_node_model("Identity", STRING, STRING), words), words)
    assert same(run(one_node_model("Identity", STRING, STRING), words.astype(object)), words)


def test_arrays_that_are_not_contiguous_are_taken_as_they_read():
    numbers = np.arange(6, dtype=np.float32)
    strided = to_bfloat16(numbers)[::2]
    assert run(one_node_model("Cast", ONNX_BFLOAT16, FLOAT), strided).tolist() == [0, 2, 4]
    assert run(one_node_model("Identity", FLOAT, FLOAT), numbers[::2]).tolist() == [0, 2, 4]


@pytest.mark.attack
def test_a_file_with_64_bit_numbers_at_its_end_is_read_and_bounded(tmp_path, monkeypatch):
    # zipfile writes them above 2 GiB. A lower limit makes it write them into a small file.
    monkeypatch.setattr(zipfile, "ZIP64_LIMIT", 64)
    path = tmp_path / "large.npz"
    np.savez(path, x=np.arange(3.0))
    data = path.read_bytes()
    assert data[-98:-94] == b"PK\6\6"
    np.testing.assert_array_equal(read_tensors(path)["x"], np.arange(3.0))
    for place, value, problem in ((-98 + 40, 1 << 40, "list of entries takes more"), (-34, 7, "not where")):
        at = len(data) + place
        path.write_bytes(data[:at] + value.to_bytes(8, "little") + data[at + 8 :])
        with pytest.raises(BundleError, match=problem):
            read_tensors(path)
