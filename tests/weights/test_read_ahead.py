"""What is read before it is asked for lies in the page cache, and reading it hurts nothing."""

import ctypes
import mmap
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from jaxllm.machine import Memory
from jaxllm.weights import folder
from jaxllm.weights.folder import reading_ahead

SIZE = 8 * 2**20


def cached_pages(path: Path) -> int:
    """Pages of a file that the system holds."""
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as data:
        pages = (ctypes.c_ubyte * -(-len(data) // mmap.PAGESIZE))()
        start = ctypes.c_char.from_buffer(data)
        address = ctypes.c_void_p(ctypes.addressof(start))
        assert ctypes.CDLL(None, use_errno=True).mincore(address, ctypes.c_size_t(len(data)), pages) == 0
        del start
    return sum(page & 1 for page in pages)


def make_uncached(path: Path) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(os.urandom(SIZE))
    with open(path, "rb") as file:
        os.fdatasync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if cached_pages(path):
        pytest.skip("this file system keeps what it is asked to let go of")
    return path


def wait_until_done() -> None:
    deadline = time.monotonic() + 30
    while any(thread.name == "read ahead" for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_file_is_cached(tmp_path: Path) -> None:
    path = make_uncached(tmp_path / "model.gguf")
    with reading_ahead(path):
        wait_until_done()
    assert cached_pages(path) == SIZE // mmap.PAGESIZE


def test_all_files_of_a_folder_are_cached(tmp_path: Path) -> None:
    paths = [make_uncached(tmp_path / name) for name in ("one.safetensors", "arrays/two")]
    with reading_ahead(tmp_path):
        wait_until_done()
    assert [cached_pages(path) for path in paths] == [SIZE // mmap.PAGESIZE] * 2


def test_it_leaves_half_of_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [make_uncached(tmp_path / name) for name in ("1", "2")]
    monkeypatch.setattr(folder, "memory", lambda: Memory(4 * SIZE, 2 * SIZE))
    with reading_ahead(tmp_path):
        wait_until_done()
    assert cached_pages(paths[0]) == SIZE // mmap.PAGESIZE
    assert cached_pages(paths[1]) == 0


def test_it_ends_with_the_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Endless:
        def __enter__(self) -> "Endless":
            return self

        def __exit__(self, *error: object) -> None:
            pass

        def readinto(self, buffer: bytearray) -> int:
            time.sleep(0.001)
            return 1

    monkeypatch.setattr(folder, "open", lambda *given, **how: Endless(), raising=False)
    with reading_ahead(make_uncached(tmp_path / "model.gguf")):
        assert any(thread.name == "read ahead" for thread in threading.enumerate())
    assert not any(thread.name == "read ahead" for thread in threading.enumerate())


def test_what_cannot_be_read_is_left_to_the_loader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [make_uncached(tmp_path / name) for name in ("1", "2")]

    def failing(name: Path, *given: Any, **how: Any) -> Any:
        if name == paths[0]:
            raise PermissionError(13, "Permission denied", str(name))
        return open(name, *given, **how)

    monkeypatch.setattr(folder, "open", failing, raising=False)
    with reading_ahead(tmp_path):
        wait_until_done()
    assert [cached_pages(path) for path in paths] == [0, SIZE // mmap.PAGESIZE]


def test_a_link_out_of_the_folder_is_not_followed(tmp_path: Path) -> None:
    outside, folder = make_uncached(tmp_path / "outside"), tmp_path / "model"
    folder.mkdir()
    (folder / "weights.safetensors").symlink_to(outside)
    with reading_ahead(folder):
        wait_until_done()
    assert cached_pages(outside) == 0
