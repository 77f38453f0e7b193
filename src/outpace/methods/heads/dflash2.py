"""DFlash 2: a DFlash block with short convolutions over its places, and a selector of candidates.

z-lab 2026. Around attention and feed-forward part of each layer, a causal convolution over the
places of the block, whose kernel follows from what it reads. At the end the likeliest tokens of
each place are scored anew, given the token before: a block's distribution is conditional, as
DSpark's, and over a few candidates only. LiLiCorr scores them by a network over all candidates of
the block (`lilicorr`). The parts are named as in the published checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from outpace.core.logits.truncation import NEG_INF
from outpace.core.request import Request
from outpace.draft.base import Rows
from outpace.heads.base import MAX_SIZE, Head, HeadConfig, SharedModules, TargetShape
from outpace.heads.checkpoint import Format, HeadCheckpoint, architectures
from outpace.heads.decoder import DecoderLayer
from outpace.heads.folder import HeadFolder
from outpace.heads.layers import AttentionContext, KeyValues, LayerConfig
from outpace.methods.heads.base import NOISE
from outpace.methods.heads.dflash import DFlash, DFlashConfig, DFlashDrafter
from outpace.methods.heads.dflash_format import (
    ABOUT,
    block_weights,
    dflash_config_dict,
    dflash_head,
    dflash_weights,
    flatten_config,
)
from outpace.methods.heads.dspark import BlockStep, ConditionalBlock, ConditionalDraftSteps
from outpace.methods.heads.lilicorr import NUMBERS, SIZES, Lattice, LiLiCorr, check_sizes
from outpace.methods.heads.published import rename_prefixes
from outpace.methods.heads.steps import LatestStates
from outpace.targets.base import Target
from outpace.targets.hf.loading.loaded import LoadedModel

# -- the network -----------------------------------------------------------------------------------


ENTRIES = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")


@dataclass(frozen=True, kw_only=True)
class DFlash2Config(DFlashConfig):
    """What a DFlash 2 head is built from."""

    conv_kernel_size: int = 2
    """Places that a convolution sees, its own the last; 0: there are no convolutions."""
    conv_group_size: int = 16
    """Numbers of a state that share the part of a kernel that follows from it."""
    selector_rank: int = 256
    """Width in which tokens are held against those before them."""
    selector_top_k: int = 16
    """Candidates of each place."""
    lilicorr: dict[str, Any] = field(default_factory=dict)
    """The sizes of LiLiCorr's network, as published without ``lilicorr_``; empty: the selector of
    DFlash 2."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ENTRIES:
            least = 0 if name == "conv_kernel_size" else 1
            if not least <= getattr(self, name) <= MAX_SIZE:
                raise ValueError(f"{name} is {getattr(self, name)}")
        if self.lilicorr:
            check_sizes(self.lilicorr)
            if self.sample_from_anchor:
                raise ValueError("LiLiCorr's first place is the one after the root's")


class GroupedConv(nn.Module):
    """Two causal convolutions over the places of blocks, before and after a part of a layer. Both
    kernels follow from what the part would have read."""

    def __init__(self, size: int, block: int, config: DFlash2Config) -> None:
        super().__init__()
        if size % config.conv_group_size:
            raise ValueError(f"groups of {config.conv_group_size} do not divide a width of {size}")
        self.block, self.kernel = block, config.conv_kernel_size
        self.groups = size // config.conv_group_size
        self.base_kernel = nn.Parameter(torch.zeros(2, self.kernel, size))
        self.kernel_projection = nn.Linear(size, 2 * self.kernel * self.groups, bias=False)
        nn.init.zeros_(self.kernel_projection.weight)
        nn.init.ones_(self.base_kernel.data[:, 0])

    def before(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Returns what the part reads, ``[B, A W, H]``, and the other kernel."""
        moving = self.kernel_projection(x).unflatten(-1, (2, self.kernel, self.groups))
        return self._convolved(x, moving[..., 0, :, :], 0), moving[..., 1, :, :]

    def after(self, x: Tensor, moving: Tensor) -> Tensor:
        """Returns what the part adds, ``[B, A W, H]``."""
        return self._convolved(x, moving, 1)

    def _convolved(self, x: Tensor, moving: Tensor, which: int) -> Tensor:
        blocks = x.view(-1, self.block, self.groups, x.shape[-1] // self.groups)  # [B A, W, G, S]
        moving = moving.reshape(-1, self.block, self.kernel, self.groups)
        found = torch.zeros_like(blocks)
        for back in range(self.kernel):
            earlier = pad(blocks[:, : self.block - back], (0, 0, 0, 0, back, 0))
            fixed = self.base_kernel[which, back].view(self.groups, -1)
            found = found + (fixed + moving[:, :, back, :, None]) * earlier
        return found.view(x.shape)


class ConvolvedLayer(DecoderLayer):
    """Qwen3's layer with convolutions around both of its parts."""

    def __init__(self, size: int, block: int, config: DFlash2Config) -> None:
        bias = config.bias
        super().__init__(size, config, bias=bias, output_bias=bias, normed=True)
        self.attention_conv = GroupedConv(size, block, config)
        self.mlp_conv = GroupedConv(size, block, config)

    def forward(self, x: Tensor, attn_context: AttentionContext) -> tuple[Tensor, KeyValues]:
        read, moving = self.attention_conv.before(cast(nn.Module, self.input_layernorm)(x))
        attended, entries = self.self_attn(read, attn_context)
        x = x + self.attention_conv.after(attended, moving)
        read, moving = self.mlp_conv.before(self.post_attention_layernorm(x))
        return x + self.mlp_conv.after(self.mlp(read), moving), entries


class Selector(nn.Module):
    """Scores the candidates of a place, given the token before them."""

    def __init__(self, size: int, tokens: int, vocabulary: int, config: DFlash2Config) -> None:
        super().__init__()
        rank, self.chosen = config.selector_rank, min(config.selector_top_k, vocabulary)
        self.hidden_projection = nn.Linear(size, rank, bias=False)
        self.predecessor_codebook = nn.Parameter(torch.randn(tokens, rank) * rank**-0.5)
        self.successor_codebook = nn.Parameter(torch.randn(vocabulary, rank) * rank**-0.5)

    def forward(self, logits: Tensor, outputs: Tensor, tokens: Tensor) -> Tensor:
        """Returns the logits ``[..., V']`` of the candidates after tokens ``[...]``; -inf for all
        others."""
        best = logits.topk(self.chosen, -1)
        before = self.predecessor_codebook[tokens] * self.hidden_projection(outputs)  # [..., R]
        fits = (self.successor_codebook[best.indices] @ before[..., None])[..., 0]
        return torch.full_like(logits, NEG_INF).scatter(-1, best.indices, best.values + fits)


class DFlash2(DFlash, ConditionalBlock):
    """A DFlash block, the candidates of which are scored from token to token."""

    kind: ClassVar[str] = "dflash2"
    Config: ClassVar[type[HeadConfig]] = DFlash2Config
    learns_online: ClassVar[bool] = False
    config: DFlash2Config

    def __init__(self, target: TargetShape, config: DFlash2Config) -> None:
        super().__init__(target, config)
        size = target.hidden_size
        self.candidate_selector: Selector | None = None
        self.lilicorr: LiLiCorr | None = None
        if not config.lilicorr:
            self.candidate_selector = Selector(size, target.vocab_size, self.vocabulary, config)
        elif self.vocabulary != target.vocab_size:
            raise ValueError("LiLiCorr's candidates are of all tokens, and it knows some only")
        elif config.lilicorr["candidate_topk"] > self.vocabulary:
            raise ValueError("lilicorr_candidate_topk is more than there are tokens")
        else:
            self.lilicorr = LiLiCorr(size, config.depths, config.norm_eps, config.lilicorr)

    def new_layer(self, size: int, config: LayerConfig) -> DecoderLayer:
        own = cast(DFlash2Config, config)
        if not own.conv_kernel_size:
            return super().new_layer(size, config)
        return ConvolvedLayer(size, self.block_size, own)

    def joined(self, at: BlockStep, shared: SharedModules) -> tuple[Tensor, Tensor]:
        selector = cast(Selector, self.candidate_selector)
        return selector(at.logits, at.outputs, at.tokens), at.memory


# -- how it drafts ---------------------------------------------------------------------------------


class DFlash2Drafter(DFlashDrafter):
    """Drafts with a `DFlash2` head, whose tokens follow from one another as `DSpark`'s do."""

    name: ClassVar[str] = "dflash2"
    head: DFlash2

    def __init__(self, head: Head, target: Target, vocabulary: int) -> None:
        super().__init__(head, target, vocabulary)
        self._seen = LatestStates()
        self._bias = None if self.head.lilicorr is None else self.head.lilicorr.attention_bias()

    def begin(self, requests: Sequence[Request]) -> None:
        super().begin(requests)
        for request in requests:
            self._seen.begin(request)

    def read(
        self, requests: Sequence[Request], tokens: Sequence[Sequence[int]], states: Tensor
    ) -> None:
        super().read(requests, tokens, states)
        if self.head.lilicorr is None:
            return
        for place, request in enumerate(requests):  # what it reads of the token before the root
            self._seen.read(request, states[place, : len(tokens[place])])

    def end(self, requests: Sequence[Request], interrupted: bool = False) -> None:
        super().end(requests, interrupted)
        self._seen.forget(requests)

    @classmethod
    @torch.no_grad()
    def dummy_options(cls, loaded: LoadedModel) -> Mapping[str, Any]:
        torch.manual_seed(0)
        target = TargetShape.of(loaded.config, "a dummy")
        group = target.hidden_size
        config = DFlash2Config(depths=3, layers=1, selector_rank=8, conv_group_size=group)
        head = DFlash2(target, config).to(loaded.dtype).eval().requires_grad_(False)
        for parameter in head.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=NOISE)
        return {"model": head}

    def draft_steps(self, rows: Rows) -> ConditionalDraftSteps:
        roots, outputs, logits = self._blocks(rows)
        head: ConditionalBlock = self.head
        if self.head.lilicorr is not None:
            head = self._lattice(rows, outputs, logits, self.head.lilicorr)
        return ConditionalDraftSteps(
            head, self._target, self._vocab_mapping, roots, outputs, logits
        )

    @torch.inference_mode()
    def _lattice(self, rows: Rows, outputs: Tensor, logits: Tensor, head: LiLiCorr) -> Lattice:
        """The candidates of the blocks; those of rows of which nothing is known are not drafted."""
        latest = [self._seen[request].latest for request in rows.requests]
        known = [each for each in latest if each is not None]
        if not known:
            anchors = torch.zeros_like(outputs[:, 0])
        else:
            blank = torch.zeros_like(known[0])
            states = torch.stack([blank if each is None else each for each in latest])
            anchors = self.head.context(states)  # [B, H]
        found: Lattice = head(logits, outputs, anchors, self._bias, self._target)
        return found


# -- its published format --------------------------------------------------------------------------


ARCHITECTURE = "DFlash2DraftModel"
CODEBOOKS = {
    f"candidate_selector.{name}.weight": f"candidate_selector.{name}"
    for name in ("predecessor_codebook", "successor_codebook")
}
"""What the codebooks are called where they are saved as embeddings."""
LILICORR = "lilicorr_"
"""How the entries of LiLiCorr begin."""


class DFlash2Format(Format):
    """A DFlash configuration with some entries more, in ``dflash_config`` or at the top: four of
    DFlash 2's, or those of LiLiCorr."""

    name: ClassVar[str] = "dflash2"

    @classmethod
    def recognises(cls, about: Mapping[str, Any]) -> bool:
        entries = flatten_config(about)
        lattice = any(name.startswith(LILICORR) for name in entries)
        return ARCHITECTURE in architectures(about) or lattice

    @classmethod
    def read(cls, folder: HeadFolder, about: Mapping[str, Any]) -> Head:
        weights = block_weights(folder)
        with folder.describing("dflash2"):
            head, weights = dflash2_head(about, weights)
        return folder.fill(head, weights)

    @classmethod
    def write(cls, head: Head) -> HeadCheckpoint:
        if not isinstance(head, DFlash2):
            raise cls.refuse(f"holds no {head.kind} heads")
        about = {**dflash_config_dict(head, cls), "architectures": [ARCHITECTURE]}
        config = head.config
        own = {LILICORR + name: each for name, each in config.lilicorr.items()}
        names = [name for name in ENTRIES if not own or name.startswith("conv")]
        about[ABOUT] |= {**{name: getattr(config, name) for name in names}, **own}
        return HeadCheckpoint(about, dflash_weights(head))


def dflash2_head(
    about: Mapping[str, Any], weights: Mapping[str, Tensor]
) -> tuple[DFlash, dict[str, Tensor]]:
    """As `dflash_head`."""
    entries = flatten_config(about)
    sizes = {name: entries.get(LILICORR + name) for name in (*SIZES, *NUMBERS)}
    if any(size is not None for size in sizes.values()):
        kernel = entries.get("conv_kernel_size") or 0
        own = {"conv_group_size": entries["conv_group_size"]} if kernel else {}
        more = {"conv_kernel_size": kernel, **own, "lilicorr": sizes}
    else:
        more = {name: entries[name] for name in ENTRIES}
    # LiLiCorr's parts may stand below "model", as the others do.
    found = rename_prefixes(rename_prefixes(weights, {"model.": ""}), CODEBOOKS)
    return dflash_head(about, found, DFlash2, more)
