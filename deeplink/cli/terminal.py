"""What commands print with: nothing that a peer or a file says steers the terminal."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

NONE = "-"


def table(title: str, *columns: str) -> Table:
    made = Table(title=cell(title))
    for column in columns:
        made.add_column(cell(column) if column else "", overflow="fold")
    return made


def cell(text: str) -> Text:
    return Text(printable(text or NONE))


def printable(text: str) -> str:
    """What a peer or a file says must not steer the terminal, and the name of a file need not be Unicode."""
    return "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text)


def console(stderr: bool = False) -> Console:
    """As wide as the terminal; wide enough for the tables where there is none."""
    made = Console(stderr=stderr, highlight=False)
    return made if made.is_terminal else Console(stderr=stderr, highlight=False, width=110)
