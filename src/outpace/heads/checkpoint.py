"""Heads in folders: written, read in whichever format they are, and fitted to a target.

A format reads and writes heads. Ours holds every kind; each published one is in the module of its
head (`outpace.methods.heads`).
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from outpace.errors import ConfigError, ModelLoadError
from outpace.heads.base import Head, TargetShape, parse_config, parse_target_shape
from outpace.heads.folder import CONFIG, WEIGHTS, HeadFolder, UncheckedFolder
from outpace.heads.gguf import GGUFHeadFile, is_head_gguf
from outpace.heads.registry import find_format, find_head, format_names, format_of, head_names
from outpace.targets.cpu.native_layers.blocks import dequantize_blocks
from outpace.targets.cpu.weights.blocks import (
    BLOCK,
    FOUR_BITS,
    BlockLinear,
    Blocks,
    to_four_bits,
)


def architectures(about: Mapping[str, Any]) -> set[str]:
    """Returns the architectures that a configuration names; none where the entry is no list."""
    listed = about.get("architectures")
    return {name for name in listed if isinstance(name, str)} if isinstance(listed, list) else set()


@dataclass(frozen=True, eq=False)
class HeadCheckpoint:
    """What a folder with a head holds."""

    about: Mapping[str, Any]
    """Its configuration."""
    weights: Mapping[str, Tensor]
    file: str = WEIGHTS
    """Where the weights are."""


class Format(ABC):
    """Reads and writes heads."""

    name: ClassVar[str]

    @classmethod
    @abstractmethod
    def recognises(cls, about: Mapping[str, Any]) -> bool:
        """Returns whether a configuration is in this format."""

    @classmethod
    def kind_of(cls, about: Mapping[str, Any]) -> str | None:
        """Returns the kind of head that a configuration in this format is of; None where it may as
        well be that of a model."""
        return cls.name

    @classmethod
    @abstractmethod
    def read(cls, folder: HeadFolder, about: Mapping[str, Any]) -> Head:
        """Returns the head in a folder; ``ModelLoadError`` with the cause and the remedy."""

    @classmethod
    @abstractmethod
    def write(cls, head: Head) -> HeadCheckpoint:
        """Returns a head in this format; ``ConfigError`` where it has no words for it."""

    @classmethod
    def refuse(cls, why: str) -> ConfigError:
        """Returns the error for a head that this format has no words for."""
        return ConfigError(f"the format {cls.name!r} {why}: keep the head in the format 'outpace'.")


KIND = "outpace_head"
"""The entry of the configuration that holds the kind of head."""

IN_BLOCKS = "weights_in_blocks"
"""The entry that names the kind of blocks which linear layers' weights are kept in, if they are."""


class OutpaceFormat(Format):
    """The head's sizes and its target's shape; weights by the names of its parameters."""

    name: ClassVar[str] = "outpace"

    @classmethod
    def recognises(cls, about: Mapping[str, Any]) -> bool:
        return about.get(KIND) in head_names()

    @classmethod
    def kind_of(cls, about: Mapping[str, Any]) -> str:
        return str(about[KIND])

    @classmethod
    def read(cls, folder: HeadFolder, about: Mapping[str, Any]) -> Head:
        given = dict(about)
        kind, blocks = find_head(given.pop(KIND)), given.pop(IN_BLOCKS, None)
        with folder.describing(kind.kind):
            target = parse_target_shape(given.pop("target"))
            head = kind(target, parse_config(kind.Config, given))
        weights = folder.read_weights(WEIGHTS)
        if blocks is not None:
            weights = keep_in_blocks(head, weights, blocks, folder)
        d2t = weights.get("d2t", head.d2t)
        if d2t.dtype != torch.long or bool(((d2t < 0) | (d2t >= target.vocab_size)).any()):
            raise folder.damaged(f"d2t does not lead to the {target.vocab_size} tokens")
        if len(set(d2t.flatten().tolist())) != d2t.numel():
            raise folder.damaged("d2t leads to the same token twice")
        return folder.fill(head, weights)

    @classmethod
    def write(cls, head: Head) -> HeadCheckpoint:
        if head.kind not in head_names():
            raise ConfigError(f"a head of the kind {head.kind!r} is kept as it was published.")
        about = {KIND: head.kind, **asdict(head.config), "target": asdict(head.target)}
        return HeadCheckpoint(about, head.state_dict())


def in_four_bits(head: Head) -> HeadCheckpoint:
    """Returns a head in our format, the weights of its linear layers in blocks of 4 bits: a third
    of the bytes that 16 bits take. ``ConfigError`` where it has no such layers."""
    content = OutpaceFormat.write(head)
    weights = dict(content.weights)
    chosen = [name for name, layer in head.named_modules() if _fits_blocks(layer)]
    if not chosen:
        raise ConfigError(
            f"a head of the kind {head.kind!r} has no linear layers that blocks of {BLOCK} weights "
            "fit: leave quantization out."
        )
    for name in chosen:
        weights[f"{name}.weight"] = to_four_bits(weights[f"{name}.weight"]).raw
    return HeadCheckpoint({**content.about, IN_BLOCKS: FOUR_BITS}, weights)


def _fits_blocks(layer: nn.Module) -> bool:
    return type(layer) is nn.Linear and layer.in_features % BLOCK == 0


def keep_in_blocks(
    head: Head, weights: Mapping[str, Tensor], kind: Any, folder: HeadFolder
) -> dict[str, Tensor]:
    """Puts the weights that a file holds in blocks into a head, and returns the others."""
    if kind != FOUR_BITS:
        raise folder.damaged(f"{IN_BLOCKS} is {kind!r}, and only {FOUR_BITS!r} is known")
    others = dict(weights)
    for name, layer in list(head.named_modules()):
        raw = others.get(f"{name}.weight")
        if not _fits_blocks(layer) or raw is None or raw.dtype != torch.uint8:
            continue
        blocks = Blocks(FOUR_BITS, others.pop(f"{name}.weight"))
        if raw.dim() != 2 or (blocks.outputs, blocks.inputs) != layer.weight.shape:
            raise folder.damaged(f"{name} does not have the size of its layer")
        # Of each block the scale and the smallest value come first.
        numbers = raw.view(-1, raw.shape[1] // (layer.in_features // BLOCK))[:, :4].contiguous()
        if not bool(numbers.view(torch.float16).isfinite().all()):
            raise folder.damaged(f"{name} holds numbers that are not finite")
        head.set_submodule(name, BlockLinear(blocks, layer.bias))
    return others


def save_head(
    head: Head,
    folder: str | os.PathLike[str],
    form: str = "outpace",
    *,
    four_bits: bool = False,
) -> None:
    """Writes a head in a format; ``ConfigError`` where that has no words for it. Each file is
    replaced at once. four_bits: whether weights are kept in blocks of 4 bits, which our own format
    alone can do."""
    if four_bits and form != OutpaceFormat.name:
        raise ConfigError(f"the format {form!r} keeps no weights in 4 bits: use --to outpace.")
    content = in_four_bits(head) if four_bits else find_format(form).write(head)
    HeadFolder(Path(folder)).write(content.about, content.weights, content.file)


def load_head(folder: str | os.PathLike[str], *, blocks: bool = False) -> Head:
    """Returns the head in a folder. Raises ``ModelLoadError`` with the cause and the remedy.

    blocks: whether weights that are kept in blocks stay in them; else they are dequantised.
    """
    place = _place(folder)
    about = place.read_config()
    head = _format(place, about).read(place, about)
    if not blocks:
        dequantize_blocks(head, head.dtype)
    return head


def load_head_unchecked(folder: str | os.PathLike[str]) -> tuple[Head, type[Format]]:
    """Returns the head in a folder with weights at whose numbers nobody has looked, so that they
    are not read from the disk (those of a GGUF file are), and its format. Raises
    ``ModelLoadError`` as `load_head` does."""
    place = _place(folder, UncheckedFolder)
    about = place.read_config()
    form = _format(place, about)
    return form.read(place, about), form


def read_head_kind(folder: str | os.PathLike[str]) -> str | None:
    """Returns the kind of the head in a folder, without reading its weights; None where that does
    not tell a head from a model. Raises ``ModelLoadError`` as `load_head` does."""
    place = _place(folder)
    about = place.read_config()
    return _format(place, about).kind_of(about)


def _place(path: str | os.PathLike[str], kind: type[HeadFolder] = HeadFolder) -> HeadFolder:
    """Where a head is: a folder, or a GGUF file."""
    return GGUFHeadFile(Path(path)) if is_head_gguf(path) else kind(Path(path))


def _format(place: HeadFolder, about: Mapping[str, Any]) -> type[Format]:
    form = format_of(about)
    if form is None:
        raise ModelLoadError(
            f"{place.path} holds no trained head: its {CONFIG} is in none of the formats "
            f"{', '.join(format_names())}."
        )
    return form


def find_head_kind(folder: object) -> str | None:
    """Returns the kind of the head in a folder, without reading its weights; None where there is
    no folder, or none that is plainly a head's."""
    if not isinstance(folder, (str, os.PathLike)):
        return None
    try:
        about = _place(folder).read_config()
    except (ModelLoadError, OSError):  # whoever loads it says why that cannot be
        return None
    form = format_of(about)
    return None if form is None else form.kind_of(about)


def check_fits_target(head: Head, target: TargetShape, what: str) -> None:
    """Raises ``ConfigError`` where a head was made for a target of another shape. Sets
    ``head.target`` where the head's file did not name it."""
    for name in ("hidden_size", "vocab_size", "layers"):
        made_for, here = getattr(head.target, name), getattr(target, name)
        if made_for not in (0, here):
            raise ConfigError(
                f"{what} was trained for another model ({head.target.name or 'unnamed'}): its "
                f"{name} is {made_for}, and this target's is {here}; train one for this target."
            )
    unsaid = head.target.layers == 0 and bool(head.target.hidden_size)
    if unsaid:  # else it serves targets of any shape
        head.target = replace(target, name=head.target.name)
    outside = [layer for layer in head.hidden_layers if not -1 <= layer <= target.layers]
    if outside:
        raise ConfigError(
            f"{what} reads layer {outside[0]}, and this target has {target.layers}: train one for "
            "this target."
        )
