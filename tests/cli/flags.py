"""The flags of the command line, read from the commands themselves."""

from __future__ import annotations

import typer

from outpace.cli.generate import generate


def flags_of_generate() -> set[str]:
    """Returns every flag of ``outpace generate``."""
    app = typer.Typer()
    app.command()(generate)
    return {flag for option in typer.main.get_command(app).params for flag in option.opts}
