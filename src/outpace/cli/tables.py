"""Tables on the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.table import Table


def table(title: str, header: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Returns a table of names, in the first column, and figures."""
    made = Table(title=title, title_justify="left")
    for name in header:
        made.add_column(name, justify="left" if name == header[0] else "right")
    for row in rows:
        made.add_row(*row)
    return made
