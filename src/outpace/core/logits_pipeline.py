"""Logits and history to a distribution over the vocabulary: the one place, for target and drafter
alike.

p = distribution(target logits), q = distribution(drafter logits), each row under its own request's
options and each node under the history that it would have if it were reached. Whatever the drafter
proposes and the verifier checks is a distribution made here, so the two can never be warped
differently.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from outpace.core.faults import Contradiction, RowFault
from outpace.core.logits.branches import Branches
from outpace.core.logits.constraints import Constraints, History, RowOptions
from outpace.core.logits.dead_ends import DeadEnds
from outpace.core.logits.highest import highest
from outpace.core.logits.penalties import Penalties, column
from outpace.core.logits.pieces import largest, pieces
from outpace.core.logits.truncation import NEG_INF, keep_min_p, keep_top_k, keep_top_p, keep_typical
from outpace.errors import ParamsError

__all__ = ["Branches", "Contradiction", "History", "LogitsPipeline", "RowFault", "RowOptions"]


def static_bias(rows: Sequence[RowOptions], vocabulary: int) -> Tensor | None:
    """Returns ``[B, V]``: what logit_bias and allowed_token_ids add to the scores of each row, on
    the host; None where no row has such options.

    Raises ``ParamsError`` for tokens outside the vocabulary, and where no token is left.
    """
    if not any(row.params.logit_bias or row.allowed is not None for row in rows):
        return None
    bias = torch.zeros(len(rows), vocabulary, dtype=torch.float64)
    for own, options in zip(bias, rows, strict=True):
        (tokens, values), allowed = options.biased, options.allowed
        _check_tokens("logit_bias", tokens, vocabulary)
        own[tokens] = values
        if allowed is not None:
            _check_tokens("allowed_token_ids", allowed, vocabulary)
            kept = own[allowed]
            own[:] = NEG_INF
            own[allowed] = kept
        if bool(own.isneginf().all()):
            raise ParamsError(
                "logit_bias and allowed_token_ids forbid every token: allow one."
            ).about("logit_bias")
    return bias


def _check_tokens(name: str, tokens: Tensor, vocabulary: int) -> None:
    outside = tokens[(tokens < 0) | (tokens >= vocabulary)]
    if len(outside):
        raise ParamsError(
            f"{name} names token {int(outside[0])}; the vocabulary has 0 to {vocabulary - 1}."
        ).about(name)


class LogitsPipeline:
    """Makes the distributions of B rows; build a new one when the rows change.

    Raises ``ParamsError`` for options that name tokens outside the vocabulary and, when called, a
    `RowFault` for a row whose committed history has no distribution: its options leave it no token
    to go on with (`Contradiction`), its scores are not finite numbers, or a logits processor fails.

    >>> from outpace.core.params import SamplingParams
    >>> options = RowOptions(SamplingParams(temperature=0).resolve({}))
    >>> pipeline = LogitsPipeline([options], vocabulary=3)
    >>> history = History([[0]], [[]])
    >>> pipeline(torch.tensor([[[0.1, 0.9, 0.0]]]), Branches.root(1), history).tolist()
    [[[0.0, 1.0, 0.0]]]
    """

    def __init__(
        self, rows: Sequence[RowOptions], vocabulary: int, device: torch.device | str = "cpu"
    ) -> None:
        self.rows = tuple(rows)
        self.vocabulary = vocabulary
        self.device = torch.device(device)
        self._waits = self.device.type == "cpu"
        """Whether numbers are looked at while distributions are made: elsewhere that would wait for
        the device."""
        params = [row.params for row in self.rows]
        self.all_greedy = all(p.greedy for p in params)
        self.any_greedy = any(p.greedy for p in params)
        self._temperature = column([p.temperature or 1.0 for p in params], 1.0, self.device)
        wanted = [k if (k := p.top_k or 0) > 0 else vocabulary for p in params]
        self._largest_k = max((k for k in wanted if k < vocabulary), default=vocabulary)
        self._top_k = self._integers(wanted)
        self._top_p = column([p.top_p for p in params], 1.0, self.device)
        self._min_p = column([p.min_p for p in params], 0.0, self.device)
        self._typical_p = column([p.typical_p for p in params], 1.0, self.device)
        self._penalties = Penalties(params, vocabulary, self.device)
        bias = static_bias(self.rows, vocabulary)
        self._bias = None if bias is None else bias.to(self.device)
        every = (Constraints(at, row, vocabulary, self.device) for at, row in enumerate(self.rows))
        self._constraints = [constraints for constraints in every if constraints.possible]
        self._greedy = torch.tensor([p.greedy for p in params], device=self.device)
        changing = self._bias is not None or self._penalties.wanted or self._constraints
        self._leaves_scores_alone = not changing
        """Whether no option changes the scores before temperature and truncation."""
        truncations = (self._top_k, self._top_p, self._min_p, self._typical_p)
        self._softmax_alone = self._leaves_scores_alone and all(one is None for one in truncations)
        """Whether no option does more than to divide the scores by a temperature."""
        self._ends = DeadEnds(self.rows, vocabulary, self._waits)

    def __call__(self, logits: Tensor, branches: Branches, history: History) -> Tensor:
        """Returns the distributions ``[B, M, V]`` of the nodes; each sums to 1.

        logits: ``[B, M, V']``, V' >= V (entries beyond the vocabulary are padding and are cut).
        float64 logits give float64 distributions, all others float32.
        """
        self._ends.begin()
        return self._probs(logits, branches, history, self._distribution)

    def argmax_tokens(self, logits: Tensor, branches: Branches, history: History) -> Tensor:
        """Returns ``[B, M]``, the token of each node's distribution where all rows are greedy."""
        self._ends.begin()
        if self._leaves_scores_alone and self._is_small(logits):
            values, tokens = highest(self._cut(logits))
        else:
            found = [highest(scores) for scores in self._adjusted(logits, branches, history)]
            values, tokens = (_joined(list(each)) for each in zip(*found, strict=True))
        self._ends.check(values, logits, branches)
        return tokens

    def compute_logprobs(self, logits: Tensor, branches: Branches, history: History) -> Tensor:
        """Returns ``[B, M, V]`` log-probabilities to report, before any argmax."""
        return self.softmax_probs(logits, branches, history).log_()

    def softmax_probs(self, logits: Tensor, branches: Branches, history: History) -> Tensor:
        """Returns the distributions ``[B, M, V]``, those of greedy rows before the argmax."""
        return self._probs(logits, branches, history, self._soft)

    def process_logits(self, logits: Tensor, branches: Branches, history: History) -> Tensor:
        """Returns the scores ``[B, M, V]`` before temperature and truncation."""
        scores = _joined(list(self._adjusted(logits, branches, history)))
        self._ends.check(scores.amax(-1), logits, branches)
        return scores

    # -- nodes without a distribution --------------------------------------------------------------

    @property
    def dead_ends(self) -> Mapping[int, Mapping[int, RowFault]]:
        """By row, the drafted nodes of the last distributions that have none, each with the reason.
        Their distributions do not matter, but they have to be some: they are even.

        Where the root has no distribution, the call raises the `RowFault`; on a device other than
        the CPU, which is not waited for, reading this property does.
        """
        return self._ends.found()

    @property
    def unread_dead_ends(self) -> Tensor | None:
        """Whether `dead_ends` would find any, as a bool on the device: it can be transferred with
        other numbers, so that nobody has to wait for the device twice. None on a CPU, where that is
        known already."""
        return self._ends.unread()

    def drafting(self) -> AbstractContextManager[None]:
        """Makes the distributions of one drafter inside. A row all of whose allowed tokens the
        drafter's vocabulary lacks has an even distribution at the root, and nothing to draft
        (`limit_draft_counts`)."""
        return self._ends.drafting()

    def limit_draft_counts(self, counts: Sequence[int]) -> list[int]:
        """Returns how many tokens each row drafts: ``counts``, but 0 where the drafter's root has
        no distribution, as far as that is known without waiting for the device."""
        return self._ends.limit_draft_counts(counts)

    # -- building ------------------------------------------------------------------------------

    def _integers(self, values: Sequence[int]) -> Tensor | None:
        if all(value >= self.vocabulary for value in values):
            return None
        clipped = [min(value, self.vocabulary) for value in values]
        return torch.tensor(clipped, device=self.device)[:, None, None]

    # -- scores --------------------------------------------------------------------------------

    def _adjusted(self, logits: Tensor, branches: Branches, history: History) -> Iterator[Tensor]:
        """Yields the scores ``[B, m, V]`` before temperature and truncation, for m nodes at a time
        and in their order. They may be the logits themselves, and nobody may write into them."""
        active = [each for each in self._constraints if each.active(history)]
        rows, nodes = logits.shape[:2]
        cut = self._cut(logits)
        for part in pieces(nodes, rows * self.vocabulary, logits.device):
            scores, here = cut, branches
            if part.stop - part.start < nodes:  # taking a part of so little takes its time, too
                scores = cut[:, part]
                here = branches.some(part)
            if scores.dtype not in (torch.float32, torch.float64):
                scores = scores.float()
            if self._bias is not None:
                scores = scores + self._bias[:, None, :].to(scores.dtype)
            if self._penalties.wanted:
                scores = self._penalties(scores, here, history)
            if active:
                scores = scores.clone()
            for constraints in active:
                paths = here.paths(constraints.row)
                faults = constraints.apply(scores[constraints.row], paths, history)
                for node, fault in faults.items():
                    self._ends.note(part.start + node, fault, at_root=not paths[node])
            yield scores

    def _is_small(self, logits: Tensor) -> bool:
        """Whether all nodes are one piece of work, in a type that distributions are made in."""
        whole = logits.shape[0] * logits.shape[1] * self.vocabulary <= largest(logits.device)
        return whole and logits.dtype in (torch.float32, torch.float64)

    def _cut(self, logits: Tensor) -> Tensor:
        """The logits ``[B, M, V]`` without the padding of the vocabulary."""
        return logits if logits.shape[-1] == self.vocabulary else logits[..., : self.vocabulary]

    # -- distributions -----------------------------------------------------------------------------

    def _probs(
        self,
        logits: Tensor,
        branches: Branches,
        history: History,
        distribution_of: Callable[[Tensor], tuple[Tensor, Tensor]],
    ) -> Tensor:
        """Returns ``[B, M, V]``: the distributions that ``distribution_of`` makes of all nodes'
        scores.

        distribution_of: scores ``[B, m, V]`` to distributions of the same shape, and for each node
        ``[B, m]`` its highest score, or any number that is finite just where that is. Few nodes are
        handed over at a time, so that all that is ever held of the size of the distributions are
        the distributions.
        """
        rows, nodes = logits.shape[:2]
        if self._leaves_scores_alone and self._is_small(logits):
            return self._checked(*distribution_of(self._cut(logits)), logits, branches)
        made, peaks, begin = None, [], 0
        for scores in self._adjusted(logits, branches, history):
            distribution, top = distribution_of(scores)
            peaks.append(top)
            end = begin + distribution.shape[1]
            if end - begin == nodes:
                made = distribution
                break
            if made is None:
                made = distribution.new_empty(rows, nodes, self.vocabulary)
            made[:, begin:end] = distribution
            begin = end
        assert made is not None
        return self._checked(made, _joined(peaks), logits, branches)

    def _checked(self, made: Tensor, peaks: Tensor, logits: Tensor, branches: Branches) -> Tensor:
        """The distributions ``made`` [B, M, V], even ones at drafted nodes that have none.

        peaks: ``[B, M]``, as ``distribution_of`` gives them in `_probs`.
        """
        if self._ends.check(peaks, logits, branches):
            impossible = ~peaks.isfinite()[..., None]
            made = torch.where(impossible, 1 / self.vocabulary, made)
        return made

    def _distribution(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        if self.all_greedy:
            peaks, best = highest(scores)
            return _one_hot(scores, best[..., None]), peaks
        distribution, peaks = self._soft(scores)
        if self.any_greedy:
            certain = _one_hot(scores, highest(scores)[1][..., None])
            distribution = torch.where(self._greedy[:, None, None], certain, distribution)
        return distribution, peaks

    def _soft(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        if self._temperature is not None:
            scores = scores / self._temperature.to(scores.dtype)
        if self._softmax_alone:
            distribution = scores.softmax(-1)
            # Where a score is not finite, softmax makes every probability NaN: one of them tells.
            return distribution, distribution[
                ..., 0
            ].clone()  # not a view, which would keep the distribution alive
        peaks = scores.amax(-1)
        if self._top_k is not None:
            scores = keep_top_k(scores, self._top_k, self._largest_k, self._waits)
        if self._top_p is not None:
            scores = keep_top_p(scores, self._top_p, self._waits)
        if self._min_p is not None:
            scores = keep_min_p(scores, self._min_p)
        if self._typical_p is not None:
            scores = keep_typical(scores, self._typical_p)
        return scores.softmax(-1), peaks


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """The parts ``[B, m, ...]`` of all nodes as one tensor; a single part as it is."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), 1)


def _one_hot(scores: Tensor, best: Tensor) -> Tensor:
    """The distributions ``[..., V]`` that give the token ``best`` [..., 1] with certainty."""
    return torch.zeros_like(scores).scatter_(-1, best, 1.0)
