"""A model's files into the system's page cache, while what comes before the loading of weights is done."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from jaxllm.errors import CheckpointError
from jaxllm.machine import memory
from jaxllm.weights.folder import model_file
from jaxllm.weights.gguf_parts import part_files

CHUNK = 2**20
"""Bytes read at once, into one buffer: it is the system that keeps them."""


@contextmanager
def reading_ahead(path: Path) -> Iterator[None]:
    """Read a checkpoint's file and its other parts, or all files of its folder, in a thread that ends with the block.

    It stops at half of the memory that is free, so that nothing in use is put out; what it cannot read, it leaves to
    the loader, which says so.
    """
    files = part_files(path) if path.is_file() else sorted(_files_of(path))
    left, ended = memory().available // 2, threading.Event()

    def read() -> None:
        buffer, budget = bytearray(CHUNK), left
        for name in files:
            try:
                with open(name, "rb", buffering=0) as file:
                    while budget > 0 and not ended.is_set() and (count := file.readinto(buffer)):
                        budget -= count
            except OSError:  # the loader meets it again and names it
                continue

    thread = threading.Thread(target=read, name="read ahead", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _files_of(folder: Path) -> Iterator[Path]:
    for file in folder.rglob("*"):
        try:
            if model_file(folder, str(file.relative_to(folder))).is_file():
                yield file
        except CheckpointError:  # a link that leads out of the folder is not followed here either
            continue
