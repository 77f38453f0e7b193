"""LiLiCorr: what the candidates of a block say of one another (arXiv 2608.20530).

The likeliest tokens of each place of a DFlash block form a lattice. A few layers see all of it, and
what comes out at a candidate is made into two directions: of what it lets follow and of what it
follows. The cosine of the two is the logit of a candidate, given the one before it. The parts are
named as in the published checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, normalize, scaled_dot_product_attention

from outpace.core.logits.truncation import NEG_INF
from outpace.heads.base import MAX_SIZE, SharedModules
from outpace.methods.heads.dspark import BlockStep, ConditionalBlock

SIZES = ("candidate_topk", "hidden_size", "num_layers", "num_heads", "factor_dim")
NUMBERS = ("mlp_ratio", "vector_eps", "logit_scale")
FEATURES = 5
"""What is said of a candidate: its log-probability, that less the best one's, its probability, its
rank, and whether it is the first."""


def check_sizes(given: Mapping[str, Any]) -> None:
    """Raises ``ValueError`` where sizes of the correlator are missing or make no sense."""
    for name in SIZES:
        size = given.get(name)
        if type(size) is not int or not (name != "hidden_size") <= size <= MAX_SIZE:
            raise ValueError(f"lilicorr_{name} is {size!r}")
    for name in NUMBERS:
        number = given.get(name)
        if not isinstance(number, (int, float)) or not 0 < number < MAX_SIZE:
            raise ValueError(f"lilicorr_{name} is {number!r}")


class LatticeAttention(nn.Module):
    """Attention of all candidates to all, with a bias for how far their places are apart."""

    def __init__(self, size: int, heads: int) -> None:
        super().__init__()
        if size % heads:
            raise ValueError(f"{heads} heads do not divide a width of {size}")
        self.heads = heads
        self.in_proj_weight = nn.Parameter(torch.randn(3 * size, size) * size**-0.5)
        self.in_proj_bias = nn.Parameter(torch.zeros(3 * size))
        self.out_proj = nn.Linear(size, size)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        """x: ``[B, N, H]``; bias: ``[heads, N, N]``."""
        parts = linear(x, self.in_proj_weight, self.in_proj_bias).chunk(3, -1)
        shape = (*x.shape[:2], self.heads, -1)
        queries, keys, values = (part.view(shape).transpose(1, 2) for part in parts)
        mask = bias[None].to(x.dtype)
        found = scaled_dot_product_attention(queries, keys, values, attn_mask=mask)
        said: Tensor = self.out_proj(found.transpose(1, 2).flatten(2))
        return said


class LatticeLayer(nn.Module):
    """Attention and feed-forward part, each of the normalised input."""

    def __init__(self, size: int, heads: int, inner: int, eps: float) -> None:
        super().__init__()
        self.attn_norm = nn.RMSNorm(size, eps=eps)
        self.attn = LatticeAttention(size, heads)
        self.mlp_norm = nn.RMSNorm(size, eps=eps)
        self.mlp = nn.Sequential(nn.Linear(size, inner), nn.SiLU(), nn.Linear(inner, size))

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        """Takes what `LatticeAttention` takes."""
        x = x + self.attn(self.attn_norm(x), bias)
        found: Tensor = x + self.mlp(self.mlp_norm(x))
        return found


class LiLiCorr(nn.Module):
    """Scores the candidates of each place, given the one before it."""

    def __init__(self, width: int, places: int, eps: float, sizes: Mapping[str, Any]) -> None:
        """width: the block's; places: those with candidates. sizes: as in the configuration."""
        super().__init__()
        size = sizes["hidden_size"] or width
        self.chosen, heads = sizes["candidate_topk"], sizes["num_heads"]
        self.scale, self.eps = float(sizes["logit_scale"]), float(sizes["vector_eps"])
        self.token_proj = nn.Identity() if size == width else nn.Linear(width, size)
        self.pass_hidden_proj = nn.Linear(width, size)
        self.feature_mlp = nn.Sequential(
            nn.LayerNorm(FEATURES), nn.Linear(FEATURES, size), nn.SiLU(), nn.Linear(size, size)
        )
        self.slot_embedding = nn.Parameter(torch.zeros(1, 1, places, 1, size))
        self.rank_embedding = nn.Parameter(torch.zeros(1, 1, 1, self.chosen, size))
        self.relative_slot_bias = nn.Parameter(torch.zeros(heads, 2 * places + 1))
        self.same_slot_bias = nn.Parameter(torch.zeros(heads))
        self.context_proj = nn.Linear(width, size)
        inner = int(size * sizes["mlp_ratio"])
        self.layers = nn.ModuleList(
            LatticeLayer(size, heads, inner, eps) for _ in range(sizes["num_layers"])
        )
        self.output_norm, self.anchor_norm = (nn.RMSNorm(size, eps=eps) for _ in range(2))
        self.factor_input_proj = nn.Linear(3 * size, size)
        self.out_head, self.in_head, self.anchor_out_head = (
            nn.Linear(size, sizes["factor_dim"]) for _ in range(3)
        )

    def forward(
        self, logits: Tensor, outputs: Tensor, anchor: Tensor, bias: Tensor, shared: SharedModules
    ) -> Lattice:
        """Returns the candidates of blocks with their scores.

        logits, outputs: of K places, ``[B, K, V]`` and ``[B, K, H]``; anchor: what the block's
        layers read of the token before the root, ``[B, H]``; bias: `attention_bias`.
        """
        best = logits.log_softmax(-1).topk(self.chosen, -1)  # [B, K, C]
        x = self.token_proj(shared.embed(best.indices).to(outputs.dtype))  # [B, K, C, H']
        x = (
            x
            + self.pass_hidden_proj(outputs)[:, :, None]
            + self.feature_mlp(_features(best.values))
        )
        x = x + self.slot_embedding[:, 0] + self.rank_embedding[:, 0]
        shape = x.shape
        x = x.flatten(1, 2)
        for layer in self.layers:
            x = layer(x, bias)
        x = self.output_norm(x).view(shape)
        before = self.anchor_norm(self.context_proj(anchor))  # [B, H']
        around = before[:, None, None].expand(shape)
        joined = self.factor_input_proj(torch.cat([x, around, x * around], -1))
        factors = nn.functional.silu(joined)
        leaves, enters = (
            self._directed(self.out_head(factors)),
            self._directed(self.in_head(factors)),
        )
        first = self._directed(self.anchor_out_head(before))
        starts = (enters[:, 0] @ first[..., None])[..., 0]  # [B, C]
        pairs = leaves[:, :-1] @ enters[:, 1:].transpose(-1, -2)  # [B, K - 1, C, C]
        return Lattice(best.indices, self.scale * starts, self.scale * pairs, logits.shape[-1])

    @torch.no_grad()
    def attention_bias(self) -> Tensor:
        """Returns what attention adds for the places of two candidates, ``[heads, K C, K C]``."""
        places = torch.arange(self.slot_embedding.shape[2], device=self.same_slot_bias.device)
        at = places.repeat_interleave(self.chosen)
        apart = at[:, None] - at
        middle = self.relative_slot_bias.shape[1] // 2
        same = (apart == 0) * self.same_slot_bias[:, None, None]
        return self.relative_slot_bias[:, apart + middle] + same

    def _directed(self, x: Tensor) -> Tensor:
        return normalize(x, dim=-1, eps=self.eps)


def _features(scores: Tensor) -> Tensor:
    """What is said of candidates with these log-probabilities ``[B, K, C]``, ``[B, K, C, 5]``."""
    ranks = torch.arange(scores.shape[-1], device=scores.device).to(scores.dtype)
    rank = ranks / max(1, len(ranks) - 1)
    features = (scores, scores.exp(), scores - scores[..., :1], rank, (ranks == 0).to(scores.dtype))
    return torch.stack([each.expand_as(scores) for each in features], -1)


@dataclass(frozen=True, eq=False)
class Lattice(ConditionalBlock):
    """The candidates of blocks: what joins their tokens."""

    candidates: Tensor  # [B, K, C]
    starts: Tensor  # [B, C], logits of the first place
    pairs: Tensor  # [B, K - 1, C, C], of a place's candidates, given one of the place before
    vocabulary: int

    def joined(self, at: BlockStep, shared: SharedModules) -> tuple[Tensor, Tensor]:
        """As `ConditionalBlock.joined`: -inf for all tokens that are no candidates."""
        tokens, depth = at.tokens, at.depth
        here = self.candidates[:, depth, None].expand(*tokens.shape, -1)  # [B, W, C]
        if depth:
            chosen = (self.candidates[:, depth - 1, None] == tokens[..., None]).int().argmax(-1)
            rows = torch.arange(len(tokens), device=tokens.device)[:, None]
            scores = self.pairs[rows, depth - 1, chosen]  # [B, W, C]
        else:
            scores = self.starts[:, None].expand_as(here)
        none = scores.new_full((*tokens.shape, self.vocabulary), NEG_INF)
        return none.scatter(-1, here, scores), at.memory
