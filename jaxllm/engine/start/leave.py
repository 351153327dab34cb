"""How a process of a group ends: at once, for JAX would wait for processes that are gone."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from typing import NoReturn

from jaxllm import logs

logger = logging.getLogger(__name__)


def die(reason: str) -> NoReturn:
    """End the process because its group is over, with one line that says why. Any thread may call this."""
    if logs.settings().format == "json":
        logger.critical(reason)
    else:
        print(f"jaxllm: error: {reason}", file=sys.stderr, flush=True)
    leave(1)


def leave(status: int) -> NoReturn:
    """End the process now, whatever its threads do."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # nobody reads it any more
            stream.flush()
    os._exit(status)
