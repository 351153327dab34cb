"""Packed weights in files beside the saved executables, which the next start on a CPU maps instead of packing again.

A mapped file takes no time to load, is shared by all processes that run the model, and can leave memory again. It is
written while the first start goes on, appears when it is whole, and is for the same files, plan and kernels alone.
"""

from __future__ import annotations

import atexit
import fcntl
import hashlib
import json
import logging
import os
import shutil
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO

import jax

from jaxllm import compat
from jaxllm.config import EngineConfig
from jaxllm.config.values import format_bytes
from jaxllm.engine.core.device_state import keep, map_kept, nbytes_kept
from jaxllm.engine.core.jobs import BACKGROUND_NICENESS, set_niceness
from jaxllm.engine.start.prepared import PreparedStage, Weights, step_manifest
from jaxllm.errors import first_line
from jaxllm.folders import UNFINISHED, last_used, make_private, others_may_write, size_of
from jaxllm.weights.folder import files_of

logger = logging.getLogger(__name__)

FOLDER = "weights"
ENDING = ".weights"
SPARED = 2**30
"""Bytes of the disk that stay free, beside as many as the file takes."""
QUICK = 1.0
"""Seconds: weights that were packed in less are not worth a file."""
OF_STEPS_ALONE = ("jax", "python", "compiler", "processor", "sizes")
"""What steps depend on, and weights do not."""


def identity(paths: Iterable[Path]) -> str:
    """A digest of which files these are: a file that is written anew has another time, whatever its size is."""
    digest = hashlib.sha256()
    for path in paths:
        for file in files_of(path):
            digest.update(file.name.encode())
            with suppress(OSError):  # whoever reads it says so
                status = file.stat()
                told = (status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)
                digest.update(repr(told).encode())
    return digest.hexdigest()[:16]


def last_kept(config: EngineConfig, files: str) -> Path | None:
    """The file that was used last of those that are kept of a model whose `files` these are, whatever its plan."""
    root = _root(config)
    return None if root is None else max(root.glob(f"{files}-*{ENDING}"), key=last_used, default=None)


def _root(config: EngineConfig) -> Path | None:
    cache = compat.compile_cache()
    return None if cache is None or not config.weight_cache_max else cache / FOLDER


class WeightCache:
    """The file of one stage's weights."""

    def __init__(self, root: Path, name: str, plan: str, most_bytes: int):
        """`plan` says in words which weights they are; the file is of no other."""
        self.path = root / f"{name}-{hashlib.sha256(plan.encode()).hexdigest()[:16]}{ENDING}"
        self._plan = f"{name} {plan}"
        self._most_bytes = most_bytes

    @classmethod
    def of(cls, config: EngineConfig, files: str, stage: PreparedStage) -> WeightCache | None:
        """Of the model whose `files` these are, an `identity`. None where weights are not kept: on other platforms,
        which copy them, and of devices of several processes.
        """
        root, blueprint = _root(config), stage.blueprint
        if root is None or blueprint.plan.platform != "cpu" or config.load_format == "dummy":
            return None
        if stage.mesh.is_multi_process:
            return None
        beside = [] if blueprint.draft is None else [blueprint.draft.path]
        beside += [] if config.imatrix is None else [Path(config.imatrix)]
        manifest = step_manifest(blueprint, stage.mesh)
        plan = {name: said for name, said in manifest.items() if name not in OF_STEPS_ALONE}
        return cls(root, files, json.dumps(plan | {"beside": identity(beside)}), config.weight_cache_max)

    def take(self, wanted: Sequence[jax.ShapeDtypeStruct]) -> Weights | None:
        """The weights, mapped; None where there are none for this plan, or others than this user may have written."""
        try:
            with self.path.open("rb") as file:
                if others_may_write(os.fstat(file.fileno())) or others_may_write(self.path.parent.stat()):
                    raise ValueError("others than this user may have written it")
                arrays = map_kept(file, wanted, self._plan)
            os.utime(self.path)
        except FileNotFoundError:
            return None
        except (ValueError, OSError) as error:
            logger.warning("%s is not used, and the weights are packed again: %s", self.path, first_line(error))
            return None
        return tuple(jax.device_put(array, own.sharding) for array, own in zip(arrays, wanted, strict=True))

    def write(self, weights: Weights) -> None:
        """Keep them, in a thread that ends when they are forgotten. A full disk is said, and changes nothing else."""
        alive = [weakref.ref(array) for array in weights]
        nbytes = sum(map(nbytes_kept, weights))
        niceness = os.getpriority(os.PRIO_PROCESS, 0)
        threading.Thread(target=self._write, args=(alive, nbytes, niceness), name="keep weights", daemon=True).start()

    def _write(self, alive: Sequence[weakref.ref[jax.Array]], nbytes: int, niceness: int) -> None:
        unfinished = self.path.with_name(UNFINISHED + self.path.name)
        forget = partial(unfinished.unlink, missing_ok=True)
        set_niceness(threading.get_native_id(), niceness + BACKGROUND_NICENESS)
        try:
            make_private(self.path.parent)
            if nbytes > self._most_bytes:
                raise OSError(f"they take {format_bytes(nbytes)}, and weight_cache_max is less")
            self._make_room(nbytes)
            with unfinished.open("ab") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if not _is_at(unfinished, file):
                    return  # another process has finished it since it was opened
                atexit.register(forget)  # the thread does not hold up an end of the process
                keep(file, _while_alive(alive), self._plan)
                os.fsync(file.fileno())
                unfinished.chmod(0o600)
                unfinished.replace(self.path)
            logger.info("The next start maps %s of packed weights from %s", format_bytes(nbytes), self.path)
        except BlockingIOError:  # another process writes the same
            return
        except (OSError, _ForgottenError) as error:
            with suppress(OSError):
                forget()
            if isinstance(error, _ForgottenError):
                return
            logger.warning("the packed weights are not kept for the next start: %s", first_line(error))
        finally:
            atexit.unregister(forget)

    def _make_room(self, nbytes: int) -> None:
        """Delete what killed processes left, then what was unused longest. Raises OSError: `nbytes` do not fit."""
        for left in self.path.parent.glob(f"{UNFINISHED}*"):
            with suppress(OSError), left.open("ab") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                left.unlink()
        others = sorted(self.path.parent.glob(f"*{ENDING}"), key=last_used, reverse=True)
        total = nbytes + sum(size_of(path) for path in others)
        while others and total > self._most_bytes:
            total -= size_of(others[-1])
            others.pop().unlink(missing_ok=True)
        free = shutil.disk_usage(self.path.parent).free
        if free < 2 * nbytes + SPARED:
            raise OSError(f"{self.path.parent} has {format_bytes(free)} free; it takes {format_bytes(nbytes)}")


def _is_at(path: Path, file: BinaryIO) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


class _ForgottenError(Exception):
    """The engine has ended, or has other weights."""


def _while_alive(references: Sequence[weakref.ref[jax.Array]]) -> Iterator[jax.Array]:
    for reference in references:
        array = reference()
        if array is None or array.is_deleted():
            raise _ForgottenError
        yield array
