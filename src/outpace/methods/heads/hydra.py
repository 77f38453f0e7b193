"""Hydra: heads that also see the tokens drafted so far.

Ankner et al. 2024, arXiv 2402.05109. With ``prefix`` and four ``blocks`` it is the strongest
variant of that paper, Hydra++.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from outpace.heads.base import Head, HeadConfig, ResidualBlock, SharedModules, TargetShape
from outpace.heads.checkpoint import Format, HeadCheckpoint
from outpace.heads.folder import HeadFolder
from outpace.methods.heads.published import check_supported, drop_inv_freq
from outpace.methods.heads.steps import PrefixConfig, StepHead, StepHeadDrafter

# -- the network -----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class HydraConfig(PrefixConfig):
    """What a Hydra head is built from."""

    blocks: int = 1
    """Residual blocks of each head; four in the paper's strongest variant. The first one joins
    state and tokens."""
    bias: bool = False
    """Whether its joining maps and its output matrices have biases, as those of published heads."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.blocks < 1:
            raise ValueError(f"blocks is {self.blocks}")


class Hydra(StepHead):
    """Head k sees the state, and the embeddings of the root and of the k - 1 tokens after it."""

    kind: ClassVar[str] = "hydra"
    Config: ClassVar[type[HeadConfig]] = HydraConfig

    def __init__(self, target: TargetShape, config: HydraConfig) -> None:
        super().__init__(target, config)
        size = target.hidden_size
        self.blocks = nn.ModuleList(
            nn.Sequential(
                ResidualBlock(size * (depth + 1), size, config.bias),
                *(ResidualBlock(size) for _ in range(config.blocks - 1)),
            )
            for depth in range(1, config.depths + 1)
        )
        self.outputs = nn.ModuleList(
            nn.Linear(size, self.vocabulary, bias=config.bias) for _ in range(config.depths)
        )

    @property
    def num_parallel_depths(self) -> int:
        return self.config.depths

    def step(
        self, memory: Tensor, tokens: Tensor, depth: int, shared: SharedModules
    ) -> tuple[Tensor, Tensor]:
        seen = torch.cat([memory, shared.embed(tokens).to(memory.dtype)], -1)
        return self.outputs[depth - 1](self.blocks[depth - 1](seen)), seen

    @torch.no_grad()
    def init_from_lm_head(self, shared_head: Tensor | None) -> None:
        """Each head begins as the target's own on the unchanged state."""
        super().init_from_lm_head(shared_head)
        size = self.target.hidden_size
        for blocks in self.blocks:
            narrow = blocks.get_submodule("0.narrow").get_parameter("weight")  # [H, inputs]
            narrow.zero_()
            narrow[:, :size].copy_(torch.eye(size))
        if shared_head is not None:
            for output in self.outputs:
                output.get_parameter("weight").copy_(shared_head)


# -- how it drafts ---------------------------------------------------------------------------------


class HydraDrafter(StepHeadDrafter):
    """Drafts with a `Hydra` head."""

    name: ClassVar[str] = "hydra"
    dummy_sizes: ClassVar[Mapping[str, Any]] = {"depths": 3, "prefix": True}


# -- its published format --------------------------------------------------------------------------

# ``config.json`` says how many heads and blocks there are, and of which build they are
# (``hydra_head_arch``): "mlp", or "prefix-mlp" with a Llama of one layer over the text, whose
# dropout layers are numbered among the others. The layer's sizes are those of the model that it was
# trained for, a Vicuna, of which nothing but the name is said: its attention heads are 128 wide.


FILES = ("hydra_lm_head.pt", "hydra_lm_head.safetensors")
KINDS = ("mlp", "prefix-mlp")
SUPPORTED_VALUES: Mapping[str, Any] = {"grounded_heads": True, "hidden_state_offset": 0}
"""Entries by which a head that is built otherwise, and cannot be read, is recognised."""
HEAD_DIM = 128
PREFIX = "prefix_embeding_layer."  # as it is published
OURS: Sequence[tuple[str, str]] = (
    (r"hydra_mlp\.(\d+)\.(\d+)\.linear\.(weight|bias)", "blocks.{0}.{1}.linear.{2}"),
    (r"hydra_mlp\.(\d+)\.(\d+)\.res_connection\.(weight|bias)", "blocks.{0}.{1}.narrow.{2}"),
    (r"hydra_lm_head\.(\d+)\.(?:1\.)?(weight|bias)", "outputs.{0}.{1}"),
    (rf"{PREFIX}layers\.0\.(.+)", "prefix.{0}"),
    (rf"{PREFIX}(norm\.weight)", "prefix.{0}"),
)
"""What its weights are called, and our names."""
OF_MODEL = ("input_embed_fn.weight", f"{PREFIX}embed_tokens.weight")
"""Copies of the model's embeddings, which are saved along."""


class HydraFormat(Format):
    """Sizes that the configuration does not say are those of the weights."""

    name: ClassVar[str] = "hydra"

    @classmethod
    def recognises(cls, about: Mapping[str, Any]) -> bool:
        return "hydra_num_heads" in about

    @classmethod
    def read(cls, folder: HeadFolder, about: Mapping[str, Any]) -> Head:
        weights = drop_inv_freq(folder.read_weights(*FILES))
        with folder.describing("hydra"):
            kind, blocks = about.get("hydra_head_arch", KINDS[0]), about["hydra_num_layers"]
            if kind not in KINDS:
                raise ValueError(
                    f"its hydra_head_arch is {kind!r}, and only {list(KINDS)} are known"
                )
            check_supported(about, SUPPORTED_VALUES)
            step = 2 if kind == KINDS[1] else 1  # every other one is dropout
            own = {_own(name, step): each for name, each in weights.items() if name not in OF_MODEL}
            depths = sum(name.startswith("outputs.") and "weight" in name for name in own)
            vocabulary, size = own["outputs.0.weight"].shape
            target = TargetShape(
                size, vocabulary, 0, str(about.get("base_model_name_or_path") or "")
            )
            config = HydraConfig(
                depths=depths, blocks=blocks, bias=True, **(_prefix(own, size) if step > 1 else {})
            )
            head = Hydra(target, config)
        return folder.fill(head, {**own, "d2t": head.d2t})

    @classmethod
    def write(cls, head: Head) -> HeadCheckpoint:
        raise cls.refuse("is read only")


def _own(public: str, step: int) -> str:
    """Our name of a weight; its own if it is none of a head's."""
    for pattern, ours in OURS:
        if found := re.fullmatch(pattern, public):
            parts = [*found.groups()]
            if ours.startswith("blocks."):
                parts[1] = str(int(parts[1]) // step)
            return ours.format(*parts)
    return public


def _prefix(weights: Mapping[str, Tensor], size: int) -> dict[str, Any]:
    """The entries of a configuration about the layer over the text."""
    inner = weights["prefix.mlp.up_proj.weight"].shape[0]
    groups = weights["prefix.self_attn.k_proj.weight"].shape[0] // HEAD_DIM
    heads = {"heads": size // HEAD_DIM, "groups": groups, "head_dim": HEAD_DIM}
    return {"prefix": True, "prefix_norm": True, "prefix_layer": {**heads, "inner_size": inner}}
