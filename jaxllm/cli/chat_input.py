"""What is typed in a chat: lines, and texts of several lines that are pasted or stand between two \"\"\"."""

from __future__ import annotations

from jaxllm.cli.streams import as_typed
from jaxllm.config import CACHE_DIR
from jaxllm.folders import unwritable

BLOCK = '"""'


def read_message(prompt: str, continuation: str) -> tuple[str, bool]:
    """The next message, and whether it may be a command, which a text of several lines is not.

    Raises EOFError at the end of the input, and KeyboardInterrupt for Ctrl-C.
    """
    line = as_typed(input(prompt)).strip()
    if not line.startswith(BLOCK):
        return line, "\n" not in line
    lines = [line.removeprefix(BLOCK)]
    while BLOCK not in lines[-1]:
        try:
            lines.append(as_typed(input(continuation)))
        except EOFError:
            break
    lines[-1] = lines[-1].partition(BLOCK)[0]
    return "\n".join(lines).strip(), False


def prepare_terminal() -> None:
    """Arrow keys walk through earlier lines, those of earlier chats included; what is pasted stays one message.

    Where nothing can be written into the cache folder only this chat's lines are kept.
    """
    import atexit
    import readline

    readline.parse_and_bind("set enable-bracketed-paste on")
    if unwritable(CACHE_DIR) is not None:
        return
    file = CACHE_DIR / "chat_history"
    if file.exists():
        readline.read_history_file(file)
    readline.set_history_length(1000)
    atexit.register(readline.write_history_file, file)
