"""Heads in folders: written, read in whichever format they are, and fitted to a target."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from outpace.errors import ConfigError, ModelLoadError
from outpace.heads.base import Head, TargetShape
from outpace.heads.folder import CONFIG, Folder
from outpace.heads.formats.base import Format
from outpace.heads.formats.registry import find_format, format_names, format_of

WEIGHTS = "model.safetensors"


def save_head(head: Head, folder: str | os.PathLike[str], form: str = "outpace") -> None:
    """Writes a head in a format; ``ConfigError`` where that has no words for it. Each file is
    replaced at once."""
    content = find_format(form).write(head)
    Folder(Path(folder)).write(content.about, content.weights, content.file)


def load_head(folder: str | os.PathLike[str]) -> Head:
    """Returns the head in a folder. Raises ``ModelLoadError`` with the cause and the remedy."""
    place = Folder(Path(folder))
    about = place.read_config()
    return _format(place, about).read(place, about)


def read_kind(folder: str | os.PathLike[str]) -> str | None:
    """Returns the kind of the head in a folder, without reading its weights; None where that does
    not tell a head from a model. Raises ``ModelLoadError`` as `load_head` does."""
    place = Folder(Path(folder))
    about = place.read_config()
    return _format(place, about).kind_of(about)


def _format(place: Folder, about: Mapping[str, Any]) -> type[Format]:
    form = format_of(about)
    if form is None:
        raise ModelLoadError(
            f"{place.path} holds no trained head: its {CONFIG} is in none of the formats "
            f"{', '.join(format_names())}."
        )
    return form


def kind_in(folder: object) -> str | None:
    """Returns the kind of the head in a folder, without reading its weights; None where there is
    no folder, or none that is plainly a head's."""
    if not isinstance(folder, (str, os.PathLike)):
        return None
    try:
        about = Folder(Path(folder)).read_config()
    except (ModelLoadError, OSError):  # whoever loads it says why that cannot be
        return None
    form = format_of(about)
    return None if form is None else form.kind_of(about)


def fit(head: Head, target: TargetShape, what: str) -> None:
    """Raises ``ConfigError`` where a head was made for a target of another shape; tells it of the
    target where its file did not."""
    for name in ("hidden_size", "vocab_size", "layers"):
        made_for, here = getattr(head.target, name), getattr(target, name)
        if made_for not in (0, here):
            raise ConfigError(
                f"{what} was trained for another model ({head.target.name or 'unnamed'}): its "
                f"{name} is {made_for}, and this target's is {here}; train one for this target."
            )
    if head.target.layers == 0 and head.target.hidden_size:  # else it serves targets of any shape
        head.target = replace(target, name=head.target.name)
    outside = [layer for layer in head.layers if not -1 <= layer <= target.layers]
    if outside:
        raise ConfigError(
            f"{what} reads layer {outside[0]}, and this target has {target.layers}: train one for "
            "this target."
        )
