"""The terminal: standard streams, tables, a question, and Markdown while it is still being written."""

from __future__ import annotations

import errno
import json
import os
import select
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from io import TextIOWrapper
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.markdown import Markdown
from rich.text import Text

from jaxllm.errors import ConfigError

OUTPUT = "standard output"
"""The file that an OSError of these streams names."""
BEGIN_SECONDS = 5.0
"""How long a text on standard input may take to begin where a prompt is given too."""


class Output(TextIOWrapper):
    """Standard output whose failures can be told from those of other files; after one nothing is written."""

    def __init__(self, stream: TextIOWrapper):
        lines, writes = stream.line_buffering, stream.write_through
        escapes = "backslashreplace"
        super().__init__(stream.buffer, stream.encoding, escapes, line_buffering=lines, write_through=writes)
        self._stream = stream  # which would close the buffer of both when it is forgotten

    def write(self, text: str) -> int:
        with self._telling():
            return super().write(text)

    def flush(self) -> None:
        with self._telling():
            super().flush()

    @contextmanager
    def _telling(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            _open_at(self.fileno(), os.O_WRONLY)
            raise OSError(error.errno, error.strerror, OUTPUT) from None


def prepare_streams() -> None:
    """Give the process all three streams, before anything is opened: a socket may take the place of a closed one."""
    for descriptor in [descriptor for descriptor in range(3) if not _is_open(descriptor)]:
        _open_at(descriptor, os.O_WRONLY if descriptor == 2 else os.O_RDONLY)
    for descriptor, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(descriptor, mode, encoding="utf-8", closefd=False))
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout = Output(sys.stdout)


def as_typed(text: str) -> str:
    """A text of the command line or standard input in UTF-8, also where the locale knows ASCII alone."""
    try:
        return os.fsencode(text).decode()
    except UnicodeError:
        return text


def piped_text(*, beside_prompt: bool) -> str:
    """The text on standard input; an empty one where that is a terminal, or a pipe that nothing comes from.

    A text is read to its end, however long that takes. Beside a prompt the wait for its beginning is limited: ssh and
    programs that start others leave a pipe open that nobody writes to. Windows cannot wait for a pipe.
    """
    if sys.stdin.isatty():
        return ""
    if beside_prompt and os.name != "nt" and not select.select([0], [], [], BEGIN_SECONDS)[0]:
        note = f"nothing came from standard input in {BEGIN_SECONDS:g} seconds, so the prompt is answered without it"
        print(f"jaxllm: {note}; with < /dev/null there is no wait", file=sys.stderr, flush=True)
        return ""
    return as_typed(sys.stdin.read()).strip()


def put_together(piped: str, prompt: str) -> str:
    """What was piped, and then what is asked about it."""
    return "\n\n".join(filter(None, (piped, prompt)))


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError as error:
        if error.errno != errno.EBADF:
            raise
        return False
    return True


def _open_at(descriptor: int, flags: int) -> None:
    """Put /dev/null in the place of a descriptor, for the programs that this one starts as well."""
    if (opened := os.open(os.devnull, flags)) != descriptor:
        os.dup2(opened, descriptor)
        os.close(opened)
    os.set_inheritable(descriptor, True)


def print_table(
    headings: Sequence[str], rows: Iterable[Sequence[str]], *, title: str | None = None, numbers: Sequence[int] = ()
) -> None:
    """Print rows, unfolded if this is no terminal, under headings if any; columns in `numbers` align right."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=None if title is None else Text(title), title_justify="left", show_header=any(headings))
    for at, heading in enumerate(headings):
        table.add_column(Text(heading), overflow="fold", justify="right" if at in numbers else "left")
    for row in rows:
        table.add_row(*map(Text, row))
    console = Console()
    if not console.is_terminal:
        console.width = 1_000_000  # columns: more than any table has
    console.print(table)


def print_found(
    facts: Any, as_json: bool, headings: Sequence[str], rows: Sequence[Sequence[str]], *, none: str | None = None
) -> None:
    """Print `facts` as JSON, or `rows`, which say the same, as a table; `none` is said where there are no rows."""
    if as_json:
        print(json.dumps(facts, default=str))
    elif rows or none is None:
        print_table(headings, rows)
    else:
        print(none)


def agrees(command: str, question: str) -> bool:
    """Whether the user says yes. Raises ConfigError where nobody can be asked."""
    if not sys.stdin.isatty():
        raise ConfigError(f"{command} asks before it removes, and standard input is no terminal; say --yes")
    return input(question).strip().lower() in ("y", "yes")


class MarkdownStream:
    """Renders text as it grows, on terminals: finished blocks are printed for good, the last one is redrawn."""

    def __init__(self, console: Console):
        self.console = console
        self.pending = ""
        self.thought = ""
        self.live = Live(console=console, auto_refresh=False, vertical_overflow="visible", transient=True)

    def __enter__(self) -> MarkdownStream:
        if self.console.is_terminal:
            self.live.start()
        return self

    def __exit__(self, error: object, *_: object) -> None:
        if self.console.is_terminal:
            self._end_thought()
            self.live.stop()
            self._print(self.pending)
        elif self.pending or error is None:
            self.console.file.write("\n")
            self.console.file.flush()

    def write(self, text: str) -> None:
        if not self.console.is_terminal:
            self.pending = text
            self.console.file.write(text)
            self.console.file.flush()
            return
        self._end_thought()
        self.pending += text
        end = finished_blocks(self.pending)
        if end:
            self._print(self.pending[:end])
            self.pending = self.pending[end:]
        self.live.update(Markdown(self.pending), refresh=True)

    def think(self, text: str) -> None:
        """Show reasoning as it is, dimmed; not where the console is no terminal."""
        if self.console.is_terminal and text:
            *lines, self.thought = (self.thought + text).split("\n")
            for line in lines:
                self.console.print(Text(line, style="dim"))
            self.live.update(Text(self.thought, style="dim"), refresh=True)

    def _end_thought(self) -> None:
        if self.thought:
            self.live.update("", refresh=True)
            self.console.print(Text(self.thought, style="dim"), end="\n\n")
            self.thought = ""

    def _print(self, text: str) -> None:
        if text.strip():
            self.console.print(Markdown(text))


def finished_blocks(text: str) -> int:
    """Length of the prefix that later text cannot change: up to the last blank line outside a code fence."""
    end = text.rfind("\n\n")
    while end > 0 and text.count("```", 0, end) % 2:
        end = text.rfind("\n\n", 0, end)
    return max(end + 2, 0) if end >= 0 else 0
