"""A tool server as a process of ours, which is spoken to through its stdin and stdout.

The SDK's own transport lets grandchildren live on when the server itself ends properly, reads lines of any length, and
hides the server's complaints.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Any

import anyio
import psutil
from anyio.abc import ByteReceiveStream, Process

from jaxllm.mcp.settings import ServerSettings

if TYPE_CHECKING:
    from mcp.shared.message import SessionMessage

logger = logging.getLogger(__name__)

INHERITED = (  # variables that every server gets; the rest of our environment, such as keys, is kept from it
    "HOME", "LANG", "LC_ALL", "LC_CTYPE", "LOGNAME", "PATH", "SHELL", "TERM", "TMPDIR", "TZ", "USER",
    "APPDATA", "COMSPEC", "HOMEDRIVE", "HOMEPATH", "LOCALAPPDATA", "PATHEXT", "PROCESSOR_ARCHITECTURE", "SYSTEMDRIVE",
    "SYSTEMROOT", "TEMP", "USERNAME", "USERPROFILE",
)  # fmt: skip

MAX_MESSAGE = 16 * 2**20  # bytes of one message: it is parsed at once, on the event loop
GRACE_SECONDS = 2.0  # the time for a server to end by itself once its stdin is closed, and again once it was told to
_LAST_WORDS_SECONDS = 0.2
_KEPT_COMPLAINTS = 20
_COMPLAINT = 2000


class ProcessFailed(Exception):
    """The process is gone, or of no more use; says why."""


class Child:
    """The process of a server, and the last lines of its stderr."""

    def __init__(self, settings: ServerSettings, process: Process):
        self._settings = settings
        self._process = process
        self._complaints: deque[str] = deque(maxlen=_KEPT_COMPLAINTS)
        self._heard_all = anyio.Event()
        self.read_all = anyio.Event()
        self.problem: str | None = None  # the reason for giving it up, if it did not simply end

    def last_words(self) -> str:
        """How it ended, for people."""
        status = self._process.returncode
        what = self.problem or f"the program ended with status {status}"
        complaint = next((line for line in reversed(self._complaints) if line.strip()), None)
        return what if complaint is None else f"{what}: {complaint}"

    async def listen(self) -> None:
        assert self._process.stderr is not None
        async for line in _lines(self._process.stderr, _COMPLAINT, cut=True):
            shown = self._settings.shown(line.decode(errors="replace"))
            self._complaints.append(shown)
            logger.debug("%s: %s", self._settings.label, shown)
        self._heard_all.set()

    async def stop(self) -> None:
        """Ask it to end by closing its stdin, then tell it, then force it; nothing that it started survives."""
        family = _descendants(self._process.pid)
        if self._process.stdin is not None:
            with contextlib.suppress(OSError, anyio.BrokenResourceError, anyio.ClosedResourceError):
                await self._process.stdin.aclose()
        await self._gone([], GRACE_SECONDS)
        if self._process.returncode is None:
            self.problem = self.problem or "its output ended"
        with anyio.move_on_after(_LAST_WORDS_SECONDS):
            await self._heard_all.wait()
        family = [one for one in {*family, *_descendants(self._process.pid)} if one.is_running()]
        for kind, seconds in ((signal.SIGTERM, GRACE_SECONDS), (getattr(signal, "SIGKILL", signal.SIGTERM), 1.0)):
            if self._process.returncode is not None and not _group_lives(self._process.pid) and not _alive(family):
                break
            with contextlib.suppress(ProcessLookupError, PermissionError, AttributeError):
                os.killpg(self._process.pid, kind)
            for one in family:  # some may have left the group
                with contextlib.suppress(psutil.Error):
                    one.send_signal(kind)
            await self._gone(family, seconds)
        with anyio.move_on_after(_LAST_WORDS_SECONDS):  # asyncio keeps what belongs to a pipe until its end is read
            await self.read_all.wait()
            await self._heard_all.wait()

    async def _gone(self, family: list[psutil.Process], seconds: float) -> None:
        """Wait until the process, and its family, have ended, but no longer than `seconds`."""
        with anyio.move_on_after(seconds):
            while self._process.returncode is None or (family and (_alive(family) or _group_lives(self._process.pid))):
                await anyio.sleep(0.02)


@contextlib.asynccontextmanager
async def started(settings: ServerSettings) -> AsyncIterator[tuple[Any, Any, Child]]:
    """Start the server, and end it after the block: its messages, ours, and the process. Raises OSError."""
    assert settings.command is not None
    with anyio.CancelScope(shield=True):  # or a cancelled start would leave a process that is not known
        process = await anyio.open_process(
            [settings.command, *settings.args],
            env={name: os.environ[name] for name in INHERITED if name in os.environ} | dict(settings.env),
            cwd=settings.cwd,
            start_new_session=True,
        )
    child = Child(settings, process)
    heard, messages = anyio.create_memory_object_stream[Any](0)
    outbox, to_send = anyio.create_memory_object_stream[Any](0)
    async with anyio.create_task_group() as tasks:
        reading = [anyio.CancelScope(shield=True) for _ in range(2)]  # goes on to the end, whoever is cancelled
        tasks.start_soon(_within, reading[0], child.listen)
        tasks.start_soon(_within, reading[1], _read, child, process, heard)
        tasks.start_soon(_write, process, to_send, heard)
        try:
            yield messages, outbox, child
        finally:
            with anyio.CancelScope(shield=True):
                await child.stop()
                for stream in (heard, messages, outbox, to_send):
                    await stream.aclose()
            for scope in (*reading, tasks.cancel_scope):
                scope.cancel()


async def _within(scope: anyio.CancelScope, work: Callable[..., Awaitable[None]], *arguments: Any) -> None:
    with scope:
        await work(*arguments)


async def _read(child: Child, process: Process, heard: Any) -> None:
    from mcp.shared.message import SessionMessage
    from mcp_types import jsonrpc_message_adapter

    assert process.stdout is not None
    with contextlib.suppress(anyio.ClosedResourceError, anyio.BrokenResourceError):
        async with heard:
            try:
                async for line in _lines(process.stdout, MAX_MESSAGE):
                    try:
                        message: SessionMessage | Exception = SessionMessage(
                            jsonrpc_message_adapter.validate_json(line, by_name=False)
                        )
                    except ValueError as error:
                        logger.debug("%s said what is no message", child._settings.label)
                        message = error
                    await heard.send(message)
            except ProcessFailed as error:
                child.problem = str(error)
    async for _ in _chunks(process.stdout):
        pass  # a process that waits for us to read cannot end
    child.read_all.set()


async def _write(process: Process, to_send: Any, heard: Any) -> None:
    assert process.stdin is not None
    try:
        async with to_send:
            async for message in to_send:
                text = message.message.model_dump_json(by_alias=True, exclude_unset=True)
                await process.stdin.send(text.encode() + b"\n")
    except (OSError, anyio.ClosedResourceError, anyio.BrokenResourceError):
        await heard.aclose()  # it may live, but does not listen: tell those who wait for an answer


async def _lines(stream: ByteReceiveStream, most: int, *, cut: bool = False) -> AsyncIterator[bytes]:
    """Lines as they come. One longer than `most` is cut, or raises ProcessFailed."""
    pieces: list[bytes] = []
    size = 0
    async for chunk in _chunks(stream):
        while True:
            line, end, chunk = chunk.partition(b"\n")
            if size + len(line) > most and not cut:
                raise ProcessFailed(f"it sent a message of more than {most} bytes")
            pieces.append(line[: max(most - size, 0)])
            size += len(pieces[-1])
            if not end:
                break
            yield b"".join(pieces)
            pieces, size = [], 0
    if size:
        yield b"".join(pieces)


async def _chunks(stream: ByteReceiveStream) -> AsyncIterator[bytes]:
    with contextlib.suppress(OSError, anyio.EndOfStream, anyio.ClosedResourceError, anyio.BrokenResourceError):
        while True:
            yield await stream.receive()


def _descendants(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.Error:
        return []


def _alive(family: list[psutil.Process]) -> bool:
    for one in family:
        with contextlib.suppress(psutil.Error):
            if one.is_running() and one.status() != psutil.STATUS_ZOMBIE:
                return True
    return False


def _group_lives(pid: int) -> bool:
    """Whether a process of the group that this one led is alive; zombies do not count."""
    try:
        os.killpg(pid, 0)
    except (ProcessLookupError, PermissionError, AttributeError):
        return False
    return _alive([one for one in psutil.process_iter() if _group(one) == pid])


def _group(process: psutil.Process) -> int | None:
    try:
        return os.getpgid(process.pid)
    except OSError:
        return None
