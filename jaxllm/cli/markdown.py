"""Markdown on a terminal while it is still being written."""

from __future__ import annotations

from rich.console import Console
from rich.live import Live
from rich.markdown import Markdown
from rich.text import Text


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
