"""Look-ahead decoding: the target itself writes n-grams in the pass that verifies earlier ones.

Fu et al. 2024, "Break the Sequential Dependency of LLM Inference Using Lookahead Decoding" (arXiv
2402.02057); the options are named as in TensorRT-LLM.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar

from annotated_types import Ge, Le

from outpace.core.options import Options
from outpace.core.proposal import AuxTokens, Capabilities, DraftSampling, Proposal
from outpace.core.request import PerRequest
from outpace.core.transfer import to_device
from outpace.draft.base import Drafter, Round, Rows, Setup
from outpace.draft.ngrams import NgramPool
from outpace.draft.token_trees import TokenTree, deterministic_trees, merged
from outpace.errors import ConfigError

MAX_AUX_TOKENS = 192
"""Auxiliary tokens of a row, at most."""

RECENT = 256
"""Tokens from which guesses are taken."""

STRIDE = 2654435761
"""Spreads guesses over the text (Knuth's multiplicative hashing): neighbours come from apart."""


@dataclass(frozen=True, kw_only=True)
class LookaheadOptions(Options):
    """What a user may set."""

    max_window_size: Annotated[int, Ge(1), Le(64)] = 4
    """Positions ahead that are guessed at once (W)."""
    max_ngram_size: Annotated[int, Ge(2), Le(64)] = 3
    """Tokens of an n-gram, the first one included (N)."""
    max_verification_set_size: Annotated[int, Ge(1), Le(64)] = 4
    """N-grams that are tried in a round (G)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        columns = self.max_window_size * (self.max_ngram_size - 1)
        if columns > MAX_AUX_TOKENS:
            raise ConfigError(
                f"max_window_size times (max_ngram_size - 1) is {columns} columns in every pass, "
                f"and at most {MAX_AUX_TOKENS} are fed: make one of them smaller."
            )


class _Window:
    """Guesses for the next positions of one row, in W columns and N - 1 levels.

    The token of level l in column j stands l + j positions after the next token. A level holds
    what the target says after the level below it: each is one Jacobi iteration further.
    """

    def __init__(self, width: int, levels: int) -> None:
        self._width = width
        self._length = 0  # of the text when the levels were placed
        self._levels: list[list[int]] = [[] for _ in range(levels)]
        self._ages: list[int] = []  # of each column, the iterations since it was a mere guess
        self._newest: list[int] | None = None  # the level that the last pass has brought

    def place(self, length: int, recent: Sequence[int]) -> list[int]:
        """Moves on to the end of the text; returns the window's tokens ``[(N - 1) W]``, by level.

        length: of the text; recent: its last tokens, from which guesses are taken.
        """
        moved = length - self._length
        self._length = length
        if self._newest is not None:
            # Each level takes the place of the one below, whose tokens stand one position before.
            self._levels = [*self._levels[1:], self._newest]
            self._newest = None
            moved -= 1
        if moved or not self._ages:
            self._shift(min(moved, self._width) if self._ages else self._width, recent)
        return [token for level in self._levels for token in level]

    def _shift(self, columns: int, recent: Sequence[int]) -> None:
        """Drops the columns that the text has reached; guesses stand in for new ones."""
        kept = self._length + self._width - columns
        self._ages = [*self._ages[columns:], *[0] * columns]
        for above, level in enumerate(self._levels):
            ahead = range(kept + above, kept + above + columns)
            guesses = [recent[place * STRIDE % len(recent)] for place in ahead]
            self._levels[above] = [*level[columns:], *guesses]

    @property
    def first(self) -> int:
        """The guess for the next token."""
        return self._levels[0][0]

    def enter(self, newest: list[int], pool: NgramPool) -> None:
        """Takes over what the target says after the last level, one token for each column. Columns
        that no longer hold any mere guess give an n-gram each."""
        self._newest = newest
        self._ages = [age + 1 for age in self._ages]
        for column, (age, token) in enumerate(zip(self._ages, newest, strict=True)):
            if age > len(self._levels):
                pool.add([*(level[column] for level in self._levels), token])


class LookaheadDrafter(Drafter):
    """Tries the latest n-grams that begin with a row's last token, and lets a window of guesses
    ride in the same pass.

    From what the target says after the window's last level n-grams come, one for each column. They
    enter the row's pool with those of its own text. With none at hand, the window's guess for
    the next token is tried.

    Rows whose text must follow from their own history alone have no window, because what it says
    depends on rounds, and not on the text alone. They draft n-grams of their own text.
    """

    name: ClassVar[str] = "lookahead"
    sampling_kinds: frozenset[DraftSampling] = frozenset({DraftSampling.DETERMINISTIC})
    trees: bool = True
    capabilities: Capabilities = Capabilities(uses_aux_tokens=True)
    default_rule: ClassVar[str] = "match"
    Options: ClassVar[type[Any]] = LookaheadOptions

    def __init__(self, options: LookaheadOptions, vocabulary: int) -> None:
        """vocabulary: tokens that can be drafted; heads may be wider."""
        self.width, self.levels = options.max_window_size, options.max_ngram_size - 1
        self.max_draft_tokens = options.max_verification_set_size * self.levels
        self.aux_per_row = self.width * self.levels
        self._most = options.max_verification_set_size
        self._vocabulary = vocabulary
        self._pools = PerRequest(lambda request: NgramPool(self.levels + 1, self._most))
        self._windows = PerRequest(lambda request: _Window(self.width, self.levels))

    @classmethod
    def build(cls, setup: Setup) -> LookaheadDrafter:
        return cls(setup.options, setup.loaded.vocabulary)

    def propose(self, rows: Rows, budgets: Sequence[int]) -> Proposal:
        guessing = [
            row for row, budget in enumerate(budgets) if budget and not rows.is_reproducible(row)
        ]
        placed = {row: self._placed(rows, row) for row in guessing}
        guesses = [self._guess(rows, row, budget) for row, budget in enumerate(budgets)]
        rows.state[self] = guessing  # the rows whose windows are part of the round
        proposal = deterministic_trees(guesses, rows.seeds.device)
        if not placed:
            return proposal
        unused = [0] * (self.width * self.levels)
        tokens = to_device([placed.get(row, unused) for row in range(len(rows))], rows.seeds.device)
        parents = to_device(self._parents(proposal.tree.size), rows.seeds.device)
        return replace(proposal, aux_tokens=AuxTokens(parents.expand(len(rows), -1), tokens=tokens))

    def observe(self, round: Round) -> None:
        if round.aux_logits is None or round.proposal.aux_tokens is None:
            return
        last = round.aux_logits[:, -self.width :, : self._vocabulary]
        newest = last.argmax(-1).tolist()  # [B, W]
        for row in round.rows.state.get(self, ()):
            request = round.requests[row]
            self._windows[request].enter(newest[row], self._pools[request])

    def _placed(self, rows: Rows, row: int) -> list[int]:
        length = rows.lengths[row]
        window = self._windows[rows.requests[row]]
        return window.place(length, rows.since(row, max(0, length - RECENT)))

    def _guess(self, rows: Rows, row: int, budget: int) -> TokenTree:
        if not budget:
            return TokenTree()
        request = rows.requests[row]
        pool = self._pools[request]
        pool.learn(rows.since(row, pool.known))
        known = pool.after(rows.root(row))
        if not known and not rows.is_reproducible(row):
            known = [(self._windows[request].first,)]
        return merged(map(TokenTree.chain, known), budget)

    def _parents(self, drafted: int) -> list[int]:
        """What each auxiliary token follows: the lowest level is a chain after the root, and every
        other token follows the one below it in its column."""
        first = drafted + 1
        chain = [0, *range(first, first + self.width - 1)]
        return [*chain, *range(first, first + self.width * (self.levels - 1))]

    @property
    def nbytes(self) -> int:
        return sum(pool.nbytes for pool in self._pools.values())
