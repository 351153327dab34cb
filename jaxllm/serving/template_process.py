"""Renders chat templates in processes of `jaxllm.text.template_process`, without blocking the event loop."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import msgspec

from jaxllm.errors import InvalidRequestError
from jaxllm.text.template_process import MAX_PROMPT_CHARACTERS

RENDER_SECONDS = 5.0
"""How long one template may take, the start of its process included."""
MAX_PROCESSES = 2

_REPLY_BYTES = 8 * MAX_PROMPT_CHARACTERS


class TemplateProcesses:
    """At most MAX_PROCESSES at once; whoever waits for one holds up nobody else."""

    def __init__(self) -> None:
        self._idle: list[asyncio.subprocess.Process] = []
        self._free = asyncio.Semaphore(MAX_PROCESSES)

    async def render(self, values: dict[str, Any]) -> str:
        """`jaxllm.text.chat_template.render(**values)`, stopped after RENDER_SECONDS.

        Raises InvalidRequestError when the template is wrong, takes too long, or needs too much memory.
        """
        async with self._free:
            process = await self._take()
            reply = None
            try:
                async with asyncio.timeout(RENDER_SECONDS):
                    reply = await _ask(process, values)
            except TimeoutError:
                raise InvalidRequestError(
                    f"chat_template takes longer than {RENDER_SECONDS:g} seconds to render", "chat_template"
                ) from None
            finally:
                if reply is not None:
                    self._idle.append(process)
                else:
                    await _stop(process)
        if reply is None:
            raise InvalidRequestError("chat_template needs too much memory to render", "chat_template")
        if "error" in reply:
            raise InvalidRequestError(reply["error"], reply["param"])
        return reply["text"]

    async def _take(self) -> asyncio.subprocess.Process:
        """An idle process that is still there, or a new one."""
        while self._idle:
            process = self._idle.pop()
            if _is_there(process):
                return process
            await _stop(process)
        return await _start()

    async def close(self) -> None:
        while self._idle:
            await _stop(self._idle.pop())


async def _start() -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "jaxllm.text.template_process",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        limit=_REPLY_BYTES,
    )


async def _ask(process: asyncio.subprocess.Process, values: dict[str, Any]) -> dict[str, Any] | None:
    """The process's reply; None when it died."""
    assert process.stdin is not None and process.stdout is not None
    if not _is_there(process):  # uvloop raises no OSError for a pipe that it has found closed
        return None
    try:
        process.stdin.write(msgspec.json.encode(values) + b"\n")
        await process.stdin.drain()
        line = await process.stdout.readline()
    except (BrokenPipeError, ConnectionResetError):
        return None
    return msgspec.json.decode(line) if line.endswith(b"\n") else None


def _is_there(process: asyncio.subprocess.Process) -> bool:
    return process.returncode is None and process.stdin is not None and not process.stdin.is_closing()


async def _stop(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.kill()
    await process.wait()
