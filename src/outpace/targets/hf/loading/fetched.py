"""A check that large files were fetched: a clone without Git LFS has a pointer in the place of
each, and aria2 begins with a file of the whole size."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from outpace.errors import ModelLoadError

POINTER = b"version https://git-lfs.github.com/spec/v1"
"""How a pointer begins."""


def check_fetched(files: Iterable[Path]) -> None:
    """Raises ``ModelLoadError`` for a pointer, and for a file whose download has not ended. What
    cannot be read is left to whoever reads it."""
    for file in files:
        unfinished = file.with_name(f"{file.name}.aria2")
        if unfinished.exists():
            raise ModelLoadError(
                f"aria2 has not ended the download of {str(file)!r}, of which {unfinished.name} "
                "tells what is missing: wait for it, or start it again."
            )
        with suppress(OSError), file.open("rb") as opened:
            if opened.read(len(POINTER)) == POINTER:
                raise ModelLoadError(
                    f"{str(file)!r} is a pointer of Git LFS, which has not fetched the file "
                    "itself: run 'git lfs pull' in its folder, or download the file."
                )
