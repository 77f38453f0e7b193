"""The drafter protocol and what a drafter may see.

What happens to a drafter, in this order:

    check(request)          a request is about to join the batch: the drafter may refuse it
    takes_over(request)     how many of its first tokens the target need not read for the drafter
    begin(requests)         requests join the batch, or join it again
    known(request)          how much of a request's text it need not read
    read(requests, ...)     committed tokens and their hidden states, if `Drafter.needs` says so
    look(rows, budgets)     once a round, if it has `choices`: what its look-ups find
    propose(rows, budgets)  once a round: the tokens it guesses
    observe(round)          once a round: what became of them
    end(requests)           requests left the batch: their texts have ended, they were put aside and
                            join again later, or a step was interrupted and all join again

What it keeps of a text is kept with the request (`Request.state`, `PerRequest`), and what it keeps
of a round, from `propose` to `observe`, with the round (`Rows.state`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor, nn

from outpace.config import COMMON, SpeculativeConfig
from outpace.core.logits_pipeline import History, LogitsPipeline, RowFault
from outpace.core.options import Options, make_options
from outpace.core.progress import Progress, silent
from outpace.core.proposal import DraftingTerms, Drawn, Needs, Proposal, Verdict
from outpace.core.request import Request
from outpace.core.rng import seeds_of_stream
from outpace.core.stats import Seconds
from outpace.core.transfer import to_device
from outpace.core.trees.tree_shape import TreeShape
from outpace.draft.registry import find_drafter
from outpace.draft.state import StateFile
from outpace.errors import ConfigError
from outpace.heads.classifiers import Origin
from outpace.targets.base import Target

if TYPE_CHECKING:  # only a drafter that runs a model of its own knows more than `targets.base`
    from outpace.targets.cpu.kernels import Kernels
    from outpace.targets.hf.fixed import FixedShapes
    from outpace.targets.hf.loading.loaded import Loaded


@dataclass(frozen=True)
class Pick:
    """Who drafts in one row, and how many nodes at most; an empty name where nothing is drafted."""

    name: str = ""
    budget: int = 0


@dataclass(frozen=True)
class Find:
    """The chain that a look-up would draft in one row, and how sure it is of each token
    (`Proposal.sure`); not sure of any where it does not say so."""

    tokens: Sequence[int] = ()
    sure: Sequence[float] = ()


@dataclass(frozen=True, eq=False)
class Rows:
    """The batch as a drafter sees it at the start of a round.

    What is committed later in the round does not show here.
    """

    history: History
    pipeline: LogitsPipeline
    seeds: Tensor  # [B]
    terms: DraftingTerms = field(default_factory=DraftingTerms)
    """What is asked of this round's drafts."""
    shape: TreeShape | None = None
    """The tree of which the budgets are the first nodes, for a drafter that leaves it open."""
    requests: Sequence[Request] = ()
    """The request of each row, in the order in which they joined the batch."""
    picks: Sequence[Pick] = ()
    """Who drafts how much in each row, where the controller has chosen among `Drafter.choices`."""
    state: dict[Any, Any] = field(default_factory=dict)
    """What drafters keep until the round is over, each under itself. A round that comes to nothing
    and is played again has other rows."""
    lengths: Sequence[int] = field(init=False)
    """Committed tokens of each row."""

    def __post_init__(self) -> None:
        pairs = zip(self.history.prompts, self.history.outputs, strict=True)
        lengths = tuple(len(prompt) + len(output) for prompt, output in pairs)
        object.__setattr__(self, "lengths", lengths)

    @cached_property
    def positions(self) -> Tensor:
        """``[B]``: the lengths, on the device."""
        return to_device(list(self.lengths), self.seeds.device)

    @cached_property
    def last_ids(self) -> Sequence[Collection[int]]:
        """By row, the tokens after which its text ends; empty where that is not known."""
        return [request.last_ids for request in self.requests]

    @property
    def coupled(self) -> bool:
        """Whether tokens are drawn with the noise of the target's own."""
        return self.terms.coupled

    def __len__(self) -> int:
        return len(self.lengths)

    def seeds_of(self, random_stream: int) -> Tensor:
        """Returns the seeds ``[B]`` that a drafter in this random stream draws with."""
        return seeds_of_stream(self.seeds, random_stream)

    def since(self, row: int, start: int) -> list[int]:
        """Returns the committed tokens of a row, prompt then output, from ``start`` on."""
        prompt, output = self.history.prompts[row], self.history.outputs[row]
        end = self.lengths[row] - len(prompt)
        if start >= len(prompt):
            return list(output[start - len(prompt) : end])
        return [*prompt[start:], *output[:end]]

    def root(self, row: int) -> int:
        """Returns the last committed token of a row, after which drafts begin."""
        return self.since(row, self.lengths[row] - 1)[0]

    def history_before(self) -> History:
        """The texts as they were when the round began. `history` grows as tokens are committed, so
        that in `Drafter.observe` it is longer."""
        pairs = zip(self.history.prompts, self.history.outputs, self.lengths, strict=True)
        outputs = [output[: length - len(prompt)] for prompt, output, length in pairs]
        return History(self.history.prompts, outputs)

    def is_reproducible(self, row: int) -> bool:
        """Returns whether what a row drafts must follow from its own history alone: what was
        learned from other rows must not change it (`Request.reproducible`)."""
        return bool(self.requests) and self.requests[row].reproducible

    def for_others(self, budgets: Sequence[int]) -> list[int]:
        """Returns the budgets, but 0 for rows that are `reproducible`."""
        return [0 if self.is_reproducible(row) else budget for row, budget in enumerate(budgets)]

    def length(self, row: int) -> int:
        """Returns how many tokens of a row are committed."""
        return self.lengths[row]


@dataclass
class Outcome:
    """What one row drafted in a round, and what came of it."""

    drafted: int  # nodes
    depth: int  # levels
    accepted: int = 0  # levels that the text took
    emitted: int = 0  # tokens that the text took, before a stop condition
    path: Sequence[int] = ()
    """The accepted nodes, from the root down, whatever the text took of them."""
    method: str = ""
    """The name of the drafter: the child's, where one drafter stands for several."""
    tokens: Sequence[int] = ()
    """The accepted tokens and the extra one, whatever the text took of them."""
    predicted: bool = False
    """Whether the draft was from the text that was predicted for the request."""


@dataclass(frozen=True, eq=False)
class Round:
    """A round that is over, also one in which nothing was drafted: the controller, the drafter and
    all observers are shown the same one. Nothing in it may be changed."""

    rows: Rows
    """The batch as it was when the round began; its requests are as the round has left them."""
    budgets: Sequence[int]
    """How many nodes each row was allowed to draft."""
    proposal: Proposal
    verdict: Verdict
    outcomes: Sequence[Outcome]
    """What became of each row, on the host."""
    seconds: Seconds
    probs: Tensor | None = None
    """``[B, M, V]``, if asked for in `Needs`: the target's distributions before any argmax, at the
    root and at each node. Those of a round for several drafters are in `played`."""
    aux_logits: Tensor | None = None  # [B, R, V], if the proposal had auxiliary tokens
    dead_ends: Mapping[int, Mapping[int, RowFault]] = field(default_factory=dict)
    """By row, the drafted nodes that have no distribution, each with the reason
    (`LogitsPipeline.dead_ends`)."""
    played_as: Round | None = None
    """The round that was played, where this one tells a drafter what would have become of its own
    proposal, while another drafter's was scored. Only the played one has distributions. Use
    `played`."""

    @property
    def requests(self) -> Sequence[Request]:
        """The request of each row."""
        return self.rows.requests

    @property
    def played(self) -> Round:
        """The round that was played: what the target says of the text, whoever drafted it."""
        return self if self.played_as is None else self.played_as


@dataclass(frozen=True, eq=False)
class Setup:
    """What a drafter is built from."""

    loaded: Loaded
    """The target's model, tokenizer and configuration."""
    target: Target
    rows: int
    max_length: int
    options: Any
    """An instance of `Drafter.Options`."""
    capture: Callable[[nn.Module], FixedShapes] | None = None
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
    """Proposes tokens, and learns through `read` and `observe` only.

    ``propose`` and ``observe`` are about the requests in `Rows.requests`, the first of the batch:
    the others are still reading their prompts. A drafter that keeps caches numbers their rows as
    the batch stands (`RowNumbers`).
    """

    # What every drafter states, where the default is not true of it.

    name: ClassVar[str]
    draws: frozenset[Drawn]
    """How its tokens may be drawn: what a rule must be able to take."""
    trees: bool = False
    """Whether it may propose trees that are no chains: these, too, a rule must be able to take."""
    default_rule: ClassVar[str] = "token"
    """The rule that is used when none is named."""
    Options: ClassVar[type[Any]] = Options
    """A frozen dataclass of the entries of ``speculative_config`` that only this drafter knows."""
    needs: Needs = Needs()
    """What it has to be given of the target."""
    has_probs: bool = False
    """Whether `probs_of` says anything."""

    # How much it drafts, in which shape, and what that costs: what the controller asks.

    longest: int = 10
    """Nodes of a draft at most, where the engine chooses how many. With the root, ten are what a
    CPU scores in about one reading of the weights."""
    shape: TreeShape | None = None
    """The shape of its trees, where its options fix one. None: it drafts chains, trees of the shape
    in `Rows.shape` (`any_shape`), or a different tree in every row."""
    any_shape: bool = False
    """Whether it drafts the tree that `Rows.shape` says."""
    ends_chains: bool = False
    """Whether its chains end where `Rows.terms` say, by the distributions of their tokens."""
    keeps_up: bool = False
    """Whether it need not read first what was committed while it did not draft, as a draft model
    has to: it is given the target's states of every token, or is a part of the target."""
    pass_bytes: int = 0
    """Bytes of the weights that are read for one drafted level."""
    aux_per_node: int = 0
    """Columns of its own that ride in the target's pass after the root and each drafted node."""
    aux_per_row: int = 0
    """Columns of its own that ride in the target's pass in each row, however many nodes it has."""
    rides: bool = False
    """Whether columns of its own ride in the target's pass, wherever they stand."""
    weight_bytes: int = 0
    """The part of ``nbytes`` that is weights."""
    loaded: Loaded | None = None
    """The model that it runs, if it runs one of its own."""
    of_target: str = ""
    """The part of the target's checkpoint that drafts, if one does."""

    # What it remembers and learns.

    copies_prompts: bool = False
    """Whether it takes over what it knows of a prompt: from the row that a new one is forked from,
    and from ended texts as far as `takes_over` says. Only asked of drafters that need states:
    without this, such a prompt is read again."""
    learns: bool = True
    """Whether it goes on learning from its rounds, if it is one of its `learners`."""
    takes_predictions: bool = False
    """Whether it looks into `Request.prediction`."""
    skips_reproducible: bool = False
    """Whether it drafts nothing for rows that are `Request.reproducible`."""
    saves: bool = False
    """Whether `save` writes what it has learned, although it is none of its `learners`."""
    on_trial: str = ""
    """What it drafts with, for an error's sentence, if that has to show when it is loaded that it
    was made for the target."""

    # Drafters that are made of others, and what these ask of them.

    choices: Mapping[str, Drafter] = MappingProxyType({})
    """Drafters by name among which the controller chooses in each row (`look`, `Rows.picks`)."""
    file: StateFile | None = None
    """Where what the controller learns of its `choices` is kept between runs."""
    asked_anywhere: bool = False
    """Whether it may be asked in the middle of a round, after some of the committed tokens: a
    look-up that remembers nothing of its drafts, and of a text only what it has read."""
    joins_drafts: bool = False
    """Whether a draft of a row may be put together from, or chosen among, several that ended."""
    random_stream: int = 0
    """The random streams that it draws from (`Rows.seeds_of`)."""

    @classmethod
    def configure(cls, given: Mapping[str, Any]) -> Any:
        """Returns its `Options`, checked as far as that is possible before anything is loaded;
        ``ConfigError`` for an unknown name or a bad value."""
        unknown = f"unknown key {{}} in speculative_config for method {cls.name!r}"
        needs = f"method {cls.name!r} needs {{}} in speculative_config"
        return make_options(cls.Options, given, unknown, needs, others=COMMON)

    @classmethod
    def usual_rule(cls, options: Any) -> str:
        """Returns the rule that is used with these options when none is named."""
        return cls.default_rule

    @classmethod
    def for_target(
        cls, options: Any, loaded: Loaded, verified: Callable[[type[Drafter]], bool]
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
    def specimen(cls, loaded: Loaded) -> Mapping[str, Any]:
        """Returns the options of a tiny instance for this target, which the gate and the contract
        tests build: one that drafts something, of which some is accepted and some is not."""
        return {}

    def check(self, request: Request) -> None:
        """Is shown a request that is about to join the batch; raises ``PromptError`` where
        something that the user has given for it fails. That ends the request, before anybody has
        begun it."""

    def takes_over(self, request: Request) -> int:
        """Returns how many tokens at the beginning of a request's text the target may take over
        from the cache of an earlier one, so that `read` will not deliver their states. How many it
        did take over, which may be less, `begin` finds in `Request.taken_over`."""
        return 0 if self.needs.states else request.length

    def begin(self, requests: Sequence[Request]) -> None:
        """Takes in requests that join the batch, after the present ones. Their texts have begun
        already where they were in the batch before."""

    def known(self, request: Request) -> Mapping[str, int]:
        """Returns how many tokens at the beginning of a new request's text it need not read before
        it drafts there, under its name; nothing where it does not say."""
        return {}

    def read(
        self, requests: Sequence[Request], tokens: Sequence[Sequence[int]], states: Tensor
    ) -> None:
        """Takes in committed tokens, each once and in order, and their hidden states, but for the
        first `Request.taken_over` tokens of a text.

        tokens: of each of these requests; states: ``[len(requests), T, H]``, the layers of
        `Needs.states` side by side, a request's tokens first and then padding. The last committed
        token of a row, the root, is delivered in the next round: its states do not exist before.
        A request that joins the batch again begins anew here.
        """

    def look(self, rows: Rows, budgets: Sequence[int]) -> Mapping[str, Sequence[Find]]:
        """Returns what its look-ups would draft, by their names and by row, for the controller to
        choose by (`choices`)."""
        return {}

    @abstractmethod
    def propose(self, rows: Rows, budgets: Sequence[int]) -> Proposal:
        """Returns at most ``budgets[b]`` nodes for each row."""

    def observe(self, round: Round) -> None:
        """Learns from a round: it is shown every one that was played."""

    def probs_of(
        self, rows: Rows, tokens: Tensor, wanted: Sequence[bool] | None = None
    ) -> Tensor | None:
        """Returns the distributions ``[B, T, V]`` that it would have drawn ``tokens`` [B, T] from,
        one after another after what is committed. wanted: in which rows, unless in all of them.
        Zeros stand in the others and where it cannot tell; None where there is no other row."""
        return None

    def origin(self) -> Origin | None:
        """Returns the model whose last hidden states it shows to `DraftingTerms.goes_on`; None if
        it shows none. Takes a pass."""
        return None

    def tried(self) -> Iterator[Drafter]:
        """Yields the drafters that are `on_trial`: itself, or those that it stands for."""
        if self.on_trial:
            yield self

    def learners(self) -> Iterator[Drafter]:
        """Yields the drafters that learn online: itself, or those that it stands for."""
        yield from ()

    def end(self, requests: Sequence[Request], interrupted: bool = False) -> None:
        """Lets go of requests that left the batch: their texts have ended, or they are put aside
        and join it again.

        interrupted: a step was left half way, so that all requests are gone, and what is known of
        them may be in any state.
        """

    def forget_texts(self) -> None:
        """Forgets what earlier texts have taught it, as far as that are their words: a text that is
        asked for again must not be drafted from its own first version. Does nothing in a drafter
        that keeps none. What one of its `learners` has learned stays learned."""

    def files(self) -> Iterator[StateFile]:
        """Yields where it keeps what it learns between runs, or where those do that it stands for,
        as far as they do."""
        if self.file is not None:
            yield self.file

    def save(self, folder: Path) -> None:
        """Writes what it has learned; ``ConfigError`` where that is nothing."""
        raise ConfigError(
            f"the method {self.name!r} learns nothing that could be saved: add 'online' to a head "
            "or a draft model, or use 'suffix' or 'recycling'."
        )

    @property
    def deepest(self) -> int | None:
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
