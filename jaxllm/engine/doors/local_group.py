"""One model over the devices of this machine, each in a process of its own: process 0 starts those that follow it."""

from __future__ import annotations

import logging
import os
import secrets
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import NoReturn

import msgspec

from jaxllm import logs
from jaxllm.config import EngineConfig
from jaxllm.engine.doors.share import Share
from jaxllm.engine.start.leave import leave
from jaxllm.errors import EngineDeadError, JaxLLMError, one_line
from jaxllm.logs import LogSettings
from jaxllm.own_process import PipedProcess
from jaxllm.sharding.wire import free_port
from jaxllm.weights.source import resolve_model

logger = logging.getLogger(__name__)

END_SECONDS = 5.0
"""For a process to end that has closed its pipe, so that its exit code can be told."""


class NotJoined(msgspec.Struct):
    """Why a process could not follow: `kind` is an error type of jaxllm.errors."""

    kind: str
    message: str


def start_followers(config: EngineConfig, name: str, on_failure: Callable[[str, str], None]) -> EngineConfig:
    """Make this process number 0 of a group with a process for each device, and start the others.

    Call it before JAX is imported: this process keeps one device, or one part of the cores, from now on. The others end
    with it, however it ends. The model's files are fetched first, so that one process alone does so.

    Args:
        config: with multi_process, and 2 devices or more.
        name: what this process is called in logs; the others have their number after it.
        on_failure: called in any thread with an error type of jaxllm.errors and a message, where another process ends.
            Once all have come together, the group itself knows better why.

    Returns:
        The settings of this process, with its place in the group.

    Raises:
        ConfigError: there are fewer devices, or devices that one process takes whole.
        ModelNotFoundError: the model's files cannot be had.
    """
    resolve_model(config.model, revision=config.revision, download_dir=config.download_dir)
    count = config.num_devices
    sizes = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
    setting = " * ".join(name for name in sizes if getattr(config, name) > 1)
    group = {
        "multi_process": False, "num_processes": count, "cluster": "off", "cluster_secret": secrets.token_urlsafe(32),
        "coordinator_address": f"127.0.0.1:{free_port()}",
    }  # fmt: skip

    def share(number: int) -> Share:
        return Share(number, count, setting)

    def place(number: int) -> EngineConfig:
        own = {"process_id": number, "threads": share(number).threads(config.threads)}
        return config.model_copy(update=group | own)

    for number in range(1, count):
        process = PipedProcess(run_follower, place(number), share(number), f"{name}:{number}", logs.settings())
        threading.Thread(target=_listen, args=(process, number, on_failure), name=f"{number}", daemon=True).start()
    share(0).take(1)
    return place(0)


def run_follower(pipe: Connection, config: EngineConfig, share: Share, name: str, log: LogSettings) -> None:
    """All that a process does that follows process 0; it ends with the group, or with whoever started it."""
    logs.configure(log, name)
    threading.Thread(target=_end_with, args=(pipe,), name="owner", daemon=True).start()
    os.environ["TTY_COMPATIBLE"] = "0"  # process 0 shows how far it is, for all of them
    try:
        share.take(1)
        from jaxllm.engine.start.follow import follow  # JAX comes with it, which looks at the environment

        follow(config, end=_end)
    except JaxLLMError as error:
        problem = NotJoined(type(error).__name__, str(error))
    except Exception as error:
        logger.exception("this process cannot follow")
        said = f"process {config.process_id} has failed: {type(error).__name__}: {one_line(error)}"
        problem = NotJoined(EngineDeadError.__name__, said)
    pipe.send_bytes(msgspec.msgpack.encode(problem))
    leave(1)


def _end(reason: str) -> NoReturn:
    """Process 0 has the reason too, and tells it to those who asked for something."""
    logger.debug(reason)
    leave(1)


def _end_with(pipe: Connection) -> None:
    try:
        pipe.poll(None)
    finally:  # nothing is ever sent: process 0 is gone
        leave(1)


def _listen(process: PipedProcess, number: int, on_failure: Callable[[str, str], None]) -> None:
    """Until a process has ended; this keeps hold of it."""
    try:
        problem = msgspec.msgpack.decode(process.pipe.recv_bytes(), type=NotJoined)
    except (EOFError, OSError):
        process.wait(END_SECONDS)
        problem = NotJoined(EngineDeadError.__name__, f"process {number} is gone (exit code {process.exit_code})")
    on_failure(problem.kind, problem.message)
