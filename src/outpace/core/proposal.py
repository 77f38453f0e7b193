"""The proposal, verdict, needs and terms that drafters, rules and targets exchange."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from outpace.core.logits.branches import Branches
from outpace.core.transfer import to_device
from outpace.core.trees.tree import Tree


@dataclass(frozen=True)
class Deterministic:
    """The drafted tokens are given: whatever chose them, nothing about the choice is random to the
    verifier (argmax, top-k, look-up, anything selected after sampling)."""


@dataclass(frozen=True, eq=False)
class Sampled:
    """Each drafted token was drawn from the distribution in its row of ``q``, in the order of the
    nodes.

    Siblings share their row of q. With replacement they are independent draws. Without, each was
    drawn from q with its elder siblings removed and the rest renormalised; q stays the distribution
    before any removal. With ``per_drafter`` siblings do not share a distribution: each is an
    independent draw from the distribution of its own drafter, which is in its own row of q. A token
    that was chosen and not drawn is marked in ``fixed``; its row of q is 1 at the token.
    """

    q: Tensor  # [B, N, V]
    with_replacement: bool = True
    fixed: Tensor | None = None  # [B, N] bool
    per_drafter: bool = False


DraftDistribution = Deterministic | Sampled


@dataclass(frozen=True, eq=False)
class AuxTokens:
    """Columns that ride in the target's pass and are never accepted: look-ahead tokens, Jacobi
    windows, a second copy of the draft.

    Either tokens or embeddings are fed, or states that are made in the pass. ``parents`` says what
    each of R columns follows: 0 is the root, 1..N are the drafted nodes, N + 1 is the first
    auxiliary token; an auxiliary token sees its ancestors and itself and stands one position after
    its parent. ``entry_layer``: the layer at which embeddings or states join; what the layers
    before it make of these columns is thrown away. ``made``: from what that layer is given of the
    root and the nodes, ``[B, M, H]``, to the auxiliary tokens' states ``[B, R, H]``.
    """

    parents: Tensor  # [B, R]
    tokens: Tensor | None = None  # [B, R]
    embeddings: Tensor | None = None  # [B, R, H]
    entry_layer: int = 0
    made: Callable[[Tensor], Tensor] | None = None

    def __post_init__(self) -> None:
        given = (self.tokens, self.embeddings, self.made)
        if sum(one is not None for one in given) != 1:
            raise ValueError(
                "auxiliary tokens are either tokens, or embeddings, or made in the pass"
            )
        if self.entry_layer and self.tokens is not None:
            raise ValueError("auxiliary tokens that enter after the first layer are no tokens")
        if self.made is not None and not self.entry_layer:
            raise ValueError(
                "auxiliary tokens that are made in the pass enter after the first layer"
            )

    @property
    def size(self) -> int:
        return self.parents.shape[1]


@dataclass(frozen=True, eq=False)
class Precomputed:
    """The first columns of the coming pass, as the target's first layers have left them already.

    The drafter ran these layers over the pending tokens and the nodes of its chain, in order and
    after what is committed: their keys and values are in the slots where the pass would write
    them. So the pass may begin after these layers.
    """

    layers: int
    hidden_states: Tensor  # [B, C, H], C up to the pending tokens and the nodes


@dataclass(frozen=True, eq=False)
class Proposal:
    """Drafted tokens as a tree, with the distribution that they were drawn from.

    Row b uses nodes 1..counts[b]; the others are padding and are never accepted.
    """

    tokens: Tensor  # [B, N]
    tree: Tree
    counts: Tensor  # [B]
    distribution: DraftDistribution
    aux_tokens: AuxTokens | None = None
    draft_probs: Tensor | None = None  # [B, N, V]
    """The drafter's distributions before any argmax, if the rule asked for them
    (`DraftingTerms.draft_probs`). They are not what the tokens were drawn from where the tokens are
    deterministic."""
    methods: Sequence[str] = ()
    """By row, the name of the drafter that made it, where one drafter stands for several."""
    confidence: Sequence[Sequence[float]] = ()
    """By row, how sure a look-up is of each node, from 0 to 1, if it says so: an order, which
    becomes a chance once it is learned how often such nodes are accepted."""
    precomputed: Precomputed | None = None
    """What the target's pass need not compute again, if the drafter is a part of the target."""
    predicted: Sequence[bool] = ()
    """By row, whether its draft is from the text that was predicted for it (`Request.prediction`);
    empty where the drafter does not say."""

    @property
    def valid(self) -> Tensor:
        """``[B, N]`` bool: the nodes that are not padding."""
        nodes = torch.arange(self.tokens.shape[1], device=self.tokens.device)
        return nodes < self.counts[:, None]

    @cached_property
    def branches(self) -> Branches:
        """The drafted tokens that lead to each node: its ancestors, in order."""
        tokens = self.tokens[:, None, :].expand(-1, self.tree.size + 1, -1)
        return Branches(tokens, self.tree.ancestors[:, :, 1:])

    def keep(self, kept: Tensor, width: int | None = None) -> Proposal:
        """Returns the proposal with some of its nodes only, in the order that they had, and without
        what counts by their numbers: auxiliary tokens, what is computed already, confidences.

        kept: ``[B, N]`` bool; with each node its ancestors. Of siblings that were drawn all stay or
        none, and it is decided before they are drawn: then those that stay have the distributions
        that they come with. width: nodes of the new tree, N by default; no row keeps more.
        """
        counts = kept.sum(1)
        chosen = (~kept).int().argsort(dim=1, stable=True)[:, :width]  # the kept ones first
        number = torch.nn.functional.pad(kept.long().cumsum(1), (1, 0))  # [B, 1 + N]
        parents = number.gather(1, self.tree.parents.gather(1, chosen))
        valid = torch.arange(chosen.shape[1], device=counts.device) < counts[:, None]

        def moved(of_nodes: Tensor) -> Tensor:
            return of_nodes.gather(1, chosen[..., None].expand(-1, -1, of_nodes.shape[-1]))

        drawn, draft_probs = self.distribution, self.draft_probs
        if isinstance(drawn, Sampled):
            fixed = None if drawn.fixed is None else drawn.fixed.gather(1, chosen)
            drawn = replace(drawn, q=moved(drawn.q), fixed=fixed)
        return replace(
            self,
            tokens=torch.where(valid, self.tokens.gather(1, chosen), 0),
            tree=Tree(torch.where(valid, parents, 0)),
            counts=counts,
            distribution=drawn,
            aux_tokens=None,
            draft_probs=None if draft_probs is None else moved(draft_probs),
            confidence=(),
            precomputed=None,
        )

    def first(self, counts: Sequence[int]) -> Proposal:
        """Returns the first nodes of each row, at most ``counts`` of them, without auxiliary
        tokens: these follow nodes that may be gone."""
        device, width = self.tokens.device, max(counts, default=0)
        if not width:
            return replace(Proposal.empty(len(counts), device), methods=self.methods)
        drawn, tree = self.distribution, self.tree
        if isinstance(drawn, Sampled):
            fixed = None if drawn.fixed is None else drawn.fixed[:, :width]
            drawn = replace(drawn, q=drawn.q[:, :width], fixed=fixed)
        shape = (len(counts), width)
        return replace(
            self,
            tokens=self.tokens[:, :width],
            tree=Tree.chain(*shape, device) if tree.is_chain else Tree(tree.parents[:, :width]),
            counts=torch.minimum(self.counts, to_device(list(counts), device)),
            distribution=drawn,
            aux_tokens=None,
            precomputed=self.precomputed if width == self.tokens.shape[1] else None,
            draft_probs=None if self.draft_probs is None else self.draft_probs[:, :width],
        )

    def cut_to_vocabulary_(self, vocabulary: int) -> Proposal:
        """Returns the proposal with each row cut before its first token outside the vocabulary;
        such tokens become 0, in place. Look-ups copy them from prompts. The target never writes
        them, and no distribution has a place for them."""
        if not self.tokens.numel():
            return self
        if self.tokens.device.type == "cpu":  # on another device, looking would wait for it
            least, most = self.tokens.aminmax()
            if int(least) >= 0 and int(most) < vocabulary:
                return self
        known = (self.tokens >= 0) & (self.tokens < vocabulary)
        self.tokens.masked_fill_(~known, 0)
        return replace(self, counts=torch.minimum(self.counts, known.cumprod(1).sum(1)))

    @classmethod
    def empty(cls, rows: int, device: torch.device | str = "cpu") -> Proposal:
        """Returns the proposal of a drafter that proposes nothing: plain decoding."""
        tokens = torch.zeros(rows, 0, dtype=torch.long, device=device)
        counts = torch.zeros(rows, dtype=torch.long, device=device)
        return cls(tokens, Tree.chain(rows, 0, device), counts, Deterministic())


class DraftSampling(Enum):
    """How proposed tokens may have been drawn."""

    DETERMINISTIC = "deterministic"
    IID = "sampled"
    WITHOUT_REPLACEMENT = "sampled without replacement"
    PER_DRAFTER = "sampled from several distributions"

    @classmethod
    def of(cls, proposal: Proposal) -> DraftSampling:
        """Returns how the proposal's tokens were drawn."""
        return cls.by(proposal.distribution)

    @classmethod
    def by(cls, distribution: DraftDistribution) -> DraftSampling:
        """Returns how tokens of such a distribution were drawn."""
        if isinstance(distribution, Deterministic):
            return cls.DETERMINISTIC
        if distribution.per_drafter:
            return cls.PER_DRAFTER
        return cls.IID if distribution.with_replacement else cls.WITHOUT_REPLACEMENT


ONE_DISTRIBUTION = frozenset(
    {DraftSampling.DETERMINISTIC, DraftSampling.IID, DraftSampling.WITHOUT_REPLACEMENT}
)
"""What a rule for chains takes, or one that knows siblings of one distribution only."""


@dataclass(frozen=True, eq=False)
class Verdict:
    """The node at which the walk ended, the one extra token, and what these were found from."""

    node: Tensor  # [B] last accepted node; 0 if none was
    next_token: Tensor  # [B]
    node_on_host: Sequence[int] | None = None
    """``node`` on the host, once it has been asked for."""
    p: Tensor | None = None
    """``[B, M, V]``: the target's distributions that entered the rule. None where the rule was not
    asked: batches of greedy rows under a lossless rule, and coupled rows, follow the target's own
    tokens."""
    rule: Any = None
    """The rule (`outpace.verify.base.Rule`) with the evidence of the round, if it was asked."""

    @property
    def nodes(self) -> Sequence[int]:
        """``node`` on the host: no transfer in a round that has made one already."""
        return self.node.tolist() if self.node_on_host is None else self.node_on_host

    def path(self, tree: Tree) -> Tensor:
        """Returns ``[B, N]``, the accepted nodes from the root down, then -1."""
        row = torch.arange(self.node.shape[0], device=self.node.device)
        return tree.paths[row, self.node]


@dataclass(frozen=True)
class Needs:
    """What a drafter asks of the target, declared once and honoured in every round."""

    hidden_layers: tuple[int, ...] = ()
    """Layers whose hidden states it wants of every committed token, delivered by `Drafter.read`;
    0 is the embedding, i what layer i puts out, -1 what the output matrix reads."""
    softmax_probs: bool = False
    """The target's distribution before any argmax at every node, delivered by `Drafter.observe`."""
    images: bool = False
    """A prompt's images as they were given, besides what the target's processor makes of them."""
    full_prefill: bool = False
    """Whether the target must have read a prompt, but for its last token, before the first draft.
    Otherwise the pass that scores the first draft may read a short prompt, too."""


@dataclass(frozen=True)
class Capabilities:
    """What a drafter can do besides drafting, and what may be done with it."""

    any_shape: bool = False
    """It drafts the tree that `Rows.shape` says."""
    supports_early_stop: bool = False
    """Its chains end where `Rows.terms` say, by the distributions of their tokens."""
    has_probs: bool = False
    """`Drafter.probs_of` says something."""
    uses_aux_tokens: bool = False
    """Columns of its own are in the target's pass, wherever they stand."""
    needs_no_prefill: bool = False
    """It need not read first what was committed while it did not draft, as a draft model has to: it
    is given the target's states of every token, or is a part of the target."""
    stateless: bool = False
    """It may be asked in the middle of a round, after some of the committed tokens: a look-up that
    remembers nothing of its drafts, and of a text only what it has read."""
    joins_drafts: bool = False
    """A draft of a row may be put together from, or chosen among, several that ended."""
    copies_prompts: bool = False
    """It takes over what it knows of a prompt: from the row that a new one is forked from, and from
    ended texts as far as `Drafter.cached_prefix` says. Only asked of drafters that need states:
    without this, such a prompt is read again."""
    takes_predictions: bool = False
    """It looks into `Request.prediction`."""
    skips_reproducible: bool = False
    """It drafts nothing for rows that are `Request.reproducible`."""
    saves: bool = False
    """`Drafter.save` writes what it has learned, although it is none of its `Drafter.learners`."""
    verify_on_load: str = ""
    """What it drafts with, for an error's sentence, if that has to show when it is loaded that it
    was made for the target."""


StoppingFn = Callable[[Tensor, Tensor], Tensor]
"""Says after which tokens a chain ends: from distributions before any argmax ``[B, V]`` and the
tokens ``[B]`` that were drawn from them, to bool ``[B]``.

It is asked about each token in order, but not once no chain may go on: the last token of the
longest chain is not looked at. The token stays in the draft, and what is decided follows from
tokens before the end, so that each follows its distribution (proved by enumeration for every rule:
"stopping" in `outpace audit distributions`)."""


@dataclass(frozen=True)
class DraftingTerms:
    """What is asked of the drafts of a round: by the rule, the same in every round (``coupled``,
    ``draft_probs``, ``continue_on_probs``), and by the length policy, which may ask for something
    else in each (``make_stopping_fn``, ``continue_on_hidden``)."""

    coupled: bool = False
    """Draw with the noise that the target's own token at that position is drawn with."""
    draft_probs: bool = False
    """Hand over the distributions before any argmax in `Proposal.draft_probs`, if the tokens come
    from any."""
    continue_on_probs: Callable[[Tensor], Tensor] | None = None
    """End a chain before drawing from a distribution that this says no to: distributions before any
    argmax ``[B, V]`` to bool ``[B]``. Since nothing but the distribution decides, it does not make
    the distribution of what is drawn false. Unset: chains end with their budgets."""

    make_stopping_fn: Callable[[Sequence[int]], StoppingFn] | None = None
    """Begins a drafter's chains, of which each row may have n tokens, and returns what ends
    them. Several drafters may draft in one round: each has its own."""

    continue_on_hidden: Callable[[Tensor], Tensor] | None = None
    """End a chain that this says no to, before its next token is drawn: from the drafter's last
    hidden states ``[B, H]`` at the token before, at first at the root, to bool ``[B]``. It is asked
    once for each token, in order. All that it looks at follows from tokens that stay in the draft,
    as with ``make_stopping_fn``. Only a drafter with a `model_signature` has such states."""

    @property
    def wants_probs(self) -> bool:
        """Whether anybody looks at distributions before the argmax."""
        ends = self.continue_on_probs is not None or self.make_stopping_fn is not None
        return self.draft_probs or ends
