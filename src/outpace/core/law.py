"""Logits and history to a law over the vocabulary: the one place, for target and drafter alike.

p = law(target logits), q = law(drafter logits), each row under its own request's options and each
node under the history that it would have if it were reached. Whatever the drafter proposes and the
verifier checks is a law made here, so the two can never be warped differently.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import compress

import torch
from torch import Tensor

from outpace.core.params import SamplingParams
from outpace.core.token_counts import TokenCounts
from outpace.core.truncation import NEVER, keep_min_p, keep_top_k, keep_top_p, keep_typical
from outpace.errors import ParamsError


@dataclass(frozen=True, eq=False)
class Branches:
    """The drafted tokens that lead to each of M nodes, beyond the committed history."""

    tokens: Tensor  # [B, M, D]
    valid: Tensor  # [B, M, D] bool

    @classmethod
    def root(cls, rows: int, device: torch.device | str = "cpu") -> Branches:
        """Returns the branches of the root alone: nothing drafted yet."""
        empty = torch.zeros(rows, 1, 0, dtype=torch.long, device=device)
        return cls(empty, empty.bool())


@dataclass(frozen=True, eq=False)
class History:
    """The committed tokens of B rows: what the options that look back need."""

    prompts: Sequence[Sequence[int]]
    outputs: Sequence[Sequence[int]]


@dataclass(frozen=True)
class RowOptions:
    """One row's resolved options with everything that needs a tokenizer already in token ids."""

    params: SamplingParams
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    end_ids: tuple[int, ...] = ()
    """Tokens that min_tokens forbids: end of sequence and stop tokens."""


class Contradiction(ParamsError):
    """One row's options leave it no token to go on with."""

    def __init__(self, row: int) -> None:
        super().__init__(
            "allowed_token_ids, bad_words, min_tokens and logits_processors together forbid every "
            "token: relax one of them."
        )
        self.row = row


_COLUMNS = ("_temperature", "_greedy", "_top_k", "_top_p", "_min_p", "_typical_p", "_bias")
"""Attributes of a `LawMaker` with a setting of each row, or nothing where no row has it set."""


class LawMaker:
    """Makes the laws of B rows; build a new one when the rows change.

    What it keeps from call to call is how often each row's committed tokens occur.

    Raises ``ParamsError`` for options that name tokens outside the vocabulary and, when called,
    `Contradiction` for those that leave a committed history without any token to go on with.

    >>> maker = LawMaker([RowOptions(SamplingParams(temperature=0).resolve({}))], vocabulary=3)
    >>> history = History([[0]], [[]])
    >>> maker(torch.tensor([[[0.1, 0.9, 0.0]]]), Branches.root(1), history).tolist()
    [[[0.0, 1.0, 0.0]]]
    """

    def __init__(
        self, rows: Sequence[RowOptions], vocabulary: int, device: torch.device | str = "cpu"
    ) -> None:
        self.rows = tuple(rows)
        self.vocabulary = vocabulary
        self.device = torch.device(device)
        params = [row.params for row in self.rows]
        self.all_greedy = all(p.greedy for p in params)
        self.any_greedy = any(p.greedy for p in params)
        self._temperature = self._column([p.temperature or 1.0 for p in params], off=1.0)
        self._greedy = torch.tensor([p.greedy for p in params], device=self.device)
        wanted = [k if (k := p.top_k or 0) > 0 else vocabulary for p in params]
        self._largest_k = max((k for k in wanted if k < vocabulary), default=vocabulary)
        self._top_k = self._integers(wanted)
        self._top_p = self._column([p.top_p for p in params], off=1.0)
        self._min_p = self._column([p.min_p for p in params], off=0.0)
        self._typical_p = self._column([p.typical_p for p in params], off=1.0)
        self._repetition = self._column([p.repetition_penalty for p in params], off=1.0)
        self._presence = self._column([p.presence_penalty for p in params], off=0.0)
        self._frequency = self._column([p.frequency_penalty for p in params], off=0.0)
        self._bias = self._static_bias()
        # Tokens beyond the vocabulary cannot be generated, so nothing is left to forbid.
        self._end_ids = [[i for i in row.end_ids if i in range(vocabulary)] for row in self.rows]
        self._bad_words = [
            [word for word in row.bad_words_ids if word[-1] < vocabulary] for row in self.rows
        ]
        self._looks_back = (
            self._repetition is not None
            or self._presence is not None
            or self._frequency is not None
        )
        self.dead_ends: dict[int, list[int]] = {}
        """By row, the nodes of the last call at which it has no token left to go on with."""
        self._prompts, self._outputs = (
            TokenCounts(len(self.rows) if self._looks_back else 0, vocabulary, self.device)
            for _ in range(2)
        )

    def __call__(self, logits: Tensor, branches: Branches, history: History) -> Tensor:
        """Returns the laws ``[B, M, V]`` of the nodes; each sums to 1.

        logits: ``[B, M, V']``, V' >= V (rows beyond the vocabulary are padding and are cut).
        float64 logits give float64 laws, all others float32.
        """
        scores = self.adjusted(logits, branches, history)
        if self.all_greedy:
            return _one_hot(scores)
        law = self._truncated(scores)
        if self.any_greedy:
            law = torch.where(self._greedy[:, None, None], _one_hot(scores), law)
        return law

    def best(self, logits: Tensor, branches: Branches, history: History) -> Tensor:
        """Returns ``[B, M]``, the token of each node's law where all rows are greedy."""
        return self.adjusted(logits, branches, history).argmax(-1)

    def reported(self, logits: Tensor, branches: Branches, history: History) -> Tensor:
        """Returns ``[B, M, V]`` log-probabilities to report, those of the `soft` laws."""
        return self.soft(logits, branches, history).log()

    def soft(self, logits: Tensor, branches: Branches, history: History) -> Tensor:
        """Returns the laws ``[B, M, V]``, those of greedy rows before the argmax."""
        return self._truncated(self.adjusted(logits, branches, history))

    def adjusted(self, logits: Tensor, branches: Branches, history: History) -> Tensor:
        """Returns the scores ``[B, M, V]`` before temperature and truncation."""
        scores = logits[..., : self.vocabulary]
        if scores.dtype not in (torch.float32, torch.float64):
            scores = scores.float()
        if self._bias is not None:
            scores = scores + self._bias[:, None, :].to(scores.dtype)
        if self._looks_back:
            scores = self._penalised(scores, branches, history)
        by_node = [row for row in range(len(self.rows)) if self._goes_by_node(row, history)]
        self.dead_ends = {}
        if by_node:
            scores = scores.clone()
            for row in by_node:
                scores[row] = self._constrained(scores[row], row, branches, history)
        return scores

    # -- the laws as a function of tensors alone -----------------------------------------------

    @property
    def is_fixed(self) -> bool:
        """Whether the laws follow from the logits and `columns`, whatever was committed."""
        by_node = any(
            row.bad_words_ids or row.params.min_tokens or row.params.logits_processors
            for row in self.rows
        )
        return not (by_node or self._looks_back)

    @property
    def columns(self) -> tuple[Tensor, ...]:
        """The rows' settings as tensors: those that are set."""
        return tuple(column for name in _COLUMNS if (column := getattr(self, name)) is not None)

    @property
    def kind(self) -> Hashable:
        """What else the laws follow from: equal where only `columns` differ."""
        present = tuple(name for name in _COLUMNS if getattr(self, name) is not None)
        numbers = len(self.rows), self.vocabulary, self._largest_k
        return *present, *numbers, self.all_greedy, self.any_greedy

    def over(self, columns: Sequence[Tensor]) -> LawMaker:
        """Returns the maker of the same `kind` that reads these tensors."""
        made = copy.copy(self)
        present = (name for name in _COLUMNS if getattr(self, name) is not None)
        for name, column in zip(present, columns, strict=True):
            setattr(made, name, column)
        return made

    # -- building ------------------------------------------------------------------------------

    def _column(self, values: Sequence[float | None], off: float) -> Tensor | None:
        filled = [off if value is None else value for value in values]
        if all(value == off for value in filled):
            return None
        return torch.tensor(filled, dtype=torch.float64, device=self.device)[:, None, None]

    def _integers(self, values: Sequence[int]) -> Tensor | None:
        if all(value >= self.vocabulary for value in values):
            return None
        clipped = [min(value, self.vocabulary) for value in values]
        return torch.tensor(clipped, device=self.device)[:, None, None]

    def _static_bias(self) -> Tensor | None:
        params = [row.params for row in self.rows]
        if not any(p.logit_bias or p.allowed_token_ids is not None for p in params):
            return None
        bias = torch.zeros(len(self.rows), self.vocabulary, dtype=torch.float64)
        for row, p in enumerate(params):
            self._check_tokens("logit_bias", p.logit_bias or ())
            self._check_tokens("allowed_token_ids", p.allowed_token_ids or ())
            for token, value in (p.logit_bias or {}).items():
                bias[row, token] += value
            if p.allowed_token_ids is not None:
                banned = torch.ones(self.vocabulary, dtype=torch.bool)
                banned[list(p.allowed_token_ids)] = False
                bias[row, banned] = NEVER
            if bool(bias[row].isneginf().all()):
                raise ParamsError("logit_bias and allowed_token_ids forbid every token: allow one.")
        return bias.to(self.device)

    def _check_tokens(self, name: str, tokens: Iterable[int]) -> None:
        for token in tokens:
            if not 0 <= token < self.vocabulary:
                raise ParamsError(
                    f"{name} names token {token}; the vocabulary has 0 to {self.vocabulary - 1}."
                )

    # -- options that look back ----------------------------------------------------------------

    def _penalised(self, scores: Tensor, branches: Branches, history: History) -> Tensor:
        output = self._outputs(history.outputs)[:, None, :].repeat(1, scores.shape[1], 1)
        # What stands where `valid` is false may be anything, and a smaller vocabulary than the
        # target's may lack a token.
        known = branches.valid & (branches.tokens < self.vocabulary)
        tokens = branches.tokens.where(known, torch.zeros_like(branches.tokens))
        output.scatter_add_(2, tokens, known.to(output.dtype))
        if self._repetition is not None:
            seen = (output > 0) | (self._prompts(history.prompts)[:, None, :] > 0)
            penalty = self._repetition.to(scores.dtype)
            scaled = torch.where(scores < 0, scores * penalty, scores / penalty)
            scores = torch.where(seen, scaled, scores)
        if self._frequency is not None:
            scores = scores - self._frequency.to(scores.dtype) * output.to(scores.dtype)
        if self._presence is not None:
            scores = scores - self._presence.to(scores.dtype) * (output > 0).to(scores.dtype)
        return scores

    def _goes_by_node(self, row: int, history: History) -> bool:
        short = len(history.outputs[row]) < (self.rows[row].params.min_tokens or 0)
        processors = self.rows[row].params.logits_processors
        return bool(self._bad_words[row] or (short and self._end_ids[row]) or processors)

    def _constrained(
        self, scores: Tensor, row: int, branches: Branches, history: History
    ) -> Tensor:
        """Returns the scores ``[M, V]`` of one row after what is decided node by node."""
        table = zip(branches.tokens[row].tolist(), branches.valid[row].tolist(), strict=True)
        paths = [list(compress(tokens, valid)) for tokens, valid in table]
        scores = scores.masked_fill(self._banned(row, paths, history), NEVER)
        if self.rows[row].params.logits_processors:
            scores = self._processed(scores, row, paths, history)
        return self._passable(scores, row, paths)

    def _passable(self, scores: Tensor, row: int, paths: list[list[int]]) -> Tensor:
        """Returns the scores ``[M, V]``, all equal where every token is forbidden.

        At the root that is the user's contradiction, and an error. A drafted node may be such an
        end when it is one that the target never reaches (a grammar's processor after a wrong
        token): its law then does not matter, but it has to be one.
        """
        dead = scores.isneginf().all(-1)
        ends = [node for node, is_dead in enumerate(dead.tolist()) if is_dead]
        if any(not paths[node] for node in ends):
            raise Contradiction(row)
        self.dead_ends[row] = ends
        return scores.masked_fill(dead[:, None], 0.0)

    def _banned(self, row: int, paths: list[list[int]], history: History) -> Tensor:
        """``[M, V]`` bool: what min_tokens and bad_words forbid."""
        words = self._bad_words[row]
        prompt, output = history.prompts[row], history.outputs[row]
        reach = max((len(word) for word in words), default=0)
        tail = [*prompt[max(0, len(prompt) - reach) :], *output[max(0, len(output) - reach) :]]
        banned = torch.zeros(len(paths), self.vocabulary, dtype=torch.bool)
        for node, path in enumerate(paths):
            if len(output) + len(path) < (self.rows[row].params.min_tokens or 0):
                banned[node, self._end_ids[row]] = True
            past = tail + path
            for *start, last in words:
                if not start or past[-len(start) :] == start:
                    banned[node, last] = True
        return banned.to(self.device)

    def _processed(
        self, scores: Tensor, row: int, paths: list[list[int]], history: History
    ) -> Tensor:
        committed = [*history.prompts[row], *history.outputs[row]]
        nodes = []
        for node, path in enumerate(paths):
            ids = torch.tensor([committed + path], dtype=torch.long, device=self.device)
            # A processor may write into what it is given, and the logits are not its own.
            node_scores = scores[node][None].clone()
            for processor in self.rows[row].params.logits_processors:
                node_scores = processor(ids, node_scores)
            nodes.append(node_scores[0])
        return torch.stack(nodes).to(scores.dtype)

    # -- temperature and truncation ------------------------------------------------------------

    def _truncated(self, scores: Tensor) -> Tensor:
        if self._temperature is not None:
            scores = scores / self._temperature.to(scores.dtype)
        if self._top_k is not None:
            scores = keep_top_k(scores, self._top_k, self._largest_k)
        if self._top_p is not None:
            scores = keep_top_p(scores, self._top_p)
        if self._min_p is not None:
            scores = keep_min_p(scores, self._min_p)
        if self._typical_p is not None:
            scores = keep_typical(scores, self._typical_p)
        return scores.softmax(-1)


def _one_hot(scores: Tensor) -> Tensor:
    best = scores.argmax(-1, keepdim=True)
    return torch.zeros_like(scores).scatter_(-1, best, 1.0)
