"""Pages and states outside the devices: in host memory, and in files of a folder, which outlive the process."""

from __future__ import annotations

import array
import contextlib
import hashlib
import logging
import os
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from jaxllm.engine.core.pages import NO_TOKEN, PrefixNode
from jaxllm.errors import ConfigError
from jaxllm.folders import UNFINISHED, make_private, others_may_write, write_whole
from jaxllm.recent import Recent

logger = logging.getLogger(__name__)

RowKind = Literal["page", "state"]
ROW_KINDS: tuple[RowKind, RowKind] = ("page", "state")
Digest = bytes
"""32 bytes: of a prefix that ends with a full page, or of the state after one."""
Page = np.ndarray
"""The content of one page, or the states of all layers after a prefix: uint8 `[nbytes]`, never changed."""

CHECKSUM = 16
"""Bytes at a file's beginning: a digest of its name and of what follows."""
UNFINISHED_SECONDS = 3600


class CacheRow(NamedTuple):
    """A row of the layers' buffers: a page, or the state of one sequence or prefix."""

    kind: RowKind
    number: int


class HostPages(Recent[Page]):
    def __init__(self, budget: int, on_full: Callable[[Digest, Page], None] = lambda digest, page: None):
        super().__init__(budget, lambda page: page.nbytes)
        self._on_full = on_full

    def add(self, digest: Digest, page: Page) -> None:
        if self.get(digest) is None:
            for lost in self.put(digest, page):
                self._on_full(*lost)


class DiskPages(Recent[int]):
    """Pages and states in files, by size, each written whole and checked when read; processes may share a folder."""

    def __init__(self, folder: Path, name: str, budget: int, lengths: Collection[int]):
        """`name` is a digest of what decides the content. Raises ConfigError: others may write to `folder`, or none
        can.
        """
        self._lengths = lengths
        self._folder = folder / name
        self._complained = False
        try:
            make_private(self._folder)
            if any(others_may_write(place.stat()) for place in (folder, self._folder)):
                raise ConfigError(f"kv_offload_dir is {str(folder)!r}, and others than this user may write there")
            super().__init__(budget, lambda nbytes: nbytes, self._found())
        except OSError as error:
            raise ConfigError(f"kv_offload_dir is {str(folder)!r}: {error.strerror}") from None

    def write(self, digest: Digest, page: Page) -> None:
        """Keep a page. What keeps it from that, as a full disk, is said once."""
        if digest in self:
            self._touch(digest)
            return
        try:
            write_whole(self._path(digest), [_checksum(digest, page), page.data])
        except OSError as error:
            self._complain("written", error)
            return
        for old, _ in self.put(digest, page.nbytes + CHECKSUM):
            self._path(old).unlink(missing_ok=True)

    def read(self, digest: Digest) -> Page | None:
        """A page; None if it is not there any more, or damaged, and then it is deleted."""
        try:
            content = np.fromfile(self._path(digest), np.uint8)
        except OSError as error:
            if not isinstance(error, FileNotFoundError):
                self._complain("read", error)
            self.forget(digest)
            return None
        checksum, page = content[:CHECKSUM].tobytes(), content[CHECKSUM:]
        if page.nbytes not in self._lengths or _checksum(digest, page) != checksum:
            logger.warning("%s is damaged, and deleted", self._path(digest))
            self.forget(digest)
            self._path(digest).unlink(missing_ok=True)
            return None
        self._touch(digest)
        return page

    def _found(self) -> OrderedDict[Digest, int]:
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
        self.get(digest)
        with contextlib.suppress(OSError):  # another process has deleted it
            os.utime(self._path(digest))

    def _complain(self, what: str, error: OSError) -> None:
        if not self._complained:
            self._complained = True
            logger.warning("pages of the KV cache cannot be %s in %s: %s", what, self._folder, error.strerror)


def _checksum(digest: Digest, page: Page) -> bytes:
    """Of a page as the content of one prefix, so that a file under another's name is not believed."""
    return hashlib.blake2b(page, digest_size=CHECKSUM, key=digest).digest()


class PrefixDigests:
    """Digests of a page pool's nodes.

    Prefixes that begin from nothing, or from a cache salt, are called the same in every process. Others depend on what
    is known by numbers of this process only, such as adapters: no other process finds them.
    """

    def __init__(self) -> None:
        self._here = secrets.token_bytes(16)
        self._of: dict[PrefixNode, Digest] = {}

    def __getitem__(self, node: PrefixNode) -> Digest | None:
        return self._of.get(node) if isinstance(node, int) else self.of_root(node)

    def of_root(self, root: PrefixNode) -> Digest:
        """Where prefixes of a root begin."""
        key = b"" if root is None or isinstance(root, str) else self._here
        return hashlib.blake2b(repr(root).encode(), digest_size=32, key=key).digest()

    def add(self, node: PrefixNode, parent: PrefixNode, tokens: Sequence[int]) -> Digest | None:
        """The digest of a new node; None where nothing is known of its parent, so that it is never found."""
        before = self[parent]
        if before is None:
            return None
        self._of[node] = longer(before, tokens)
        return self._of[node]

    def forget(self, node: PrefixNode) -> Digest | None:
        return self._of.pop(node, None)


def of_state(prefix: Digest) -> Digest:
    """Of the state after a prefix, which is kept among the pages and called otherwise than all of them."""
    return hashlib.blake2b(prefix + b"state", digest_size=32).digest()


def longer(before: Digest, tokens: Sequence[int]) -> Digest:
    """The digest of a prefix that `tokens` make longer; rows of images have numbers that no token has."""
    small = array.array("i", [token if token < NO_TOKEN else -1 for token in tokens]).tobytes()
    rows = b"".join(token.to_bytes(36) for token in tokens if token >= NO_TOKEN)
    return hashlib.blake2b(before + small + rows, digest_size=32).digest()


def chain(begin: Digest, tokens: Sequence[int], page_size: int) -> list[Digest]:
    """Of every prefix of `tokens` in whole pages after the prefix `begin`, the shortest first."""
    found = []
    for start in range(0, len(tokens) - page_size + 1, page_size):
        begin = longer(begin, tokens[start : start + page_size])
        found.append(begin)
    return found
