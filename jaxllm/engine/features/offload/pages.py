"""Pages and states outside the devices: in host memory, and in files of a folder, which outlive the process."""

from __future__ import annotations

import array
import contextlib
import hashlib
import logging
import os
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from jaxllm.engine.core.pages import PrefixNode
from jaxllm.errors import ConfigError
from jaxllm.folders import UNFINISHED, make_private, others_may_write, write_whole

RowKind = Literal["page", "state"]
ROW_KINDS: tuple[RowKind, RowKind] = ("page", "state")


class CacheRow(NamedTuple):
    """A row of the layers' buffers: a page, or the state of one sequence or prefix."""

    kind: RowKind
    number: int


Page = np.ndarray
"""What all layers keep of one page's tokens, or the states of all layers after a prefix, as bytes: uint8 `[nbytes]`.
Nobody changes one."""


class HostPages:
    """As many pages and states as a budget holds. Any thread may use it."""

    def __init__(self, budget: int, on_full: Callable[[Digest, Page], None] = lambda digest, page: None):
        """`budget` is in bytes; `on_full` is called, in the thread that adds another, with each page that gives way."""
        self.budget = budget
        self._on_full = on_full
        self._pages: OrderedDict[Digest, Page] = OrderedDict()
        self._nbytes = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._pages)

    def __contains__(self, digest: Digest) -> bool:
        return digest in self._pages

    @property
    def nbytes(self) -> int:
        """What they take together."""
        return self._nbytes

    def add(self, digest: Digest, page: Page) -> None:
        """Keep a page, as the one used last."""
        dropped = []
        with self._lock:
            if digest in self._pages:
                self._pages.move_to_end(digest)
                return
            self._pages[digest] = page
            self._nbytes += page.nbytes
            while self._nbytes > self.budget:
                dropped.append(self._pages.popitem(last=False))
                self._nbytes -= dropped[-1][1].nbytes
        for lost in dropped:
            self._on_full(*lost)

    def get(self, digest: Digest) -> Page | None:
        """A page, which is the one used last now; None if it is not here."""
        with self._lock:
            page = self._pages.get(digest)
            if page is not None:
                self._pages.move_to_end(digest)
            return page

    def items(self) -> list[tuple[Digest, Page]]:
        """All that is here, the longest unused first."""
        with self._lock:
            return list(self._pages.items())


Digest = bytes
"""32 bytes: of a prefix that ends with a full page, or of the state after one."""


class PrefixDigests:
    """Digests of a page pool's nodes.

    Prefixes that begin from nothing, or from a cache salt, are called the same in every process. Others depend on what
    is known by numbers of this process only, such as adapters: no other process finds them.
    """

    def __init__(self) -> None:
        self._here = secrets.token_bytes(16)
        self._of: dict[PrefixNode, Digest] = {}

    def __getitem__(self, node: PrefixNode) -> Digest | None:
        """None of a node whose page was given away."""
        return self._of.get(node) if isinstance(node, int) else self.of_root(node)

    def of_root(self, root: PrefixNode) -> Digest:
        """Where prefixes of a root begin."""
        if root is None or isinstance(root, str):
            return hashlib.blake2b(repr(root).encode(), digest_size=32).digest()
        return hashlib.blake2b(repr(root).encode(), digest_size=32, key=self._here).digest()

    def add(self, node: PrefixNode, parent: PrefixNode, tokens: Sequence[int]) -> Digest | None:
        """The digest of a new node; None where nothing is known of its parent, so that nobody finds it."""
        before = self[parent]
        if before is None:
            return None
        self._of[node] = longer(before, tokens)
        return self._of[node]

    def forget(self, node: PrefixNode) -> Digest | None:
        """The digest of a node that is no more."""
        return self._of.pop(node, None)


def of_state(prefix: Digest) -> Digest:
    """Of the state after a prefix, which is kept among the pages and called otherwise than all of them."""
    return hashlib.blake2b(prefix + b"state", digest_size=32).digest()


def longer(before: Digest, tokens: Sequence[int]) -> Digest:
    """Of the prefix that has a page of `tokens` more than `before`."""
    return hashlib.blake2b(before + array.array("i", tokens).tobytes(), digest_size=32).digest()


def chain(begin: Digest, tokens: Sequence[int], page_size: int) -> list[Digest]:
    """Of every prefix of `tokens` in whole pages, the shortest first, behind the prefix `begin`."""
    found = []
    for start in range(0, len(tokens) - page_size + 1, page_size):
        begin = longer(begin, tokens[start : start + page_size])
        found.append(begin)
    return found


logger = logging.getLogger(__name__)

CHECKSUM = 16
"""Bytes at a file's beginning: a digest of what follows."""
UNFINISHED_SECONDS = 3600
"""A file that was not finished for so long has no process any more that would."""


class DiskPages:
    """As many pages and states as a budget holds, the longest unused of which are deleted. Any thread may use it.

    A file appears when it is whole, and is checked when it is read. Several processes may share a folder: what one
    deletes the other does not find.
    """

    def __init__(self, folder: Path, name: str, budget: int, lengths: Collection[int]):
        """Files lie in `folder`/`name`, which is a digest of all that decides what is in them.

        `budget` is in bytes, and `lengths` are those that a page or a state has.

        Raises:
            ConfigError: the folder cannot be made, or others than this user may write to it.
        """
        self._budget = budget
        self._lengths = lengths
        self._folder = folder / name
        self._lock = threading.Lock()
        self._complained = False
        try:
            make_private(self._folder)
            if any(others_may_write(place.stat()) for place in (folder, self._folder)):
                raise ConfigError(f"kv_offload_dir is {str(folder)!r}, and others than this user may write there")
            self._files = self._found()
            """How many bytes each file has, the longest unused first."""
            self._nbytes = sum(self._files.values())
        except OSError as error:
            raise ConfigError(f"kv_offload_dir is {str(folder)!r}: {error.strerror}") from None

    def __len__(self) -> int:
        return len(self._files)

    def __contains__(self, digest: Digest) -> bool:
        return digest in self._files

    @property
    def nbytes(self) -> int:
        """What they take together."""
        return self._nbytes

    def write(self, digest: Digest, page: Page) -> None:
        """Keep a page. What keeps it from that, as a full disk, is said once."""
        if digest in self._files:
            self._touch(digest)
            return
        try:
            write_whole(self._path(digest), [_checksum(page), page.data])
        except OSError as error:
            self._complain("written", error)
            return
        dropped = []
        with self._lock:
            if digest not in self._files:  # else another thread has written it meanwhile
                self._files[digest] = page.nbytes + CHECKSUM
                self._nbytes += self._files[digest]
            while self._nbytes > self._budget:
                old, nbytes = self._files.popitem(last=False)
                self._nbytes -= nbytes
                dropped.append(old)
        for old in dropped:
            self._delete(old)

    def read(self, digest: Digest) -> Page | None:
        """A page; None if it is not there any more, or damaged, and then it is deleted."""
        try:
            content = np.fromfile(self._path(digest), np.uint8)
        except OSError as error:
            if not isinstance(error, FileNotFoundError):
                self._complain("read", error)
            self._forget(digest)
            return None
        checksum, page = content[:CHECKSUM].tobytes(), content[CHECKSUM:]
        if page.nbytes not in self._lengths or _checksum(page) != checksum:
            logger.warning("%s is damaged, and deleted", self._path(digest))
            self._forget(digest)
            self._delete(digest)
            return None
        self._touch(digest)
        return page

    def _found(self) -> OrderedDict[Digest, int]:
        """What is there, the longest unused first."""
        aged: list[tuple[float, Digest, int]] = []
        with os.scandir(self._folder) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):  # another process deletes files as well
                    status = entry.stat()
                    modified = status.st_mtime
                    if entry.name.startswith(UNFINISHED):
                        if time.time() - modified > UNFINISHED_SECONDS:
                            os.unlink(entry.path)
                    elif len(entry.name) == 64:
                        aged.append((modified, bytes.fromhex(entry.name), status.st_size))
        return OrderedDict((digest, nbytes) for _, digest, nbytes in sorted(aged))

    def _path(self, digest: Digest) -> Path:
        return self._folder / digest.hex()

    def _touch(self, digest: Digest) -> None:
        with self._lock:
            if digest in self._files:
                self._files.move_to_end(digest)
        with contextlib.suppress(OSError):  # another process has deleted it
            os.utime(self._path(digest))

    def _forget(self, digest: Digest) -> None:
        with self._lock:
            self._nbytes -= self._files.pop(digest, 0)

    def _delete(self, digest: Digest) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._path(digest).unlink()

    def _complain(self, what: str, error: OSError) -> None:
        if not self._complained:
            self._complained = True
            logger.warning("pages of the KV cache cannot be %s in %s: %s", what, self._folder, error.strerror)


def _checksum(page: Page) -> bytes:
    return hashlib.blake2b(page, digest_size=CHECKSUM).digest()
