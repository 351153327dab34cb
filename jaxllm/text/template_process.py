"""Renders chat templates in a process of their own, which can be stopped.

Jinja's sandbox keeps a template from reaching anything, but neither from looping nor from building a text without end.
`python -m jaxllm.text.template_process` is such a process: one JSON object a line in, one a line out.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

from jaxllm.errors import InvalidRequestError
from jaxllm.line_process import Process, ask, end, limit_memory, start

RENDER_SECONDS = 10.0
"""How long one template may take, the start of its process included."""
ORPHAN_SECONDS = 20
"""The same where nobody is left to stop it."""
MEMORY_BYTES = 256 * 2**20
MAX_PROMPT_CHARACTERS = 16 * 2**20


class TemplateProcess:
    """One process, started when it is first needed and again after it was stopped; callers wait for each other."""

    def __init__(self, seconds: float = RENDER_SECONDS) -> None:
        self._seconds = seconds
        self._lock = threading.Lock()
        self._process: Process | None = None

    def render(self, values: dict[str, Any]) -> str:
        """`jaxllm.text.chat_template.render(**values)` of JSON values.

        Raises InvalidRequestError when the template refuses, or needs too much time, memory or text.
        """
        try:
            line = json.dumps(values).encode() + b"\n"
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidRequestError(f"messages are no JSON values: {error}", param="messages") from None
        with self._lock:
            process = self._started()
            timer = threading.Timer(self._seconds, process.kill)
            timer.start()
            try:
                reply = ask(process, line)
            finally:
                timer.cancel()
            if reply is None:
                killed = process.wait() < 0  # by a signal: the timer's
                end(process)
                self._process = None
        if reply is None:
            limit = f"more than {self._seconds:g} seconds" if killed else f"more than {MEMORY_BYTES:,} bytes of memory"
            raise InvalidRequestError(f"the chat template needs {limit} to render", param="chat_template")
        if "error" in reply:
            raise InvalidRequestError(reply["error"], param=reply["param"])
        return reply["text"]

    def close(self) -> None:
        """End the process; a later `render` starts another."""
        with self._lock:
            if self._process is not None:
                end(self._process)
                self._process = None

    def _started(self) -> Process:
        if self._process is None or self._process.poll() is not None:
            self._process = start("jaxllm.text.template_process")
            weakref.finalize(self, end, self._process).atexit = False  # it ends with us, and is not a forked child's
        return self._process


def main() -> None:
    """Render what stdin asks for until it closes."""
    from jaxllm.text.chat_template import render  # here, so that who starts this process needs no jinja2

    limit_memory(MEMORY_BYTES)
    for line in sys.stdin.buffer:
        _alarm(ORPHAN_SECONDS)
        reply = _reply(render, json.loads(line))
        _alarm(0)
        sys.stdout.write(json.dumps(reply) + "\n")
        sys.stdout.flush()


def _reply(render: Callable[..., str], values: dict[str, Any]) -> dict[str, Any]:
    try:
        text = render(**values)
    except InvalidRequestError as error:
        return {"error": str(error), "param": error.param}
    if len(text) > MAX_PROMPT_CHARACTERS:
        long = f"the chat template makes a prompt of {len(text)} characters; accepted are {MAX_PROMPT_CHARACTERS}"
        return {"error": long, "param": "chat_template"}
    return {"text": text}


def _alarm(seconds: int) -> None:
    """End this process after so long, where the system can; 0 calls it off."""
    if os.name == "posix":
        signal.alarm(seconds)


if __name__ == "__main__":
    main()
