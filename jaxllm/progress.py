"""What takes long, and how far it is: for whoever watches, and as a bar on a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from importlib.util import find_spec

Progress = Callable[[int, int], None]
"""Called with (parts done, parts in all)."""
Watcher = Callable[[str, int, int], None]
"""Called with what is being done, parts done, and parts in all; both numbers are 0 where nothing is counted."""

_watcher: ContextVar[Watcher | None] = ContextVar("watcher", default=None)


@contextmanager
def watched_by(watcher: Watcher) -> Iterator[None]:
    """`watcher` hears what this thread tells, for as long as the context lasts; so does who watched it before."""
    outer = _watcher.get()

    def tell_both(doing: str, done: int, total: int) -> None:
        watcher(doing, done, total)
        if outer is not None:
            outer(doing, done, total)

    before = _watcher.set(tell_both)
    try:
        yield
    finally:
        _watcher.reset(before)


def tell(doing: str, done: int = 0, total: int = 0) -> None:
    watcher = _watcher.get()
    if watcher is not None:
        watcher(doing, done, total)


@cache
def has_widgets() -> bool:
    return find_spec("ipywidgets") is not None


@contextmanager
def progress_bar(task: str) -> Iterator[Progress]:
    """Yields what to call as parts of `task` are done; a bar shows it on terminals and in notebooks."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    tell(task)
    console = Console(stderr=True)
    if not (console.is_terminal or (console.is_jupyter and has_widgets())):
        yield lambda done, total: tell(task, done, total)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Bar(*columns, console=console, transient=True) as bar:
        shown = bar.add_task(task)

        def advance(done: int, total: int) -> None:
            bar.update(shown, completed=done, total=total)
            tell(task, done, total)

        yield advance
