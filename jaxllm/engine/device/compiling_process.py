"""A process beside the engine's that compiles steps, so that none is traced under the GIL that the loop needs."""

from __future__ import annotations

import logging
import subprocess
import threading
from collections.abc import Callable

from jaxllm import own_process

logger = logging.getLogger(__name__)

MODULE = "jaxllm.engine.start.ahead"


class CompilingProcess:
    """`python -m jaxllm.engine.start.ahead`, which saves what it compiles and says the name of each step."""

    def __init__(self, *arguments: str):
        self._command = own_process.command(MODULE, *arguments)
        self._process: subprocess.Popen[str] | None = None

    def start(self, on_saved: Callable[[str], None], on_end: Callable[[], None]) -> None:
        """Run it; a thread tells of each step that it has saved, and when it has ended, whatever the reason."""
        try:
            self._process = subprocess.Popen(
                self._command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True
            )
        except OSError as error:
            logger.warning("no process to compile in (%s): the engine compiles", error)
            on_end()
            return
        threading.Thread(
            target=self._follow, args=(self._process, on_saved, on_end), name="compiling", daemon=True
        ).start()

    def close(self) -> None:
        """End it."""
        if self._process is not None:
            self._process.kill()

    def _follow(
        self, process: subprocess.Popen[str], on_saved: Callable[[str], None], on_end: Callable[[], None]
    ) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            on_saved(line.strip())
        _, said = process.communicate()
        if process.returncode > 0:
            reason = said.strip().splitlines()[-1:] or [f"exit status {process.returncode}"]
            logger.warning("the process that compiles has failed, and the engine compiles: %s", reason[0])
        on_end()
