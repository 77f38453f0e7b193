"""The drafter protocol.

What happens to a drafter, in this order:

    check(request)            a request is about to join the batch: the drafter may refuse it
    cached_prefix(request)    how many of its first tokens the target need not read for the drafter
    begin(requests)           requests join the batch, or join it again
    computed_tokens(request)  how much of a request's text it need not read
    look_up(rows, budgets)    once in each round in which any row may draft, if it has
                              `candidate_drafters`: what its look-ups find
    propose(rows, budgets)    once in each such round: the tokens it guesses
    read(requests, ...)       committed tokens and their hidden states, if `Drafter.needs` says so:
                              of a prompt as it is read, of a round before `observe`
    observe(round)            once a round: what became of them
    end(requests)             requests left the batch: their texts have ended, they were preempted
                              and join again later, or a step was interrupted and all join again

What it keeps of a text is kept with the request (`Request.state`, `PerRequest`), and what it keeps
of a round, from `propose` to `observe`, with the round (`Rows.state`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor, nn

from outpace.config import COMMON, SpeculativeConfig
from outpace.core.options import Options, make_options
from outpace.core.progress import Progress, silent
from outpace.core.proposal import Capabilities, DraftSampling, Needs, Proposal
from outpace.core.request import Request
from outpace.core.trees.tree_shape import TreeShape
from outpace.draft.registry import find_drafter
from outpace.draft.round import LookupDraft
from outpace.draft.round import Round as Round
from outpace.draft.round import Rows as Rows
from outpace.draft.state import StateFile
from outpace.errors import ConfigError
from outpace.heads.classifiers import ModelSignature
from outpace.targets.base import Target

if TYPE_CHECKING:  # only a drafter that runs a model of its own knows more than `targets.base`
    from outpace.targets.cpu.kernels import Kernels
    from outpace.targets.hf.fixed import FixedShapeConfig
    from outpace.targets.hf.loading.loaded import LoadedModel


CATCH_UP_TOKENS = 16
"""Unseen tokens of a row that a drafter feeds in its first pass of a round, with those of other
rows; more are cached row by row first. Where the controller does not reckon with that, replays are
.995 times as fast, summaries .957."""


@dataclass(frozen=True, eq=False)
class Setup:
    """What a drafter is built from."""

    loaded: LoadedModel
    """The target's model, tokenizer and configuration."""
    target: Target
    rows: int
    max_length: int
    options: Any
    """An instance of `Drafter.Options`."""
    capture: Callable[[nn.Module], FixedShapeConfig | None] | None = None
    """How passes of fixed shapes of a drafter's own model are run, if compiled or recorded."""
    cpu_kernels: Kernels = "auto"
    random_streams: Iterator[int] = field(default_factory=lambda: count(1))
    """Numbers of random streams that nobody uses yet."""
    saved_texts: int | None = None
    """How many ended texts a model or a head keeps cached, for those that begin alike; None: the
    beginnings of a few."""
    saved_tokens: int | None = None
    """How many tokens these may have together, where their number is given; None: any number."""
    progress: Progress = silent
    """Is called with each step of what takes long."""

    def child(self, config: Mapping[str, Any]) -> Drafter:
        """Returns another drafter, for use inside the one that is being built.

        config: as ``speculative_config``. The child draws from a random stream of its own, so that
        what it drafts is independent of what others draft for the same rows.
        """
        wanted = SpeculativeConfig.of_child(config)
        kind = find_drafter(wanted.method)
        drafter = kind.build(replace(self, options=kind.configure(wanted.options)))
        drafter.random_stream = next(self.random_streams)
        return drafter


class Drafter(ABC):
    """Proposes tokens, and learns through `read`, `observe` and `end` only.

    ``propose`` and ``observe`` are about the requests in `Rows.requests`, the first of the batch:
    the others are still reading their prompts. A drafter that keeps caches numbers their rows as
    the batch stands (`RowNumbers`).
    """

    # What every drafter states, where the default is not true of it.

    name: ClassVar[str]
    sampling_kinds: frozenset[DraftSampling]
    """How its tokens may be drawn: what a rule must be able to take."""
    trees: bool = False
    """Whether it may propose trees that are no chains: these, too, a rule must be able to take."""
    default_rule: ClassVar[str] = "token"
    """The rule that is used when none is named."""
    Options: ClassVar[type[Any]] = Options
    """A frozen dataclass of the entries of ``speculative_config`` that only this drafter knows."""
    needs: Needs = Needs()
    """What it has to be given of the target."""
    capabilities: Capabilities = Capabilities()
    """What else it can do, and what may be done with it."""

    # How much it drafts, in which shape, and what that costs: what the controller asks.

    max_draft_tokens: int = 10
    """Nodes of a draft at most, where the engine chooses how many. With the root, ten are what a
    CPU scores in about one reading of the weights."""
    shape: TreeShape | None = None
    """The shape of its trees, where its options fix one. None: it drafts chains, trees of the shape
    in `Rows.shape` (`Capabilities.any_shape`), or a different tree in every row."""
    pass_bytes: int = 0
    """Bytes of the weights that are read for one drafted level."""
    aux_per_node: int = 0
    """Columns of its own that ride in the target's pass after the root and each drafted node."""
    aux_per_row: int = 0
    """Columns of its own that ride in the target's pass in each row, however many nodes it has."""
    weight_bytes: int = 0
    """The part of ``nbytes`` that is weights."""
    loaded: LoadedModel | None = None
    """The model that it runs, if it runs one of its own."""
    target_module: str = ""
    """The part of the target's checkpoint that drafts, if one does."""

    # What it remembers and learns.

    learns: bool = True
    """Whether it goes on learning from its rounds, if it does at all (`set_learning`)."""

    # Drafters that are made of others, and what these ask of them.

    candidate_drafters: Mapping[str, Drafter] = MappingProxyType({})
    """Drafters by name among which the controller chooses in each row (`look_up`, `Rows.picks`)."""
    file: StateFile | None = None
    """Where what the controller learns of its `candidate_drafters` is kept between runs."""
    random_stream: int = 0
    """The random stream that it draws from (`Rows.seeds_of`)."""

    @classmethod
    def configure(cls, given: Mapping[str, Any]) -> Any:
        """Returns its `Options`, checked as far as that is possible before anything is loaded;
        ``ConfigError`` for an unknown name or a bad value."""
        unknown = f"unknown key {{}} in speculative_config for method {cls.name!r}"
        needs = f"method {cls.name!r} needs {{}} in speculative_config"
        return make_options(cls.Options, given, unknown, needs, others=COMMON)

    @classmethod
    def default_rule_for(cls, options: Any) -> str:
        """Returns the rule that is used with these options when none is named."""
        return cls.default_rule

    @classmethod
    def for_target(
        cls, options: Any, loaded: LoadedModel, verified: Callable[[type[Drafter]], bool]
    ) -> Any:
        """Returns the options for a target that is loaded: with what it brings itself to draft
        with, where these leave that open. verified: whether the rule, if one is named, takes what a
        drafter proposes."""
        return options

    @classmethod
    @abstractmethod
    def build(cls, setup: Setup) -> Drafter:
        """Returns the drafter for a target."""

    @classmethod
    def dummy_options(cls, loaded: LoadedModel) -> Mapping[str, Any]:
        """Returns the options of a tiny instance for this target, which the gate and the contract
        tests build: one that drafts something, of which some is accepted and some is not."""
        return {}

    def check(self, request: Request) -> None:
        """Is shown a request that is about to join the batch; raises ``PromptError`` where
        something that the user has given for it fails. That ends the request, before anybody has
        begun it."""

    def cached_prefix(self, request: Request) -> int:
        """Returns how many tokens at the beginning of a request's text the target may take over
        from the cache of an earlier one, so that `read` will not deliver their states. How many it
        did take over, which may be less, `begin` finds in `Request.cached_prefix`."""
        return 0 if self.needs.hidden_layers else request.length

    def begin(self, requests: Sequence[Request]) -> None:
        """Takes in requests that join the batch, after the present ones. Their texts have begun
        already where they were in the batch before."""

    def computed_tokens(self, request: Request) -> Mapping[str, int]:
        """Returns how many tokens at the beginning of a new request's text it need not read before
        it drafts there, under its name; nothing where it does not say."""
        return {}

    def read(
        self, requests: Sequence[Request], tokens: Sequence[Sequence[int]], states: Tensor
    ) -> None:
        """Takes in committed tokens, each once and in order, and their hidden states, but for the
        first `Request.cached_prefix` tokens of a text.

        tokens: of each of these requests; states: ``[len(requests), T, H]``, the layers of
        `Needs.hidden_layers` side by side, a request's tokens first and then padding. The last
        committed token of a row, the root, is delivered in the next round: its states do not exist
        before. A request that joins the batch again begins anew here.
        """

    def look_up(self, rows: Rows, budgets: Sequence[int]) -> Mapping[str, Sequence[LookupDraft]]:
        """Returns what its look-ups would draft, by their names and by row, for the controller to
        choose by (`candidate_drafters`)."""
        return {}

    @abstractmethod
    def propose(self, rows: Rows, budgets: Sequence[int]) -> Proposal:
        """Returns at most ``budgets[b]`` nodes for each row."""

    def observe(self, round: Round) -> None:
        """Learns from a round: it is shown every one that was run."""

    def probs_of(
        self, rows: Rows, tokens: Tensor, wanted: Sequence[bool] | None = None
    ) -> Tensor | None:
        """Returns the distributions ``[B, T, V]`` that it would have drawn ``tokens`` [B, T] from,
        one after another after what is committed. wanted: in which rows, unless in all of them.
        Zeros stand in the others and where it cannot tell; None where there is no other row."""
        return None

    def model_signature(self) -> ModelSignature | None:
        """Returns the signature of the model whose last hidden states it shows to
        `DraftingTerms.continue_on_hidden`; None if it shows none. Takes a pass."""
        return None

    def networks(self) -> Iterator[nn.Module]:
        """Yields the models and heads that it drafts with. A composite drafter yields its
        children's."""
        if self.loaded is not None:
            yield self.loaded.model

    def drafters_to_verify(self) -> Iterator[Drafter]:
        """Yields the drafters that are verified on load: itself, or its children."""
        if self.capabilities.verify_on_load:
            yield self

    def learners(self) -> Iterator[Drafter]:
        """Yields the drafters that learn online: itself, or its children."""
        yield from ()

    def set_learning(self, learns: bool) -> None:
        """Sets whether it and its children learn from the rounds to come."""
        self.learns = learns

    def end(self, requests: Sequence[Request], interrupted: bool = False) -> None:
        """Lets go of requests that left the batch: their texts have ended, or they are preempted
        and join it again.

        interrupted: a step was left half way, so that all requests are gone, and what is known of
        them may be in any state.
        """

    def forget_texts(self) -> None:
        """Forgets what earlier texts have taught it, as far as that are their words: a text that is
        asked for again must not be drafted from its own first version. Does nothing in a drafter
        that keeps none. What one of its `learners` has learned stays learned."""

    def files(self) -> Iterator[StateFile]:
        """Yields the files in which it and its children keep what they learn between runs."""
        if self.file is not None:
            yield self.file

    def save(self, folder: Path) -> None:
        """Writes what it has learned; ``ConfigError`` where that is nothing."""
        raise ConfigError(
            f"the method {self.name!r} learns nothing that could be saved: add 'online' to a head "
            "or a draft model, or use 'suffix' or 'recycling'."
        )

    @property
    def max_depth(self) -> int | None:
        """Levels of the trees that it can draft, where it leaves their shape open; None: any
        number."""
        return None

    @property
    def nbytes(self) -> int:
        """Bytes of weights and caches that only the drafter needs."""
        return 0

    @property
    def compile_seconds(self) -> float:
        """Seconds spent on compiling or recording passes so far."""
        return 0.0
