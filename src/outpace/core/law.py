"""Logits and history to a law over the vocabulary: the one place, for target and drafter alike.

p = law(target logits), q = law(drafter logits), each row under its own request's options and each
node under the history that it would have if it were reached. Whatever the drafter proposes and the
verifier checks is a law made here, so the two can never be warped differently.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import compress

import torch
from torch import Tensor

from outpace.core.faults import Contradiction, NotFinite, RowFault
from outpace.core.laws.constraints import Constraints, History, RowOptions
from outpace.core.laws.highest import highest
from outpace.core.laws.pieces import largest, pieces
from outpace.core.laws.token_counts import TokenCounts
from outpace.core.laws.truncation import NEVER, keep_min_p, keep_top_k, keep_top_p, keep_typical
from outpace.errors import ParamsError

__all__ = ["Branches", "Contradiction", "History", "LawMaker", "RowFault", "RowOptions"]

_OFF: Mapping[str, Sequence[float | None]] = {
    "temperature": (0, 1),
    "repetition_penalty": (None, 1),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
}
"""Numbers that leave the scores as they are."""


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


class LawMaker:
    """Makes the laws of B rows; build a new one when the rows change.

    What it keeps from call to call is how often each row's committed tokens occur.

    Raises ``ParamsError`` for options that name tokens outside the vocabulary and, when called, a
    `RowFault` for a row whose committed history has no law: its options leave it no token to go on
    with (`Contradiction`), its scores are not finite numbers, or a logits processor fails.

    >>> from outpace.core.params import SamplingParams
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
        self._waits = self.device.type == "cpu"
        """Whether numbers are looked at while laws are made: elsewhere that would wait for the
        device."""
        params = [row.params for row in self.rows]
        self.all_greedy = all(p.greedy for p in params)
        self.any_greedy = any(p.greedy for p in params)
        self._temperature = self._column([p.temperature or 1.0 for p in params], off=1.0)
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
        every = (Constraints(at, row, vocabulary, self.device) for at, row in enumerate(self.rows))
        self._constraints = [constraints for constraints in every if constraints.possible]
        self._greedy = torch.tensor([p.greedy for p in params], device=self.device)
        self._looks_back = (
            self._repetition is not None
            or self._presence is not None
            or self._frequency is not None
        )
        self._leaves_scores_alone = self._bias is None and not (
            self._looks_back or self._constraints
        )
        """Whether no option changes the scores before temperature and truncation."""
        truncations = (self._top_k, self._top_p, self._min_p, self._typical_p)
        self._softmax_alone = self._leaves_scores_alone and all(one is None for one in truncations)
        """Whether no option does more than to divide the scores by a temperature."""
        self._dead_ends: dict[int, dict[int, RowFault]] = {}
        self._silent: set[int] | None = None
        """While laws are a drafter's: the rows in which its root has none. None: they are not."""
        self._unread: list[tuple[Tensor, Tensor, Branches]] = []
        """Laws that nobody has looked at: the highest scores, the logits and the nodes of each."""
        self._prompts, self._outputs = (
            TokenCounts(len(self.rows) if self._looks_back else 0, vocabulary, self.device)
            for _ in range(2)
        )

    def __call__(self, logits: Tensor, branches: Branches, history: History) -> Tensor:
        """Returns the laws ``[B, M, V]`` of the nodes; each sums to 1.

        logits: ``[B, M, V']``, V' >= V (rows beyond the vocabulary are padding and are cut).
        float64 logits give float64 laws, all others float32.
        """
        self._begin()
        return self._laws(logits, branches, history, self._law)

    def best(self, logits: Tensor, branches: Branches, history: History) -> Tensor:
        """Returns ``[B, M]``, the token of each node's law where all rows are greedy."""
        self._begin()
        if self._leaves_scores_alone and self._is_small(logits):
            values, tokens = highest(self._cut(logits))
        else:
            found = [highest(scores) for scores in self._adjusted(logits, branches, history)]
            values, tokens = (_joined(list(each)) for each in zip(*found, strict=True))
        self._check(values, logits, branches)
        return tokens

    def reported(self, logits: Tensor, branches: Branches, history: History) -> Tensor:
        """Returns ``[B, M, V]`` log-probabilities to report, those of the `soft` laws."""
        return self.soft(logits, branches, history).log_()

    def soft(self, logits: Tensor, branches: Branches, history: History) -> Tensor:
        """Returns the laws ``[B, M, V]``, those of greedy rows before the argmax."""
        return self._laws(logits, branches, history, self._soft)

    def adjusted(self, logits: Tensor, branches: Branches, history: History) -> Tensor:
        """Returns the scores ``[B, M, V]`` before temperature and truncation."""
        scores = _joined(list(self._adjusted(logits, branches, history)))
        self._check(scores.amax(-1), logits, branches)
        return scores

    # -- nodes without a law -------------------------------------------------------------------

    @property
    def dead_ends(self) -> Mapping[int, Mapping[int, RowFault]]:
        """By row, the drafted nodes of the last laws that have none, each with the reason.

        A drafted node may be such an end if the target never reaches it, as after a token that a
        grammar does not know. Its law then does not matter, but it has to be one: it is even.
        Where the root has no law, the call raises the `RowFault`; on a device other than the CPU,
        which is not waited for, reading this property does.
        """
        unread, self._unread = self._unread, []
        for given in unread:
            self._find_faults(*given)
        # Drafters ask for further laws in the same round: what was found must not change by that.
        return {row: dict(nodes) for row, nodes in self._dead_ends.items()}

    @contextmanager
    def drafting(self) -> Iterator[None]:
        """Makes the laws of one drafter inside.

        Its vocabulary may lack every token that a row's options allow. That is no fault of the row:
        the target can go on. So the law at the root is even, as at a dead end, and the row has
        nothing to draft (`silenced`).
        """
        before, self._silent = self._silent, set()
        try:
            yield
        finally:
            self._silent = before

    def silenced(self, counts: Sequence[int]) -> list[int]:
        """Returns how many tokens each row drafts: ``counts``, but 0 where the drafter's root has
        no law, as far as that is known without waiting for the device."""
        silent = self._silent or ()
        return [0 if row in silent else count for row, count in enumerate(counts)]

    def _begin(self) -> None:
        self._unread = []
        self._dead_ends = {}

    def _check(self, peaks: Tensor, logits: Tensor, branches: Branches) -> bool:
        """Raises the fault of a row whose committed text has no law; returns whether drafted nodes
        may have none.

        peaks: ``[B, M]``, the highest score of each node. It is a finite number where there is a
        law, since it is not a number where any score is not.
        """
        if not self._waits:
            self._unread.append((peaks, logits, branches))
            return True
        if math.isfinite(float(peaks if peaks.numel() == 1 else peaks.sum())):
            return False
        self._find_faults(peaks, logits, branches)
        return True

    def _find_faults(self, peaks: Tensor, logits: Tensor, branches: Branches) -> None:
        for row, node in (~peaks.isfinite()).nonzero().tolist():
            fault = self._fault(row, float(peaks[row, node]), logits[row, node])
            if not bool(branches.valid[row, node].any()):
                self._at_root(fault)
            self._dead_ends.setdefault(row, {}).setdefault(node, fault)

    def _at_root(self, fault: RowFault) -> None:
        """Raises the fault of a root, unless it is a drafter's that has no token to offer."""
        if self._silent is None or isinstance(fault, NotFinite):
            raise fault
        self._silent.add(fault.row)

    def _fault(self, row: int, peak: float, logits: Tensor) -> RowFault:
        """Why a node has no law. logits: ``[V']``, what the model made of it."""
        top = float(logits[: self.vocabulary].amax())
        if not math.isfinite(top):
            return NotFinite(
                row,
                f"the model's scores of the next token are not finite numbers (the highest is "
                f"{top}): its weights are damaged, or its dtype overflows; try dtype='float32'.",
            )
        if peak == NEVER:
            return Contradiction(row)
        params = self.rows[row].params
        values = {name: getattr(params, name) for name in _OFF}
        given = [f"{name}={value}" for name, value in values.items() if value not in _OFF[name]]
        given += [name for name in ("logit_bias", "logits_processors") if getattr(params, name)]
        return NotFinite(
            row,
            "the scores of the next token are not finite numbers under these options: choose "
            f"milder values of {', '.join(given)}.",
        )

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
                here = Branches(branches.tokens[:, part], branches.valid[:, part])
            if scores.dtype not in (torch.float32, torch.float64):
                scores = scores.float()
            if self._bias is not None:
                scores = scores + self._bias[:, None, :].to(scores.dtype)
            if self._looks_back:
                scores = self._penalised(scores, here, history)
            if active:
                scores = scores.clone()
            for constraints in active:
                row = constraints.row
                listed = zip(here.tokens[row].tolist(), here.valid[row].tolist(), strict=True)
                paths = [list(compress(tokens, valid)) for tokens, valid in listed]
                faults = constraints.apply(scores[row], paths, history)
                for node, fault in faults.items():
                    if not paths[node]:
                        self._at_root(fault)
                    self._dead_ends.setdefault(row, {})[part.start + node] = fault
            yield scores

    def _is_small(self, logits: Tensor) -> bool:
        """Whether all nodes are one piece of work, in a type that laws are made in."""
        whole = logits.shape[0] * logits.shape[1] * self.vocabulary <= largest(logits.device)
        return whole and logits.dtype in (torch.float32, torch.float64)

    def _cut(self, logits: Tensor) -> Tensor:
        """The logits ``[B, M, V]`` without the padding of the vocabulary."""
        return logits if logits.shape[-1] == self.vocabulary else logits[..., : self.vocabulary]

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

    # -- laws ----------------------------------------------------------------------------------

    def _laws(
        self,
        logits: Tensor,
        branches: Branches,
        history: History,
        law_of: Callable[[Tensor], tuple[Tensor, Tensor]],
    ) -> Tensor:
        """Returns ``[B, M, V]``: the laws that ``law_of`` makes of all nodes' scores.

        law_of: scores ``[B, m, V]`` to laws of the same shape, and for each node ``[B, m]`` its
        highest score, or any number that is finite just where that is. Few nodes are handed over
        at a time, so that all that is ever held of the size of the laws are the laws.
        """
        rows, nodes = logits.shape[:2]
        if self._leaves_scores_alone and self._is_small(logits):
            return self._checked(*law_of(self._cut(logits)), logits, branches)
        made, peaks, begin = None, [], 0
        for scores in self._adjusted(logits, branches, history):
            law, top = law_of(scores)
            peaks.append(top)
            end = begin + law.shape[1]
            if end - begin == nodes:
                made = law
                break
            if made is None:
                made = law.new_empty(rows, nodes, self.vocabulary)
            made[:, begin:end] = law
            begin = end
        assert made is not None
        return self._checked(made, _joined(peaks), logits, branches)

    def _checked(self, made: Tensor, peaks: Tensor, logits: Tensor, branches: Branches) -> Tensor:
        """The laws ``made`` [B, M, V], even ones at drafted nodes that have none.

        peaks: ``[B, M]``, as ``law_of`` gives them in `_laws`.
        """
        if self._check(peaks, logits, branches):
            lawless = ~peaks.isfinite()[..., None]
            made = torch.where(lawless, 1 / self.vocabulary, made)
        return made

    def _law(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        if self.all_greedy:
            peaks, best = highest(scores)
            return _one_hot(scores, best[..., None]), peaks
        law, peaks = self._soft(scores)
        if self.any_greedy:
            certain = _one_hot(scores, highest(scores)[1][..., None])
            law = torch.where(self._greedy[:, None, None], certain, law)
        return law, peaks

    def _soft(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        if self._temperature is not None:
            scores = scores / self._temperature.to(scores.dtype)
        if self._softmax_alone:
            law = scores.softmax(-1)
            # Where a score is not finite, softmax makes every probability NaN: one of them tells.
            return law, law[..., 0].clone()  # not a view, which would keep the law alive
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
    """The laws ``[..., V]`` that give the token ``best`` [..., 1] with certainty."""
    return torch.zeros_like(scores).scatter_(-1, best, 1.0)
