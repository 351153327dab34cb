"""A bar while something takes long, where somebody is watching."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

Progress = Callable[[int, int], None]


@contextmanager
def progress_bar(task: str) -> Iterator[Progress | None]:
    """Yields what to call with (parts done, parts in all); None where stderr is no terminal or notebook."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    console = Console(stderr=True)
    if not (console.is_terminal or console.is_jupyter):
        yield None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Bar(*columns, console=console, transient=True) as bar:
        shown = bar.add_task(task)
        yield lambda done, total: bar.update(shown, completed=done, total=total)
