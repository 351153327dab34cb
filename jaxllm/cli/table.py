"""Tables for the terminal, in which every value is shown whole and as it is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

WIDE = 1_000_000
"""Columns: more than any table has."""


def print_table(
    headings: Sequence[str], rows: Iterable[Sequence[str]], *, title: str | None = None, numbers: Sequence[int] = ()
) -> None:
    """Print rows under their headings, or without a line for headings where all of them are empty.

    Long values go on in the next line of their cell; where the output is no terminal they stay on one line, so that
    other programs find them. `numbers` are the columns to align at the right.
    """
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
        console.width = WIDE
    console.print(table)
