"""A process of `AskedProcesses` that does what it is told: `python -m tests.support.asked_worker [IDLE_SECONDS]`."""

from __future__ import annotations

import os
import signal
import sys
import time

from jaxllm import own_process

MEMORY_BYTES = 2**30
ORPHAN_SECONDS = 0.2


def obey(asked: bytes) -> bytes:
    match asked.decode().split(" ", maxsplit=1):
        case ["sleep", seconds]:
            time.sleep(float(seconds))
        case ["spin", seconds]:
            while time.process_time() < float(seconds):
                pass
        case ["allocate", size]:
            bytearray(int(size))
        case ["exit", status]:
            os._exit(int(status))
        case ["kill"]:
            os.kill(os.getpid(), signal.SIGKILL)
        case ["abort"]:
            os.abort()
        case ["reverse", text]:
            return text[::-1].encode()
    return str(os.getpid()).encode()


if __name__ == "__main__":
    own_process.ORPHAN_SECONDS = ORPHAN_SECONDS
    idle = float(sys.argv[1]) if len(sys.argv) > 1 else None
    own_process.answer_questions(obey, MEMORY_BYTES, idle_seconds=idle)
