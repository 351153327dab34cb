"""The end of a process of a group: at once, for JAX would wait for processes that are gone."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
from typing import NoReturn

from jaxllm import logs

logger = logging.getLogger(__name__)
_dying = threading.Lock()


def die(reason: str) -> NoReturn:
    """End the process because its group is over, with one line that says why. Any thread may call this; the first one
    has its say.
    """
    _dying.acquire()
    if logs.settings().format == "json":
        logger.critical(reason)
    else:
        print(f"jaxllm: error: {reason}", file=sys.stderr, flush=True)
    leave(1)


def leave(status: int) -> NoReturn:
    """End the process now, whatever its threads do."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # it is closed at the other end
            stream.flush()
    os._exit(status)
