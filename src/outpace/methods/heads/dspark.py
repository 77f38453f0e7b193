"""DSpark: a DFlash block whose tokens are joined by a small Markov head.

DeepSeek 2026, DeepSpec. After the block, which says of each place what may stand there whatever
stands at the others, each token's logits get a bias that follows from the token before it:
``W1[previous] @ W2``. So a block's distribution is conditional from token to token, and is drawn
from exactly. The parts are named as in the published checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Protocol, cast

import torch
from annotated_types import Ge, Le
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from outpace.core.proposal import Proposal
from outpace.core.trees.tree import Tree
from outpace.draft.base import Rows
from outpace.draft.trees import TreePlan, pruned
from outpace.draft.vocabulary import Vocabulary
from outpace.errors import ConfigError
from outpace.heads.base import LARGEST, Head, HeadConfig, TargetShape
from outpace.heads.checkpoint import Content, Format, architectures
from outpace.heads.folder import Folder
from outpace.methods.heads.base import TreeHeadOptions, Walk, of_parents
from outpace.methods.heads.blocks import BlockRecipe
from outpace.methods.heads.dflash import (
    ABOUT,
    ANCHOR,
    DFlash,
    DFlashConfig,
    DFlashDrafter,
    about_dflash,
    dflash_head,
    dflash_weights,
)
from outpace.methods.heads.dflash import ARCHITECTURE as PLAIN
from outpace.methods.heads.published import renamed
from outpace.targets.base import Target
from outpace.targets.hf.weights import weight_bytes
from outpace.train.recipe import DepthLosses

# -- the network -----------------------------------------------------------------------------------


VANILLA, GATED, RNN = "vanilla", "gated", "rnn"


@dataclass(frozen=True, kw_only=True)
class DSparkConfig(DFlashConfig):
    """What a DSpark head is built from."""

    sample_from_anchor: bool = True
    """As of DFlash."""
    markov_rank: int = 256
    """Width between the token before and its bias; 0: no bias."""
    markov_head_type: str = VANILLA
    """Whether the bias follows from the token before alone ("vanilla"), also from what its place in
    the block says ("gated"), or from all tokens since the root ("rnn")."""
    enable_confidence_head: bool = True
    """Whether it says how likely each of its tokens is accepted."""
    confidence_head_with_markov: bool = True
    """Whether that follows from the token before, too."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.markov_head_type not in (VANILLA, GATED, RNN):
            raise ValueError(
                f"markov_head_type is {self.markov_head_type!r}, and only {VANILLA!r}, {GATED!r} "
                f"and {RNN!r} are known"
            )
        if not 0 <= self.markov_rank <= LARGEST:
            raise ValueError(f"markov_rank is {self.markov_rank}")
        if (
            self.confidence_head_with_markov
            and self.enable_confidence_head
            and not self.markov_rank
        ):
            raise ValueError("confidence_head_with_markov needs a markov_rank")


class MarkovHead(nn.Module):
    """What the tokens before say of the next one."""

    def __init__(self, size: int, tokens: int, vocabulary: int, config: DSparkConfig) -> None:
        """tokens: the target's; vocabulary: those that are guessed."""
        super().__init__()
        rank = config.markov_rank
        self.kind = config.markov_head_type
        self.markov_w1 = nn.Embedding(tokens, rank)
        self.markov_w2 = nn.Linear(rank, vocabulary, bias=False)
        if self.kind == GATED:
            self.gate_proj = nn.Linear(size + rank, rank)
        elif self.kind == RNN:
            self.joint_proj = nn.Linear(2 * rank + size, 3 * rank)

    def forward(self, outputs: Tensor, tokens: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the bias ``[..., V']`` of the tokens after these, and the memory ``[..., R]`` to
        go on with.

        outputs: ``[..., H]``, what the block says there; tokens: ``[...]`` of the target; memory:
        zeros after the root, which only the kind "rnn" changes.
        """
        before = self.markov_w1(tokens).to(outputs.dtype)
        if self.kind == GATED:
            before = before * self.gate_proj(torch.cat([outputs, before], -1)).sigmoid()
        elif self.kind == RNN:
            joined = self.joint_proj(torch.cat([memory, before, outputs], -1))
            gate, new, said = joined.chunk(3, -1)
            gate, before = gate.sigmoid(), said.tanh()
            memory = gate * memory + (1 - gate) * new.tanh()
        return self.markov_w2(before), memory


class ConfidenceHead(nn.Module):
    """How likely a token is accepted, before it is drawn."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.proj = nn.Linear(inputs, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        """inputs: ``[..., n]`` -> ``[...]``, of which the sigmoid is the chance."""
        found: Tensor = self.proj(inputs)
        return found[..., 0]


class DSpark(DFlash):
    """A DFlash block with a Markov head over its tokens, and one that knows how sure it is."""

    kind: ClassVar[str] = "dspark"
    Config: ClassVar[type[HeadConfig]] = DSparkConfig
    recipe: ClassVar[str] = "dspark"
    config: DSparkConfig

    def __init__(self, target: TargetShape, config: DSparkConfig) -> None:
        super().__init__(target, config)
        size, rank = target.hidden_size, config.markov_rank
        self.markov_head: MarkovHead | None = None
        if rank:
            self.markov_head = MarkovHead(size, target.vocab_size, self.vocabulary, config)
        self.confidence_head: ConfidenceHead | None = None
        if config.enable_confidence_head:
            joined = rank if config.confidence_head_with_markov else 0
            self.confidence_head = ConfidenceHead(size + joined)

    def memory(self, tokens: Tensor) -> Tensor:
        """Returns what is remembered at roots ``[...]``, ``[..., R]``."""
        return tokens.new_zeros((*tokens.shape, self.config.markov_rank), dtype=self.dtype)

    def joined(
        self, logits: Tensor, outputs: Tensor, tokens: Tensor, memory: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Returns the logits ``[..., V']`` of the tokens after these, given them, and the memory to
        go on with.

        logits: ``[..., V']``, those that follow from the outputs ``[..., H]`` alone; tokens:
        ``[...]``, the target's.
        """
        if self.markov_head is None:
            return logits, memory
        bias, memory = self.markov_head(outputs, tokens, memory)
        return logits + bias, memory

    def confidence(self, outputs: Tensor, tokens: Tensor) -> Tensor | None:
        """Returns how likely the tokens after these are accepted, as logits ``[...]``; None from a
        head that does not say it."""
        if self.confidence_head is None:
            return None
        if self.config.confidence_head_with_markov:
            before = cast(MarkovHead, self.markov_head).markov_w1(tokens).to(outputs.dtype)
            outputs = torch.cat([outputs, before], -1)
        found: Tensor = self.confidence_head(outputs)
        return found

    @torch.no_grad()
    def begin_from(self, shared_head: Tensor | None) -> None:
        """It begins as a DFlash head: no token has a bias."""
        super().begin_from(shared_head)
        if self.markov_head is not None:
            self.markov_head.markov_w2.weight.zero_()


# -- how it is trained -----------------------------------------------------------------------------


class DSparkRecipe(BlockRecipe):
    """The loss of a `DSpark` head: that of its block, of which each token follows the text's own
    one, and how far its confidence is from the chance that the token is accepted."""

    def add(self, losses: DepthLosses, outputs: Tensor, logits: Tensor) -> None:
        head = cast(DSpark, self._head)
        memory = head.memory(losses.path())
        for depth in range(logits.shape[2]):
            tokens, here = losses.path(), outputs[:, :, depth]
            given, memory = head.joined(logits[:, :, depth], here, tokens, memory)
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
        if self.confidence is not None and self.growth is not None:
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
            self.pass_bytes += weight_bytes(markov.markov_w2) * (depths - 1) // depths

    def take(self, options: Any) -> None:
        super().take(options)
        self._least = options.confidence or 0.0
        if self._least and cast(DSpark, self._head).confidence_head is None:
            raise ConfigError("this DSpark head has no confidence head: leave 'confidence' out.")

    def walk(self, rows: Rows) -> JoinedWalk:
        roots, outputs, logits = self._blocks(rows)
        head, asked = cast(DSpark, self._head), bool(self._least)
        return JoinedWalk(head, self._vocabulary, roots, outputs, logits, asked)

    def ended(self, drawn: Proposal, plan: TreePlan, walk: Walk) -> Proposal:
        if not self._least:
            return drawn
        sure = cast(JoinedWalk, walk).sure
        levels = [
            (chances >= self._least)[:, level.parent]
            for chances, level in zip(sure, plan.levels, strict=True)
        ]
        return pruned(drawn, plan.ordered(levels))


class Joins(Protocol):
    """What joins the tokens of a block, as `DSpark` does."""

    def memory(self, tokens: Tensor) -> Tensor:
        """As `DSpark.memory`."""

    def joined(
        self, logits: Tensor, outputs: Tensor, tokens: Tensor, memory: Tensor
    ) -> tuple[Tensor, Tensor]:
        """As `DSpark.joined`."""

    def confidence(self, outputs: Tensor, tokens: Tensor) -> Tensor | None:
        """As `DSpark.confidence`."""


class JoinedWalk:
    """The steps through a block whose tokens follow from those before them."""

    def __init__(
        self,
        head: Joins,
        vocabulary: Vocabulary,
        roots: Tensor,
        outputs: Tensor,
        logits: Tensor,
        asked: bool = False,
    ) -> None:
        """roots: ``[B, 1]``; outputs: ``[B, K, H]``; logits: ``[B, K, V']``, those that follow from
        the outputs alone. asked: whether somebody wants to know how sure it is."""
        self._asked = asked
        self._head, self._vocabulary = head, vocabulary
        self._roots, self._outputs, self._logits = roots, outputs, logits
        self._memory, self._depth = head.memory(roots), 0
        self.sure: list[Tensor] = []
        """By level, how likely the children of its W nodes are accepted, ``[B, W]``, if that is
        asked."""

    def first(self) -> Tensor:
        """Returns the logits ``[B, V]`` after the roots."""
        return self._after(self._roots)[:, 0]

    def deeper(self, fed: Tensor, tree: Tree, parents: Tensor) -> Tensor:
        """Returns those after the last tokens that were fed, ``[B, W, V]``.

        parents: ``[W]`` or ``[B, W]``.
        """
        self._depth += 1
        self._memory = of_parents(self._memory, parents)
        return self._after(fed[:, -parents.shape[-1] :])

    @torch.inference_mode()
    def _after(self, tokens: Tensor) -> Tensor:
        wide = tokens.shape[1]
        outputs, logits = (
            of_block[:, self._depth, None].expand(-1, wide, -1)
            for of_block in (self._outputs, self._logits)
        )
        sure = self._head.confidence(outputs, tokens) if self._asked else None
        if sure is not None:
            self.sure.append(sure.sigmoid())
        found, self._memory = self._head.joined(logits, outputs, tokens, self._memory)
        return self._vocabulary.logits(found)


# -- its published formats -------------------------------------------------------------------------

# A DFlash configuration with a few entries more, at the top (DeepSpec) or in ``dflash_config``
# (SpecForge). Heads of DeepSpec bring copies of the target's embeddings and output matrix.


ARCHITECTURES = ("Qwen3DSparkModel", "DSparkDraftModel")
ENTRIES = (
    "markov_rank",
    "markov_head_type",
    "enable_confidence_head",
    "confidence_head_with_markov",
)
PROJECTOR = "projector_type"
NESTED = {"logit_head.": ""}
"""Beginnings of the weights' names in older files."""


class DSparkFormat(Format):
    """The target is known by its width, its vocabulary and its number of layers."""

    name: ClassVar[str] = "dspark"

    @classmethod
    def recognises(cls, about: Mapping[str, Any]) -> bool:
        entries = _entries(about)
        named = any("dspark" in name.lower() for name in architectures(about))
        block = ABOUT in about or PLAIN in architectures(about)
        return named or (block and (entries.get(PROJECTOR) == "dspark" or _is_joined(entries)))

    @classmethod
    def kind_of(cls, about: Mapping[str, Any]) -> str:
        return "dspark" if _is_joined(_entries(about)) else "dflash"

    @classmethod
    def read(cls, folder: Folder, about: Mapping[str, Any]) -> Head:
        weights = folder.read_weights("model.safetensors")
        with folder.describing("dspark"):
            found = architectures(about)
            if found and not found.intersection([*ARCHITECTURES, PLAIN]):
                raise ValueError(
                    f"its architecture is {sorted(found)}, and only {list(ARCHITECTURES)} are known"
                )
            head, weights = dspark_head(about, renamed(weights, NESTED))
        return folder.fill(head, weights)

    @classmethod
    def write(cls, head: Head) -> Content:
        if not isinstance(head, DSpark):
            raise cls.refuse(f"holds no {head.kind} heads")
        about = about_dspark(head, cls)
        about["architectures"] = [ARCHITECTURES[1]]
        about[ABOUT] |= {PROJECTOR: "dspark", **{name: about.pop(name) for name in ENTRIES}}
        return Content(about, dflash_weights(head))


def _entries(about: Mapping[str, Any]) -> dict[str, Any]:
    inside = about.get(ABOUT)
    return {**about, **inside} if isinstance(inside, dict) else dict(about)


def _is_joined(entries: Mapping[str, Any]) -> bool:
    """Whether there is more to a head than to one of DFlash."""
    return any(entries.get(name) for name in ("markov_rank", "enable_confidence_head"))


def dspark_head(
    about: Mapping[str, Any], weights: Mapping[str, Tensor]
) -> tuple[DFlash, dict[str, Tensor]]:
    """Returns a head, still without its weights, from its public configuration, and these by our
    names: one of DFlash where nothing joins its tokens. Raises as `dflash_head` does.

    Where nothing says whether the root's place guesses, too, it does, unless a head is called one
    of DFlash and has a Markov head only.
    """
    entries = _entries(about)
    if entries.get(PROJECTOR) not in (None, "dspark"):
        raise ValueError(f"its {PROJECTOR} is {entries[PROJECTOR]!r}, and only 'dspark' is known")
    if all(entries.get(name) is None for name in ANCHOR):
        own = any(entries.get(name) for name in ("enable_confidence_head", PROJECTOR))
        entries[ANCHOR[0]] = own or PLAIN not in architectures(about)
    flat = {name: value for name, value in entries.items() if name not in (PROJECTOR, ABOUT)}
    if not _is_joined(entries):
        return dflash_head(flat, weights)
    off = {"markov_rank": 0, "enable_confidence_head": False, "confidence_head_with_markov": False}
    said = {name: entries[name] for name in ENTRIES if entries.get(name) is not None}
    return dflash_head(flat, weights, DSpark, {**off, **said})


def about_dspark(head: DSpark, form: type[Format]) -> dict[str, Any]:
    """Returns the public configuration of a head, all entries at the top but for those of DFlash.
    form: as of `about_dflash`."""
    config = head.config
    return {
        **about_dflash(head, form),
        ANCHOR[0]: config.sample_from_anchor,
        **{name: getattr(config, name) for name in ENTRIES},
    }
