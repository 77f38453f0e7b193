"""``outpace convert``: a trained head from one format to another."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from outpace.cli.loading import starting
from outpace.errors import ConfigError


class Quantization(StrEnum):
    """How weights may be kept."""

    INT4 = "int4"


def convert(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="Folder with a trained head.")],
    to: Annotated[
        str, typer.Option(metavar="FORMAT", help="outpace, or the name of a published format.")
    ],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder to write it into.")],
    quantization: Annotated[
        Quantization | None,
        typer.Option(help="Keep weights in 4 bits: a third of the file. Format outpace only."),
    ] = None,
) -> None:
    """Write a trained head in another format. Without --quantization its weights stay the same, bit
    by bit.

    The config.json of SRC says in which format it is. Every format can be drafted with as it is
    (--draft), so a published head need not be converted for that.
    """
    with starting():
        from outpace.heads.checkpoint import load_head, save_head
        from outpace.heads.registry import find_format
    find_format(to)  # a wrong name is refused before anything is read
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{str(out)!r} exists already: name a new folder with --out.")
    head = load_head(source)
    save_head(head, out, to, four_bits=quantization is not None)
    said = f"{out}: the {head.kind} head, in the format {to}"
    Console(stderr=True).print(said, highlight=False, markup=False)
