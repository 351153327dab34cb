"""Executables kept in files, which the next start loads without tracing, and the process that makes some of them.

A saved executable is code that runs in this process. A file is loaded only if it is whole and no other user than this
one, or root, could have written it: its header says what is in it, for which step, and the digest of its content.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import subprocess
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

import jax

from jaxllm import compat, own_process
from jaxllm.engine.core.keys import Key
from jaxllm.engine.core.sampler import Logprobs, Sampled, Settled
from jaxllm.engine.core.slots import Slots
from jaxllm.errors import first_line
from jaxllm.folders import UNFINISHED, last_used, make_private, others_may_write, size_of, write_whole
from jaxllm.models.layers.host_experts import ExpertPlaces

logger = logging.getLogger(__name__)

MAGIC = b"jaxllm executable 2\n"
SETS = "executables"
"""The folder for sets of executables, among what XLA keeps by itself."""
KEPT_SETS = 32
"""Sets of executables, one for each model and settings, that are kept; the longest unused goes first."""

_RECORDS: dict[str, Any] = {record.__name__: record for record in (ExpertPlaces, Logprobs, Sampled, Settled, Slots)}
"""The named tuples among what steps return."""


class SavedExecutables:
    """The executables of one engine, in a folder named by the digest of all that they depend on.

    Executables that were `shipped` in a folder of their own are looked for first; nothing is ever written there.
    """

    def __init__(
        self, root: Path | None, manifest: dict[str, str], devices: Sequence[jax.Device], shipped: Path | None = None
    ):
        """`manifest` says in words what the executables depend on; `devices` are those of the mesh, in its order.

        Without `root` none are saved.
        """
        digest = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
        self.name = digest[:32]
        self.root = root
        self.roots = [place for place in (shipped, root) if place is not None]
        self._manifest = manifest
        self._devices = list(devices)
        self._complained: set[str] = set()

    def has(self, key: Key) -> bool:
        """There is a file for this step."""
        return any(self._path(root, key).exists() for root in self.roots)

    def load(self, key: Key, arguments: tuple[Any, ...]) -> Callable[..., Any] | None:
        """The executable of a step whose abstract arguments these are; None where it has to be compiled."""
        found = (self._load(self._path(root, key), root, key, arguments) for root in self.roots)
        return next((executable for executable in found if executable is not None), None)

    def _load(self, path: Path, root: Path, key: Key, arguments: tuple[Any, ...]) -> Callable[..., Any] | None:
        try:
            header, payload = _read(path, root)
            if header["key"] != str(key):
                raise ValueError(f"{path} is of the step {header['key']!r}")
            if header["takes"] != _takes(arguments):
                raise ValueError(f"{path} takes other arrays")
            in_tree = jax.tree.structure((arguments, {}))
            out_tree = jax.tree.structure(_decoded(header["returns"]))
            return compat.load_executable(payload, in_tree, out_tree, self._devices)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except Exception as error:  # of pickle, JAX or XLA: whatever it is, the step can be compiled
            self._complain("loaded", error)
            return None

    def save(self, key: Key, compiled: jax.stages.Compiled) -> None:
        """Keep an executable for the next start. A full disk or a folder that is not writable is said once."""
        if self.root is None:
            return
        try:
            payload, out_tree = compat.save_executable(compiled)
            returns = _encoded(jax.tree.unflatten(out_tree, range(out_tree.num_leaves)))
            digest = hashlib.sha256(payload).hexdigest()
            header = {"key": str(key), "sha256": digest, "size": len(payload), "returns": returns}
            header["takes"] = _takes(compiled.args_info)
            self._prepare(self.root)
            write_whole(self._path(self.root, key), [MAGIC, json.dumps(header).encode() + b"\n", payload])
        except (OSError, ValueError, NotImplementedError) as error:
            self._complain("saved", error)

    def touch(self) -> None:
        """These executables are in use."""
        if self.root is not None and (self.root / self.name).is_dir():
            os.utime(self.root / self.name)

    def difference(self, root: Path) -> str | None:
        """The difference between what the executables in `root` and these are for, in one line; None where there are
        some of these.
        """
        if (root / self.name).is_dir():
            return None
        others = [json.loads(path.read_text()) for path in root.glob("*/manifest.json")]
        if not others:
            return "there are none in it"
        nearest = min(others, key=lambda other: len(self._unlike(other)))
        return "; ".join(f"{name} is {there!r} there and {here!r} here" for name, there, here in self._unlike(nearest))

    def _unlike(self, other: dict[str, str]) -> list[tuple[str, str, str]]:
        names = sorted(self._manifest.keys() | other.keys())
        both = [(name, other.get(name, ""), self._manifest.get(name, "")) for name in names]
        return [(name, there, here) for name, there, here in both if there != here]

    def _path(self, root: Path, key: Key) -> Path:
        return root / self.name / f"{key}.executable"

    def _prepare(self, root: Path) -> None:
        """The folder, with a manifest for people to read; the longest unused of the others go."""
        directory = root / self.name
        if directory.is_dir():
            return
        make_private(directory)
        write_whole(directory / "manifest.json", [json.dumps(self._manifest, indent=2, sort_keys=True).encode()])
        for old in sorted(root.iterdir(), key=last_used)[:-KEPT_SETS]:
            with suppress(FileNotFoundError):  # another engine that starts has removed it
                _remove(old)

    def _complain(self, what: str, error: BaseException) -> None:
        if what not in self._complained:
            self._complained.add(what)
            logger.warning("executables cannot be %s, and are compiled at each start: %s", what, first_line(error))


def _read(path: Path, root: Path) -> tuple[dict[str, Any], bytes]:
    """Header and content.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is not whole, or others may have written it.
    """
    with path.open("rb") as file:
        for place, status in ((path, os.fstat(file.fileno())), (path.parent, path.parent.stat()), (root, root.stat())):
            if others_may_write(status):
                raise ValueError(f"{place} may have been written by others than this user")
        if file.readline(len(MAGIC)) != MAGIC:
            raise ValueError(f"{path} is no saved executable")
        header = json.loads(file.readline())
        payload = file.read(header["size"] + 1)
    if len(payload) != header["size"] or hashlib.sha256(payload).hexdigest() != header["sha256"]:
        raise ValueError(f"{path} is damaged")
    return header, payload


def _takes(arguments: Any) -> str:
    """A digest of the shapes and dtypes of a step's arguments."""
    return fingerprint([(leaf.shape, str(leaf.dtype)) for leaf in jax.tree.leaves(arguments)])


def make_room(cache: Path, most_bytes: int) -> None:
    """Delete what was unused longest of a compile cache beyond `most_bytes`: sets of executables, and XLA's own files.

    JAX's own limit would read all files' times whenever one is written, and lock the cache whenever one is read.
    """
    found = [(last_used(path), sum(map(size_of, path.glob("*"))), path) for path in (cache / SETS).glob("*/")]
    with os.scandir(cache) as entries:
        for entry in entries:
            if entry.name.endswith(("-cache", "-atime")):  # of XLA; the latter where JAX once had a limit
                with suppress(FileNotFoundError):  # another engine that starts has removed it
                    status = entry.stat()
                    found.append((max(status.st_atime, status.st_mtime), status.st_size, Path(entry.path)))
    total = sum(size for _, size, _ in found)
    for _, size, path in sorted(found):
        if total <= most_bytes:
            break
        total -= size
        with suppress(OSError):  # another engine has removed it, or another user owns it
            _remove(path) if path.is_dir() else path.unlink()


def _remove(directory: Path) -> None:
    """A set of executables; what else somebody has put there stays."""
    if not directory.is_dir():
        return
    for file in directory.iterdir():
        if file.suffix == ".executable" or file.name == "manifest.json" or file.name.startswith(UNFINISHED):
            file.unlink(missing_ok=True)
    if not any(directory.iterdir()):
        directory.rmdir()


def _encoded(returned: Any) -> Any:
    """A step's results as JSON: lists, dicts, named tuples by their names, and a number for each array."""
    if returned is None or isinstance(returned, int):
        return returned
    if isinstance(returned, dict):
        return {"dict": [[name, _encoded(item)] for name, item in returned.items()]}
    items = [_encoded(item) for item in returned]
    name = type(returned).__name__
    if name in _RECORDS:
        return {name: items}
    if not isinstance(returned, (tuple, list)) or hasattr(returned, "_fields"):
        raise ValueError(f"a step returns a {name}, which has no place in a saved executable")
    return items


def _decoded(content: Any) -> Any:
    """The inverse of `_encoded`, with a number in each array's place."""
    if isinstance(content, dict):
        ((name, items),) = content.items()
        if name == "dict":
            return {key: _decoded(item) for key, item in items}
        return _RECORDS[name](*map(_decoded, items))
    return tuple(map(_decoded, content)) if isinstance(content, list) else content


def fingerprint(value: Any) -> str:
    """A short digest of what describes itself by its repr; an address in it would be another in each process.

    Raises:
        ValueError: there is one.
    """
    text = repr(value)
    if " at 0x" in text:
        raise ValueError(f"{text[:200]} is not the same in every process")
    return hashlib.sha256(text.encode()).hexdigest()[:16]


MODULE = "jaxllm.engine.start.ahead"


class CompilingProcess:
    """`python -m jaxllm.engine.start.ahead`, which saves what it compiles and says the name of each step."""

    def __init__(self, *arguments: str, environment: Mapping[str, str]):
        """`environment` is what it has beside our own."""
        self._command = own_process.command(MODULE, *arguments)
        self._environment = environment
        self._process: subprocess.Popen[str] | None = None

    def start(self, on_saved: Callable[[str], None], on_end: Callable[[], None]) -> None:
        """Run it; a thread tells of each step that it has saved, and when it has ended, whatever the reason."""
        try:
            said = tempfile.TemporaryFile("w+")  # noqa: SIM115  an unread pipe would fill, and stop it
            self._process = subprocess.Popen(
                self._command,
                stdout=subprocess.PIPE,
                stderr=said,
                stdin=subprocess.DEVNULL,
                text=True,
                env=os.environ | self._environment,
            )
        except OSError as error:
            logger.warning("no process to compile in (%s): the engine compiles", error)
            on_end()
            return
        threading.Thread(
            target=self._follow, args=(self._process, said, on_saved, on_end), name="compiling", daemon=True
        ).start()

    def close(self) -> None:
        """End it."""
        if self._process is not None:
            self._process.kill()

    def _follow(
        self, process: subprocess.Popen[str], said: TextIO, on_saved: Callable[[str], None], on_end: Callable[[], None]
    ) -> None:
        try:
            with process, said:
                assert process.stdout is not None
                for line in process.stdout:
                    on_saved(line.strip())
                if process.wait() > 0:
                    said.seek(0)
                    reason = said.read().strip().splitlines()[-1:] or [f"exit status {process.returncode}"]
                    logger.warning("the process that compiles has failed, and the engine compiles: %s", reason[0])
        finally:
            on_end()
