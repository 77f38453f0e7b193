"""Base classes of drafters with trained heads."""

from __future__ import annotations

import copy
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor, nn

from outpace.core.options import Reads
from outpace.core.proposal import Capabilities, DraftSampling, Needs, Proposal
from outpace.core.request import Request, RowNumbers
from outpace.core.trees.tree import Tree
from outpace.draft.base import Drafter, Rows, Setup
from outpace.draft.branching import DYNAMIC, TreeOptions, shape_of
from outpace.draft.dynamic import MAX_DYNAMIC_NODES, DynamicTrees
from outpace.draft.prefix_cache import PrefixCache
from outpace.draft.trees import TreeLevels, TreeLevelsCache, draw_tree
from outpace.draft.vocab_mapping import VocabMapping
from outpace.errors import ConfigError
from outpace.heads.base import Head, TargetShape
from outpace.heads.checkpoint import check_fits_target, load_head
from outpace.heads.native import NativeLayers
from outpace.heads.registry import find_head
from outpace.methods.heads.head_kv_cache import HeadKVCache
from outpace.methods.online.options import WeightsOptions
from outpace.targets.base import Target
from outpace.targets.cpu.kernels import LEFT_OPEN, NATIVE
from outpace.targets.cpu.native_layers.blocks import dequantize_blocks, use_block_kernels
from outpace.targets.cpu.native_layers.linear import prepack_weights
from outpace.targets.cpu.weights.blocks import block_bytes
from outpace.targets.cpu.weights.layers import linear_layers
from outpace.targets.cpu.weights.quantize import Quantization, check, pays, quantize
from outpace.targets.hf.loading.loaded import LoadedModel
from outpace.targets.hf.logits import output_rows
from outpace.targets.hf.weights import pass_bytes, weight_bytes

NOISE = 0.02
"""What is added to a dummy head's weights."""


def trained_head(name: str, value: Any) -> Any:
    """Returns what may be given as a trained head: a folder, or one that is loaded."""
    if not isinstance(value, (str, os.PathLike, Head)):
        raise ConfigError(
            "a trained head needs 'model': the folder that 'outpace train' wrote for this "
            "target, or a published head for it."
        )
    return value


@dataclass(frozen=True, kw_only=True)
class HeadOptions(WeightsOptions):
    """What a user may set."""

    model: Annotated[Any, Reads(trained_head)]
    """The trained head: a folder of 'outpace train', or a published one."""
    check: bool = True
    """Whether it is tried on a few tokens when it is loaded, and refused if next to none of its
    guesses is right."""


@dataclass(frozen=True, kw_only=True)
class TreeHeadOptions(TreeOptions, HeadOptions):
    """The options of a head that drafts trees of any kind."""


class DraftSteps(Protocol):
    """The steps of a head through one draft."""

    def first(self) -> Tensor:
        """Returns the logits ``[B, V]`` after the roots."""

    def next_logits(self, fed: Tensor, tree: Tree, parents: Tensor) -> Tensor:
        """As `draft.trees.NextLogits`; rows have trees of their own where it has
        `TreeHeadOptions`."""


class TrainedDrafter(Drafter):
    """A drafter with a trained head, which costs little compared with a pass of the target.

    Where the target takes the beginning of a text over from an earlier one, so does a head with
    what it keeps of texts (`_cache`): a part that only one of the two has is read again. For a text
    with a seed of its own all is read, since what is drafted must follow from that text alone.
    """

    trees: bool = True
    default_rule: ClassVar[str] = "recursive"
    Options: ClassVar[type[Any]] = HeadOptions
    capabilities: Capabilities = Capabilities(copies_prompts=True, needs_no_prefill=True)
    dummy_sizes: ClassVar[Mapping[str, Any]] = {"depths": 3}
    """The sizes of the head of its `dummy_options`."""
    _cache: HeadKVCache | None = None
    """What it keeps of the texts in the batch; None where nothing but their latest states."""
    _prefixes: PrefixCache | None = None
    """What it keeps of ended texts."""

    def __init__(self, head: Head, target: Target, vocabulary: int) -> None:
        """vocabulary: tokens that the target can generate."""
        self._head = head.to(target.device)
        self._target = target
        self._vocab_mapping = _known(head.d2t, vocabulary)
        self._tree_levels = TreeLevelsCache(target.device)
        self._rows = RowNumbers()
        self.needs = Needs(hidden_layers=head.hidden_layers)
        self.weight_bytes = weight_bytes(head)
        output = target.lm_head_bytes if head.shares_lm_head else 0
        self.pass_bytes = (pass_bytes(head) + output) // head.num_parallel_depths

    @classmethod
    def build(cls, setup: Setup) -> Drafter:
        given, online = setup.options.model, setup.options.online
        head = cls.head_for(setup)
        if online is not None and not head.learns_online:
            raise ConfigError(
                f"method={cls.name!r} does not learn from single corrections: leave 'online' out, "
                "and train it with 'outpace train'."
            )
        if online is not None and isinstance(given, Head):
            head = copy.deepcopy(head)  # what was handed over stays as it is
        if online is None:
            head = rounded(head, setup, handed_over=isinstance(given, Head))
        else:
            dequantize_blocks(head, head.dtype)
        drafter = cls(head, setup.target, setup.loaded.vocabulary)
        drafter.apply_options(setup.options)
        if drafter._cache is not None:
            if setup.cpu_kernels in NATIVE and setup.target.device.type == "cpu":
                drafter._cache.native = NativeLayers.of(head.decoder_layers)
            drafter._prefixes = PrefixCache(
                drafter._cache, setup.max_length, setup.saved_texts, setup.saved_tokens
            )
        if setup.options.check and given is not None and not isinstance(given, Head):
            # What was handed over is its owner's affair.
            verified = replace(drafter.capabilities, verify_on_load=named(given))
            drafter.capabilities = verified
        if online is None:
            return drafter
        from outpace.methods.online.online import Online
        from outpace.methods.online.student import OnlineHead

        width = len(head.hidden_layers) * head.target.hidden_size
        return Online(drafter, OnlineHead(head, setup), online, width)

    @classmethod
    def head_for(cls, setup: Setup) -> Head:
        """Returns the head that the options name, once it fits the target."""
        given = setup.options.model
        head = given if isinstance(given, Head) else load_head(given, blocks=True)
        what = named(given)
        if head.kind != cls.name:
            raise ConfigError(f"{what} is of the kind {head.kind!r}: use that as the method.")
        check_fits_target(head, TargetShape.of(setup.loaded.config), what)
        return head if isinstance(given, Head) else head.to(setup.target.dtype)

    @classmethod
    def dummy_options(cls, loaded: LoadedModel) -> Mapping[str, Any]:
        kind = find_head(cls.name)
        torch.manual_seed(0)
        head = kind(TargetShape.of(loaded.config, "a dummy"), kind.Config(**cls.dummy_sizes))
        head = head.to(loaded.dtype).eval().requires_grad_(False)
        head.init_from_lm_head(output_rows(loaded.model, head.d2t))
        for parameter in head.parameters():  # so that all parts of it matter
            parameter.add_(torch.randn_like(parameter), alpha=NOISE)
        return {"model": head}

    def apply_options(self, options: Any) -> None:
        """Takes over what the options say of how it drafts."""

    def networks(self) -> Iterator[nn.Module]:
        yield self._head

    @property
    def nbytes(self) -> int:
        kept = [one for one in (self._cache, self._prefixes) if one is not None]
        return self.weight_bytes + sum(one.nbytes for one in kept)

    # -- texts ---------------------------------------------------------------------------------

    def cached_prefix(self, request: Request) -> int:
        if not self.needs.hidden_layers:
            return request.length
        if request.reproducible or request.media is not None:
            return 0
        # The target reads one token before the root: the first draft goes on from its states.
        most = max(0, request.length - 2)
        if self._cache is None:
            return most
        return 0 if self._prefixes is None else min(most, self._prefixes.known(request.token_ids))

    def begin_row(self, request: Request, known: int) -> None:
        """Adds a row of the cache: with the first ``known`` entries of the request that a new one
        is forked from, or else with those that are taken over."""
        assert self._cache is not None
        parent = request.forked_from
        if parent is None:
            self._cache.admit()
        else:
            self._cache.admit(self._rows[parent], known)
        row = self._rows.begin(request)
        if request.cached_prefix and self._prefixes is not None:
            self._prefixes.restore(row, request.token_ids, request.cached_prefix)

    def end(self, requests: Sequence[Request], interrupted: bool = False) -> None:
        if self._cache is None:
            return
        if self._prefixes is not None:
            if interrupted:
                self._prefixes.clear()
            elif self._target.has_prefix_cache:
                self._keep([one for one in requests if _may_be_kept(one)], self._prefixes)
        left = self._rows.end(None if interrupted else requests)
        if interrupted:
            self._cache.reset()
        else:
            self._cache.retain(left)

    def _keep(self, leaving: Sequence[Request], prefixes: PrefixCache) -> None:
        leaving = leaving[max(0, len(leaving) - prefixes.limit) :]
        self.compute_entries(leaving)
        for request in leaving:
            prefixes.keep(self._rows[request], request.token_ids, continued=True)

    def compute_entries(self, requests: Sequence[Request]) -> None:
        """Puts what still waits of some texts into the cache."""

    def forget_texts(self) -> None:
        if self._prefixes is not None:
            self._prefixes.clear()

    @abstractmethod
    def can_draft(self, rows: Rows, row: int) -> bool:
        """Returns whether there is something to draft a row from."""


class HeadDrafter(TrainedDrafter):
    """Drafts with a head that goes from depth to depth.

    How many nodes are drafted is the controller's choice, and so is the tree, unless the options
    of the head name one.
    """

    sampling_kinds: frozenset[DraftSampling] = frozenset({DraftSampling.WITHOUT_REPLACEMENT})
    capabilities: Capabilities = replace(TrainedDrafter.capabilities, any_shape=True)
    _dynamic_trees: DynamicTrees | None = None
    """How trees grow that hold the most probable nodes, if they do."""

    def apply_options(self, options: Any) -> None:
        if not isinstance(options, TreeHeadOptions):
            return
        self._dynamic_trees = options.dynamic_trees
        if self._dynamic_trees is not None:
            self.sampling_kinds = frozenset({DraftSampling.DETERMINISTIC})
            self.max_draft_tokens = MAX_DYNAMIC_NODES
            self.capabilities = replace(self.capabilities, any_shape=False)
        elif (shape := shape_of(options.branching)) is not None:
            self.shape = shape if self.max_depth is None else shape.up_to(self.max_depth)
            self.capabilities = replace(self.capabilities, any_shape=False)

    @classmethod
    def default_rule_for(cls, options: Any) -> str:
        dynamic = getattr(options, "branching", None) == DYNAMIC
        return "match" if dynamic else cls.default_rule

    @abstractmethod
    def draft_steps(self, rows: Rows) -> DraftSteps:
        """Begins the drafts of a round, for rows of which some is known."""

    def propose(self, rows: Rows, budgets: Sequence[int]) -> Proposal:
        budgets = [budget if self.can_draft(rows, row) else 0 for row, budget in enumerate(budgets)]
        if not any(budgets):
            return Proposal.empty(len(rows), rows.seeds.device)
        if self._dynamic_trees is not None:
            return self._propose_dynamic(rows, budgets, self._dynamic_trees)
        return self._propose_shape(rows, budgets)

    def _propose_shape(self, rows: Rows, budgets: Sequence[int]) -> Proposal:
        """Drafts the first nodes of a shape."""
        shape = self.shape or rows.shape_of(max(budgets))
        if self.max_depth is not None:
            shape = shape.up_to(self.max_depth)
        counts = [min(budget, shape.size) for budget in budgets]
        tree_levels = self._tree_levels.of(shape.first(max(counts)))
        steps = self.draft_steps(rows)
        drawn = draw_tree(
            tree_levels,
            rows,
            steps.first(),
            steps.next_logits,
            counts,
            random_stream=self.random_stream,
            with_replacement=False,
        )
        return self.ended(drawn, tree_levels, steps)

    def ended(self, drawn: Proposal, tree_levels: TreeLevels, steps: DraftSteps) -> Proposal:
        """Returns what stays of a draft where the head ends it by itself."""
        return drawn

    def _propose_dynamic(self, rows: Rows, budgets: Sequence[int], trees: DynamicTrees) -> Proposal:
        """Drafts the nodes that the head finds most probable."""
        trees = replace(trees, depth=min(trees.depth, self.max_depth or trees.depth))
        steps = self.draft_steps(rows)
        return trees(rows, steps.first(), steps.next_logits, budgets)


def _may_be_kept(request: Request) -> bool:
    """Whether a text may lend its beginning. Of one with images the tokens do not say all."""
    return request.keep_cached and request.media is None and request.finish_reason != "error"


def named(given: Any) -> str:
    """Returns what a head that was named is called in errors."""
    return "the head" if isinstance(given, Head) else f"the head in {str(given)!r}"


def _known(d2t: Tensor, vocabulary: int) -> VocabMapping:
    """The map of a head's own tokens, without those that are padding in the target."""
    if bool((d2t >= vocabulary).any()):
        if not torch.equal(d2t, torch.arange(len(d2t), device=d2t.device)):
            raise ConfigError("the head guesses tokens that the target's tokenizer does not have.")
        d2t = d2t[:vocabulary]
    return VocabMapping(d2t, vocabulary)


def gather_parents(columns: Tensor, parents: Tensor) -> Tensor:
    """Returns those ``[B, W, ...]`` of the columns ``[B, C, ...]`` that are parents.

    parents: ``[W]``, the same in all rows, or ``[B, W]``.
    """
    if parents.dim() == 1:
        return columns[:, parents]
    return columns[torch.arange(len(columns), device=columns.device)[:, None], parents]


class SequentialDraftSteps(ABC):
    """The `DraftSteps` of a head whose guesses follow from the tokens before them."""

    def __init__(self, vocabulary: VocabMapping, roots: Tensor, memory: Tensor) -> None:
        """roots: ``[B, 1]``; memory: ``[B, 1, M]``, what is known at the roots besides."""
        self._vocab_mapping, self._roots, self._memory = vocabulary, roots, memory
        self._depth = 0
        """Depth of the tokens that the next guesses follow; that of the roots is 0."""

    def first(self) -> Tensor:
        """Returns the logits ``[B, V]`` after the roots."""
        return self._after(self._roots)[:, 0]

    def next_logits(self, fed: Tensor, tree: Tree, parents: Tensor) -> Tensor:
        """Returns those after the last tokens that were fed, ``[B, W, V]``; parents: ``[W]`` or
        ``[B, W]``, which columns of the step before they belong to."""
        self._memory = gather_parents(self._memory, parents)
        return self._after(fed[:, -parents.shape[-1] :])

    @torch.inference_mode()
    def _after(self, tokens: Tensor) -> Tensor:
        logits, self._memory = self.step(tokens, self._memory, self._depth)
        self._depth += 1
        return self._vocab_mapping.to_target_logits(logits)

    @abstractmethod
    def step(self, tokens: Tensor, memory: Tensor, depth: int) -> tuple[Tensor, Tensor]:
        """Returns the logits ``[B, W, V']`` of the head's own tokens after tokens ``[B, W]``, and
        the memory ``[B, W, M]`` to go on with."""


class ParallelDraftSteps:
    """The `DraftSteps` of a head whose guesses are made at once, those of each depth whatever the
    tokens in between are."""

    def __init__(self, logits: Tensor) -> None:
        """logits: ``[B, K, V]``, of K depths."""
        self._logits, self._depth = logits, 0

    def first(self) -> Tensor:
        """Returns the logits ``[B, V]`` after the roots."""
        return self._logits[:, 0]

    def next_logits(self, fed: Tensor, tree: Tree, parents: Tensor) -> Tensor:
        """Returns those of the next depth ``[B, W, V]``, the same for all of its nodes.

        parents: ``[W]`` or ``[B, W]``.
        """
        self._depth += 1
        return self._logits[:, self._depth, None].expand(-1, parents.shape[-1], -1)


# -- weights rounded to integers -------------------------------------------------------------------

# A head's weights rounded to integers, so that a draft reads less of them.
#
# What is drafted is verified against the distribution that the rounded head says: the text stays
# the target's.


def rounded(head: Head, setup: Setup, *, handed_over: bool) -> Head:
    """Returns a head as the option ``quantization`` wants it.

    A head that is kept in blocks of 4 bits drafts from these where our own products can.

    handed_over: the head is its owner's. It is rounded only where the option names how, and then a
    copy is. Raises ``ConfigError`` for a kind of rounding that there is not here, and
    ``UnsupportedModel`` where most of the head's weights are not in linear layers.
    """
    asked: Quantization | Literal["auto"] | None = setup.options.quantization
    left_open = setup.cpu_kernels in LEFT_OPEN and setup.target.device.type == "cpu"
    if block_bytes(head):
        head = copy.deepcopy(head) if handed_over else head
        on_cpu = setup.target.device.type == "cpu" and head.dtype == torch.float32
        as_it_is = asked == "int4" or (asked == "auto" and left_open)
        if on_cpu and as_it_is and use_block_kernels(head):
            return head
        dequantize_blocks(head, head.dtype)
    worth = not handed_over and left_open and pays(head)
    rounds: Quantization | None = "int8" if worth else None
    wanted = rounds if asked == "auto" else asked
    if wanted is None:
        return head
    if not linear_layers(head):
        raise ConfigError(
            f"a head of the kind {head.kind!r} has no linear layers to round: leave quantization "
            "out."
        )
    check(wanted, setup.target.device, head.dtype)
    own = copy.deepcopy(head) if handed_over else head
    quantize(own.to(setup.target.device).eval().requires_grad_(False), wanted)
    prepack_weights(own)
    return own
