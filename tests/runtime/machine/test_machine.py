"""Memory, page cache and availability, as this machine has them."""

import ctypes
import gc
import mmap
import os
import tempfile
import threading
from pathlib import Path

import pytest

from ortprep.bundle.scratch_folder import scratch_folder
from ortprep.children import availability
from ortprep.children.availability import unavailable_reason
from ortprep.errors import CacheError
from ortprep.runtime.machine import memory
from ortprep.runtime.machine.hardware import Gpu, read_gpus, read_hardware
from ortprep.runtime.machine.memory import drop_file, peak_rss_bytes, prefetch_file, private_bytes
from tests.fakes import is_interrupted

pytestmark = pytest.mark.runtime

SIZE = 8 * 2**20


def resident_pages(path):
    """How many pages of a file are in the page cache."""
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        pages = (ctypes.c_ubyte * (len(mapped) // mmap.PAGESIZE))()
        view = (ctypes.c_char * len(mapped)).from_buffer(mapped)
        code = ctypes.CDLL(None).mincore(ctypes.byref(view), ctypes.c_size_t(len(mapped)), pages)
        del view
    assert code == 0
    return sum(page & 1 for page in pages)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "weights"
    path.write_bytes(os.urandom(SIZE))
    return path


@pytest.fixture
def quiet():
    """Nothing that earlier tests left gives memory back meanwhile: no garbage, no thread that reads ahead."""
    for thread in threading.enumerate():
        if thread.name == "ortprep-prefetch":
            thread.join(600)
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("quiet")
def test_private_memory_grows_with_what_is_written_to(file):
    content = file.read_bytes()
    before = private_bytes()
    with mmap.mmap(-1, SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as ballast:
        ballast.write(content)
        assert private_bytes() - before >= SIZE


@pytest.mark.usefixtures("quiet")
def test_private_memory_does_not_count_mapped_files(file):
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        before = private_bytes()
        assert sum(mapped[i] for i in range(0, SIZE, mmap.PAGESIZE)) > 0
        assert private_bytes() - before < SIZE / 2


def test_the_peak_never_falls():
    before = peak_rss_bytes()
    ballast = bytearray(os.urandom(1)) * (64 * 2**20)
    during = peak_rss_bytes()
    del ballast
    # The kernel counts pages per processor and adds them up roughly.
    rough = 16 * 2**20
    assert during >= before - rough
    assert peak_rss_bytes() >= during - rough


def test_a_dropped_file_is_read_from_disk_again_and_a_prefetched_one_is_not(file):
    drop_file(file)
    left = resident_pages(file)
    if left == SIZE // mmap.PAGESIZE:
        pytest.skip("this file system lives in memory")
    assert left == 0
    prefetch_file(file)
    file.read_bytes()
    assert resident_pages(file) == SIZE // mmap.PAGESIZE


@pytest.mark.parametrize(
    ("limit", "most"), [(None, None), ("max", None), ("9223372036854771712", None), ("3000", 1000)]
)
def test_free_memory_is_the_machine_s_unless_a_control_group_has_less(tmp_path, monkeypatch, limit, most):
    """`max` is what Docker without a limit and a server without containers have."""
    monkeypatch.setattr(memory, "group_folders", lambda *_: [str(tmp_path)] if limit else [])
    (tmp_path / "memory.max").write_text(limit or "")
    (tmp_path / "memory.current").write_text("2000")
    free = memory.free_bytes()
    assert free > 2**20 if most is None else free == most


@pytest.fixture
def unasked():
    """Has the check for available targets forget its answers, before and after a test."""
    unavailable_reason.cache_clear()
    yield
    unavailable_reason.cache_clear()


@pytest.mark.usefixtures("unasked")
@pytest.mark.skipif(bool(read_gpus()), reason="this machine has a GPU")
def test_without_a_gpu_or_its_libraries_cuda_is_unavailable(monkeypatch):
    assert unavailable_reason("cuda") == "no CUDA device or driver"
    gpu = Gpu("H200", (9, 0), 2**37, "580", "13.0", "GPU-1")
    here = read_hardware()._replace(gpus=(gpu,))
    monkeypatch.setattr(availability, "read_hardware", lambda: here)
    unavailable_reason.cache_clear()
    reason = unavailable_reason("cuda")
    assert reason.startswith("ONNX Runtime cannot make a cuda session: expected")


# -- scratch folders are gone afterwards, wherever a signal handler raises


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def use(make):
    with make() as folder:
        (Path(folder) / "file").touch()
        (Path(folder) / "sub").mkdir()


@pytest.mark.attack
def test_a_folder_is_not_where_others_could_move_it(temporary, monkeypatch):
    """A world-writable folder that is not sticky, as an `emptyDir` of Kubernetes is."""
    cache = temporary / "cache"
    monkeypatch.setenv("ORTPREP_CACHE_DIR", str(cache))
    temporary.chmod(0o1777)
    with scratch_folder("mine-") as folder:
        assert folder.parent == temporary
    open_to_all = temporary / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    for unsafe in (open_to_all, open_to_all / "mine"):
        unsafe.mkdir(exist_ok=True)
        monkeypatch.setattr(tempfile, "tempdir", str(unsafe))
        with scratch_folder("mine-") as folder:
            assert folder.is_relative_to(cache)
        assert not folder.exists()
    monkeypatch.setenv("ORTPREP_CACHE_DIR", str(open_to_all))
    with scratch_folder("mine-") as folder:
        assert folder.parent == Path("/dev/shm")
    monkeypatch.setattr("ortprep.bundle.scratch_folder._SHARED_MEMORY", str(open_to_all))
    with pytest.raises(CacheError, match="no safe folder for temporary files"), scratch_folder("mine-"):
        pass


@pytest.mark.filterwarnings("ignore:unclosed scandir:ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interruption_at_any_step_leaves_nothing(temporary):
    step = 1
    while is_interrupted(lambda: use(lambda: scratch_folder("mine-")), step):
        assert not list(temporary.iterdir()), f"interrupted at step {step}"
        step += 1
    assert step > 50
    assert not list(temporary.iterdir())


def test_what_killed_processes_left_goes_when_the_next_folder_is_made(temporary):
    for name in ("mine-left", "mine-new", "others-left"):
        (temporary / name).mkdir()
        (temporary / name / "file").write_bytes(b"x")
        os.utime(temporary / name, None if name == "mine-new" else (0, 0))
    with scratch_folder("mine-") as used:
        os.utime(used, (0, 0))
        with scratch_folder("mine-"):
            left = {path.name for path in temporary.iterdir()}
    assert {used.name, "mine-new", "others-left"} < left
    assert "mine-left" not in left


def test_what_is_written_during_the_removal_goes_too(temporary):
    ended = threading.Event()

    def write(folder):
        for number in range(10_000):
            if ended.is_set():
                return
            (folder / str(number)).write_bytes(b"")

    with scratch_folder("mine-") as folder:
        threads = [threading.Thread(target=_ignoring_loss, args=(write, folder)) for _ in range(2)]
        for thread in threads:
            thread.start()
    ended.set()
    for thread in threads:
        thread.join()
    assert not list(temporary.iterdir())


def _ignoring_loss(write, folder):
    try:
        write(folder)
    except FileNotFoundError:
        return
