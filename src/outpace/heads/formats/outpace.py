"""Our own format, which holds every kind of head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, ClassVar

import torch

from outpace.heads.base import Head, config_of, shape_of
from outpace.heads.folder import Folder
from outpace.heads.formats.base import Content, Format
from outpace.heads.registry import find_head, head_names

KIND = "outpace_head"
"""The entry of the configuration that holds the kind of head."""


class Outpace(Format):
    """The head's sizes and its target's shape; weights by the names of its parameters."""

    name: ClassVar[str] = "outpace"

    @classmethod
    def recognises(cls, about: Mapping[str, Any]) -> bool:
        return about.get(KIND) in head_names()

    @classmethod
    def kind_of(cls, about: Mapping[str, Any]) -> str:
        return str(about[KIND])

    @classmethod
    def read(cls, folder: Folder, about: Mapping[str, Any]) -> Head:
        given = dict(about)
        kind = find_head(given.pop(KIND))
        with folder.describing(kind.kind):
            target = shape_of(given.pop("target"))
            head = kind(target, config_of(kind.Config, given))
        weights = folder.read_weights("model.safetensors")
        d2t = weights.get("d2t", head.d2t)
        if d2t.dtype != torch.long or bool(((d2t < 0) | (d2t >= target.vocab_size)).any()):
            raise folder.damaged(f"d2t does not lead to the {target.vocab_size} tokens")
        if len(set(d2t.flatten().tolist())) != d2t.numel():
            raise folder.damaged("d2t leads to the same token twice")
        return folder.fill(head, weights)

    @classmethod
    def write(cls, head: Head) -> Content:
        about = {KIND: head.kind, **head.config.as_dict(), "target": asdict(head.target)}
        return Content(about, head.state_dict())
