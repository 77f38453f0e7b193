"""What a model has said, on standard output."""

from __future__ import annotations

import sys

_CONTROLS = {code: "\ufffd" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}
"""Characters that could move the cursor or change the terminal, by which a model could deceive."""


def harmless(text: str) -> str:
    """Returns the text for a terminal, without characters that it would obey.

    >>> harmless("a\\x1b[2Jb")
    'a\ufffd[2Jb'
    """
    return text.translate(_CONTROLS)


def write(text: str) -> None:
    """Writes a text to standard output at once: for a terminal `harmless`, else as it is."""
    # typer.echo would leave escape sequences out of a file or a pipe.
    sys.stdout.write(harmless(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()
