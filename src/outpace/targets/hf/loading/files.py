"""The files that hold a model's weights, and what their headers say."""

from __future__ import annotations

import json
import posixpath
from collections.abc import Iterator
from pathlib import Path

from safetensors import safe_open

from outpace.core.values import shown
from outpace.errors import ModelLoadError, reason_of
from outpace.targets.hf.loading.fetched import check_fetched
from outpace.targets.hf.loading.source import INDEXES, WEIGHTS, WHOLE


def weight_files(folder: Path) -> list[Path]:
    """Returns the files that hold a model's weights; ``ModelLoadError`` where some are missing."""
    if (folder / WHOLE).is_file():  # which transformers looks for first
        return [folder / WHOLE]
    for index in INDEXES:
        if (folder / index).is_file():
            return indexed_files(folder, folder / index)
    for pattern in WEIGHTS:
        if found := sorted(folder.glob(pattern)):
            return found
    return []


def indexed_files(folder: Path, index: Path) -> list[Path]:
    """Returns the files that an index of weights names; ``ModelLoadError`` where some are missing,
    or the index cannot be read."""
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        files = sorted(folder / name for name in names)
        outside = sorted(name for name in names if _is_outside(name))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelLoadError(
            f"cannot read {index} ({reason_of(error, named=True)}): download or save the model "
            "again."
        ) from error
    if outside:
        raise ModelLoadError(
            f"{index} names a file outside of its folder ({shown(outside[0])}): download or save "
            "the model again."
        )
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise ModelLoadError(
            f"{folder} lacks {len(missing)} of {len(files)} files with weights ({missing[0]} is "
            "one): download them into it."
        )
    return files


def _is_outside(name: str) -> bool:
    """Whether a name leads out of the folder that it stands in. Files themselves may be links, as
    they are in the hub's cache."""
    plain = posixpath.normpath(name.replace("\\", "/"))
    return posixpath.isabs(plain) or ":" in plain or plain.split("/")[0] == ".."


def headers(files: list[Path]) -> tuple[list[str], tuple[str, ...]]:
    """Returns the names of the weights in files, and the types of their numbers; of pickled files
    nothing is known. Raises ``ModelLoadError`` for a file that is damaged or cut short."""
    check_fetched(files)
    found = [entry for file in files if file.suffix == ".safetensors" for entry in _header(file)]
    names = [name for name, _ in found]
    return names, tuple(sorted({dtype for _, dtype in found}))


def _header(file: Path) -> Iterator[tuple[str, str]]:
    try:
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118  # it is no dict
                yield name, str(opened.get_slice(name).get_dtype())
    except Exception as error:  # of the library, which has one of its own
        raise ModelLoadError(
            f"the weights in {str(file)!r} are damaged or cut short ({reason_of(error)}): download "
            "or save the model again."
        ) from error
