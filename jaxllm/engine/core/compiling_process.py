"""A process beside the engine's that compiles steps, so that none is traced under the GIL that the loop needs."""

from __future__ import annotations

import logging
import os
import subprocess
import tempfile
import threading
from collections.abc import Callable, Mapping
from typing import TextIO

from jaxllm import own_process

logger = logging.getLogger(__name__)

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
            said = tempfile.TemporaryFile("w+")  # noqa: SIM115  a pipe that nobody reads meanwhile would fill, and stop it
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
        self,
        process: subprocess.Popen[str],
        said: TextIO,
        on_saved: Callable[[str], None],
        on_end: Callable[[], None],
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
