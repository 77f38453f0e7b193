"""Medusa's published heads.

``config.json`` says how many heads and blocks there are (``medusa_num_heads``,
``medusa_num_layers``) and for which model (``base_model_name_or_path``). Of head i, the blocks are
``i.j.linear.weight`` and ``.bias``, and the output matrix is ``i.n.weight``, n being the number of
blocks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar

from outpace.heads.base import Head, TargetShape
from outpace.heads.folder import Folder
from outpace.heads.formats.base import Content, Format
from outpace.heads.formats.llama import knows_all
from outpace.heads.steps.medusa import Medusa, MedusaConfig

FILES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt", "model.safetensors")


class MedusaFormat(Format):
    """Sizes that the configuration does not say are those of the weights."""

    name: ClassVar[str] = "medusa"

    @classmethod
    def recognises(cls, about: Mapping[str, Any]) -> bool:
        return "medusa_num_heads" in about

    @classmethod
    def read(cls, folder: Folder, about: Mapping[str, Any]) -> Head:
        given, blocks = about["medusa_num_heads"], about.get("medusa_num_layers", 1)
        if not isinstance(given, int) or not isinstance(blocks, int) or blocks < 0:
            raise folder.unfit("medusa", "its numbers of heads and blocks are no whole numbers")
        weights = folder.read_weights(*FILES)
        own = {_own(name, blocks): value for name, value in weights.items()}
        own = {name: value for name, value in own.items() if name}
        depths = sum(name.startswith("outputs.") for name in own)
        # Early published files say that there are fewer heads than there are.
        if not depths or depths < given or len(own) != len(weights):
            raise folder.damaged(f"{depths} whole heads of {blocks} block(s), not {given}")
        name = str(about.get("base_model_name_or_path") or "")
        with folder.describing("medusa"):
            vocabulary, size = next(v for n, v in own.items() if n.startswith("outputs.")).shape
            target = TargetShape(size, vocabulary, 0, name)
            head = Medusa(target, MedusaConfig(depths=depths, blocks=blocks))
        return folder.fill(head, {**own, "d2t": head.d2t})

    @classmethod
    def write(cls, head: Head) -> Content:
        if not isinstance(head, Medusa):
            raise cls.refuse(f"holds no {head.kind} heads")
        if not knows_all(head):
            raise cls.refuse("holds heads that know all tokens only")
        about = {
            "medusa_num_heads": head.config.depths,
            "medusa_num_layers": head.config.as_dict()["blocks"],
            "base_model_name_or_path": head.target.name,
        }
        blocks = about["medusa_num_layers"]
        weights = {
            _public(name, blocks): value
            for name, value in head.state_dict().items()
            if name != "d2t"
        }
        return Content(about, weights, FILES[0])


def _own(public: str, blocks: int) -> str:
    """Our name of a weight; "" for one that there should not be."""
    if found := re.fullmatch(r"(\d+)\.(\d+)\.linear\.(weight|bias)", public):
        at, block, which = found.groups()
        return f"blocks.{at}.{block}.linear.{which}" if int(block) < blocks else ""
    found = re.fullmatch(r"(\d+)\.(\d+)\.weight", public)
    return f"outputs.{found[1]}.weight" if found and int(found[2]) == blocks else ""


def _public(own: str, blocks: int) -> str:
    kind, at, rest = own.split(".", 2)
    return f"{at}.{rest}" if kind == "blocks" else f"{at}.{blocks}.{rest}"
