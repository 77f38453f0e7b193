"""Medusa: one small head for each future token, all of them on the same state.

Cai et al. 2024, arXiv 2401.10774.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from outpace.core.trees.tree import Tree
from outpace.draft.base import Rows
from outpace.heads.base import Head, HeadConfig, ResidualBlock, SharedModules, TargetShape
from outpace.heads.checkpoint import Format, HeadCheckpoint
from outpace.heads.folder import HeadFolder
from outpace.methods.heads.base import DraftSteps
from outpace.methods.heads.published import has_full_vocab
from outpace.methods.heads.steps import StepHead, StepHeadDrafter, StepHeadDraftSteps

# -- the network -----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class MedusaConfig(HeadConfig):
    """What a Medusa head is built from."""

    blocks: int = 1
    """Residual blocks of each head."""


class Medusa(StepHead):
    """Head k guesses the k-th token after the root, whatever the tokens in between are."""

    kind: ClassVar[str] = "medusa"
    Config: ClassVar[type[HeadConfig]] = MedusaConfig
    config: MedusaConfig

    def __init__(self, target: TargetShape, config: MedusaConfig) -> None:
        super().__init__(target, config)
        size = target.hidden_size
        self.blocks = nn.ModuleList(
            nn.Sequential(*(ResidualBlock(size) for _ in range(config.blocks)))
            for _ in range(config.depths)
        )
        self.outputs = nn.ModuleList(
            nn.Linear(size, self.vocabulary, bias=False) for _ in range(config.depths)
        )

    @property
    def num_parallel_depths(self) -> int:
        return self.config.depths

    def step(
        self, memory: Tensor, tokens: Tensor, depth: int, shared: SharedModules
    ) -> tuple[Tensor, Tensor]:
        return self.outputs[depth - 1](self.blocks[depth - 1](memory)), memory

    @torch.no_grad()
    def init_from_lm_head(self, shared_head: Tensor | None) -> None:
        """Each head begins as the target's own."""
        if shared_head is not None:
            for output in self.outputs.parameters():
                output.copy_(shared_head)


# -- how it drafts ---------------------------------------------------------------------------------


class MedusaDraftSteps(StepHeadDraftSteps):
    """The guesses of a depth are the same after all of its nodes, and are computed once."""

    def next_logits(self, fed: Tensor, tree: Tree, parents: Tensor) -> Tensor:
        return self._after(self._roots).expand(-1, parents.shape[-1], -1)


class MedusaDrafter(StepHeadDrafter):
    """Drafts with a `Medusa` head."""

    name: ClassVar[str] = "medusa"

    def draft_steps(self, rows: Rows) -> DraftSteps:
        return MedusaDraftSteps(self.head, self._target, self._vocab_mapping, *self.starts(rows))


# -- its published format --------------------------------------------------------------------------

# Medusa's published heads.
#
# ``config.json`` says how many heads and blocks there are (``medusa_num_heads``,
# ``medusa_num_layers``) and for which model (``base_model_name_or_path``). Of head i, the blocks
# are ``i.j.linear.weight`` and ``.bias``, and the output matrix is ``i.n.weight``, n being the
# number of blocks.


FILES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt", "model.safetensors")


class MedusaFormat(Format):
    """Sizes that the configuration does not say are those of the weights."""

    name: ClassVar[str] = "medusa"

    @classmethod
    def recognises(cls, about: Mapping[str, Any]) -> bool:
        return "medusa_num_heads" in about

    @classmethod
    def read(cls, folder: HeadFolder, about: Mapping[str, Any]) -> Head:
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
    def write(cls, head: Head) -> HeadCheckpoint:
        if not isinstance(head, Medusa):
            raise cls.refuse(f"holds no {head.kind} heads")
        if not has_full_vocab(head):
            raise cls.refuse("holds heads that know all tokens only")
        blocks = head.config.blocks
        about = {
            "medusa_num_heads": head.config.depths,
            "medusa_num_layers": blocks,
            "base_model_name_or_path": head.target.name,
        }
        weights = {
            _public(name, blocks): value
            for name, value in head.state_dict().items()
            if name != "d2t"
        }
        return HeadCheckpoint(about, weights, FILES[0])


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
