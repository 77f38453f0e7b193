"""DSpark: a DFlash block whose tokens are joined by a small Markov head.

DeepSeek 2026, DeepSpec. After the block, which says of each place what may stand there whatever
stands at the others, each token's logits get a bias that follows from the token before it:
``W1[previous] @ W2``. So a block's distribution is conditional from token to token, and is drawn
from exactly. The parts are named as in the published checkpoints.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, NamedTuple, cast

import torch
from annotated_types import Ge, Le
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from outpace.core.proposal import Proposal
from outpace.draft.base import Rows
from outpace.draft.trees import TreeLevels, pruned
from outpace.draft.vocab_mapping import VocabMapping
from outpace.errors import ConfigError
from outpace.heads.base import MAX_SIZE, Head, HeadConfig, SharedModules, TargetShape
from outpace.methods.heads.base import DraftSteps, SequentialDraftSteps, TreeHeadOptions
from outpace.methods.heads.blocks import BlockRecipe
from outpace.methods.heads.dflash import DFlash, DFlashConfig, DFlashDrafter
from outpace.methods.heads.markov import GRU, KINDS, VANILLA, MarkovHead, PrefixGru
from outpace.targets.base import Target
from outpace.targets.hf.weights import weight_bytes
from outpace.train.recipe import DepthLosses, Recipe

# -- the network -----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class DSparkConfig(DFlashConfig):
    """What a DSpark head is built from."""

    sample_from_anchor: bool = True
    """Whether the root's place guesses, too; if not, a block has one place more."""
    markov_rank: int = 256
    """Width between the token before and its bias; 0: no bias."""
    markov_head_type: str = VANILLA
    """Whether the bias follows from the token before alone ("vanilla"), also from what its place in
    the block says ("gated"), or from all tokens since the root ("rnn"; "gru", as in Domino)."""
    gru_hidden_dim: int = 1024
    """Width of what "gru" remembers of the tokens since the root."""
    pure_draft_prefix_len: int = 0
    """Tokens after the root to which "gru" gives no bias."""
    enable_confidence_head: bool = True
    """Whether it says how likely each of its tokens is accepted."""
    confidence_head_with_markov: bool = True
    """Whether that follows from the token before, too."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.markov_head_type not in KINDS:
            raise ValueError(
                f"markov_head_type is {self.markov_head_type!r}, and only "
                f"{', '.join(map(repr, KINDS))} are known"
            )
        for name in ("markov_rank", "gru_hidden_dim"):
            if not 0 <= getattr(self, name) <= MAX_SIZE:
                raise ValueError(f"{name} is {getattr(self, name)}")
        sees_token = self.confidence_head_with_markov and self.enable_confidence_head
        if sees_token and (not self.markov_rank or self.markov_head_type == GRU):
            raise ValueError(
                "confidence_head_with_markov needs a markov_rank, and no markov_head_type 'gru'"
            )


class ConfidenceHead(nn.Module):
    """How likely a token is accepted, before it is drawn."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.proj = nn.Linear(inputs, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        """inputs: ``[..., n]`` -> ``[...]``, of which the sigmoid is the chance."""
        found: Tensor = self.proj(inputs)
        return found[..., 0]


class BlockStep(NamedTuple):
    """Where tokens of a block are joined with those before them."""

    depth: int
    """Depth of these tokens; that of the root is 0."""
    logits: Tensor
    """``[..., V']``: logits of the tokens after these that follow from the outputs alone."""
    outputs: Tensor
    """``[..., H]``: what the block says there."""
    tokens: Tensor
    """``[...]``: the target's."""
    memory: Tensor
    """``[..., R]``: what is remembered of the tokens before."""


class ConditionalBlock(ABC):
    """What joins the tokens of a block."""

    def memory(self, tokens: Tensor) -> Tensor:
        """Returns what is remembered at roots ``[...]``, ``[..., R]``: nothing, where the token
        before is all that counts."""
        return torch.empty(*tokens.shape, 0, device=tokens.device)

    @abstractmethod
    def joined(self, at: BlockStep, shared: SharedModules) -> tuple[Tensor, Tensor]:
        """Returns the logits ``[..., V']`` of the tokens after these, given them, and the memory to
        go on with."""

    def confidence(self, outputs: Tensor, tokens: Tensor) -> Tensor | None:
        """Returns how likely the tokens after these are accepted, as logits ``[...]``; None where
        it does not say that."""
        return None


class DSpark(DFlash, ConditionalBlock):
    """A DFlash block with a Markov head over its tokens, and one that knows how sure it is."""

    kind: ClassVar[str] = "dspark"
    Config: ClassVar[type[HeadConfig]] = DSparkConfig
    config: DSparkConfig

    @classmethod
    def recipe(cls) -> type[Recipe]:
        return DSparkRecipe

    def __init__(self, target: TargetShape, config: DSparkConfig) -> None:
        super().__init__(target, config)
        size, rank = target.hidden_size, config.markov_rank
        self.markov_head: MarkovHead | PrefixGru | None = None
        if rank and config.markov_head_type == GRU:
            self.markov_head = PrefixGru(
                size, self.vocabulary, rank, config.gru_hidden_dim, config.pure_draft_prefix_len
            )
        elif rank:
            kind = config.markov_head_type
            self.markov_head = MarkovHead(size, target.vocab_size, self.vocabulary, rank, kind)
        self.confidence_head: ConfidenceHead | None = None
        if config.enable_confidence_head:
            joined = rank if config.confidence_head_with_markov else 0
            self.confidence_head = ConfidenceHead(size + joined)

    def memory(self, tokens: Tensor) -> Tensor:
        wide = 0 if self.markov_head is None else self.markov_head.remembered
        return tokens.new_zeros((*tokens.shape, wide), dtype=self.dtype)

    def joined(self, at: BlockStep, shared: SharedModules) -> tuple[Tensor, Tensor]:
        head = self.markov_head
        if head is None:
            return at.logits, at.memory
        if isinstance(head, PrefixGru):
            embedded = self.embedded(at.tokens, shared)
            bias, memory = head(at.depth, at.outputs, embedded, at.memory)
        else:
            bias, memory = head(at.outputs, at.tokens, at.memory)
        return at.logits + bias, memory

    def confidence(self, outputs: Tensor, tokens: Tensor) -> Tensor | None:
        if self.confidence_head is None:
            return None
        if self.config.confidence_head_with_markov:
            before = cast(MarkovHead, self.markov_head).markov_w1(tokens).to(outputs.dtype)
            outputs = torch.cat([outputs, before], -1)
        found: Tensor = self.confidence_head(outputs)
        return found

    @torch.no_grad()
    def init_from_lm_head(self, shared_head: Tensor | None) -> None:
        """It begins as a DFlash head: no token has a bias."""
        super().init_from_lm_head(shared_head)
        if self.markov_head is not None:
            self.markov_head.projection.weight.zero_()


# -- how it is trained -----------------------------------------------------------------------------


class DSparkRecipe(BlockRecipe):
    """The loss of a `DSpark` head: that of its block, of which each token follows the text's own
    one, and how far its confidence is from the chance that the token is accepted."""

    def add(self, losses: DepthLosses, outputs: Tensor, logits: Tensor) -> None:
        head = cast(DSpark, self._head)
        memory = head.memory(losses.path())
        for depth in range(logits.shape[2]):
            tokens, here = losses.path(), outputs[:, :, depth]
            at = BlockStep(depth, logits[:, :, depth], here, tokens, memory)
            given, memory = head.joined(at, self._shared)
            said = head.confidence(here, tokens)
            if said is not None:
                chances = losses.accepted(given)
                losses.extra(binary_cross_entropy_with_logits(said, chances, reduction="none"))
            losses.add(given)


# -- how it drafts ---------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class DSparkOptions(TreeHeadOptions):
    """What a user may set."""

    confidence: Annotated[float | None, Ge(0), Le(1)] = None
    """The chance of acceptance that the head expects, below which a draft ends before a token;
    unset: drafts do not end by it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.confidence is not None and self.dynamic_trees is not None:
            raise ConfigError(
                "'confidence' ends drafts before tokens are drawn, and dynamic trees hold the most "
                "probable ones: leave one of them out."
            )


class DSparkDrafter(DFlashDrafter):
    """Drafts with a `DSpark` head.

    A node's children are drawn from the distribution that follows from the node and those before
    it. What the head expects of a token's acceptance follows from what was drawn before it, so that
    a draft may end there and each of its tokens still follows its distribution.
    """

    name: ClassVar[str] = "dspark"
    Options: ClassVar[type[Any]] = DSparkOptions
    _least: float = 0.0

    def __init__(self, head: Head, target: Target, vocabulary: int) -> None:
        super().__init__(head, target, vocabulary)
        markov = cast(DSpark, head).markov_head
        if markov is not None:  # its projection is read at each depth, and not once for all
            depths = head.config.depths
            self.pass_bytes += weight_bytes(markov.projection) * (depths - 1) // depths

    def apply_options(self, options: Any) -> None:
        super().apply_options(options)
        self._least = options.confidence or 0.0
        if self._least and cast(DSpark, self._head).confidence_head is None:
            raise ConfigError("this DSpark head has no confidence head: leave 'confidence' out.")

    def draft_steps(self, rows: Rows) -> ConditionalDraftSteps:
        roots, outputs, logits = self._blocks(rows)
        head, asked = cast(DSpark, self._head), bool(self._least)
        return ConditionalDraftSteps(
            head, self._target, self._vocab_mapping, roots, outputs, logits, asked
        )

    def ended(self, drawn: Proposal, tree_levels: TreeLevels, steps: DraftSteps) -> Proposal:
        if not self._least:
            return drawn
        sure = cast(ConditionalDraftSteps, steps).sure
        levels = [
            (chances >= self._least)[:, level.parent]
            for chances, level in zip(sure, tree_levels.levels, strict=True)
        ]
        return pruned(drawn, tree_levels.ordered(levels))


class ConditionalDraftSteps(SequentialDraftSteps):
    """The steps through a block whose tokens follow from those before them."""

    def __init__(
        self,
        head: ConditionalBlock,
        shared: SharedModules,
        vocabulary: VocabMapping,
        roots: Tensor,
        outputs: Tensor,
        logits: Tensor,
        asked: bool = False,
    ) -> None:
        """roots: ``[B, 1]``; outputs: ``[B, K, H]``; logits: ``[B, K, V']``, those that follow from
        the outputs alone. asked: whether somebody wants to know how sure it is."""
        super().__init__(vocabulary, roots, head.memory(roots))
        self._head, self._shared, self._asked = head, shared, asked
        self._outputs, self._logits = outputs, logits
        self.sure: list[Tensor] = []
        """By level, how likely the children of its W nodes are accepted, ``[B, W]``, if that is
        asked."""

    def step(self, tokens: Tensor, memory: Tensor, depth: int) -> tuple[Tensor, Tensor]:
        outputs, logits = (
            of_block[:, depth, None].expand(-1, tokens.shape[1], -1)
            for of_block in (self._outputs, self._logits)
        )
        sure = self._head.confidence(outputs, tokens) if self._asked else None
        if sure is not None:
            self.sure.append(sure.sigmoid())
        return self._head.joined(BlockStep(depth, logits, outputs, tokens, memory), self._shared)
