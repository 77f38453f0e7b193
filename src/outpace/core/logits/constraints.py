"""Constraints that depend on a node's history: min_tokens, bad_words, masks, logits processors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from outpace.core.faults import MaskFault, ProcessorFault, RowFault
from outpace.core.logits.masks import TokenMask
from outpace.core.logits.truncation import NEG_INF
from outpace.core.params import LogitsProcessor, SamplingParams


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
    mask: TokenMask | None = None
    """What may come next, such as a grammar. No other row has the same one."""

    def for_another_row(self) -> RowOptions:
        """Returns the same options, with a mask of its own."""
        return self if self.mask is None else replace(self, mask=self.mask.copy())

    # As tensors, made once: distributions are made anew whenever a row joins or leaves the batch.
    @cached_property
    def biased(self) -> tuple[Tensor, Tensor]:
        """The tokens of ``logit_bias`` and what each gets."""
        bias = self.params.logit_bias or {}
        tokens = torch.tensor(list(bias), dtype=torch.long)
        return tokens, torch.tensor(list(bias.values()), dtype=torch.float64)

    @cached_property
    def allowed(self) -> Tensor | None:
        """The tokens of ``allowed_token_ids``, None where all are allowed."""
        tokens = self.params.allowed_token_ids
        return None if tokens is None else torch.tensor(list(tokens), dtype=torch.long)


class Constraints:
    """Changes the scores of one row's nodes, each under its own history."""

    def __init__(
        self, row: int, options: RowOptions, vocabulary: int, device: torch.device
    ) -> None:
        """row: its number in the batch."""
        self.row = row
        self._device = device
        self._vocabulary = vocabulary
        self._min_tokens = options.params.min_tokens or 0
        self._processors = options.params.logits_processors
        self._mask = options.mask
        # Tokens beyond the vocabulary cannot be generated, so nothing is left to forbid.
        self._end_ids = [token for token in options.end_ids if token in range(vocabulary)]
        bad_words = [word for word in options.bad_words_ids if word[-1] < vocabulary]
        self._bad_tokens = torch.tensor([word[0] for word in bad_words if len(word) == 1])
        # By the token before the last one, so that few are looked at after each node.
        self._bad_words: dict[int, list[tuple[int, ...]]] = {}
        for word in bad_words:
            if len(word) > 1:
                self._bad_words.setdefault(word[-2], []).append(word)
        self._reach = max(map(len, bad_words), default=0)

    @property
    def possible(self) -> bool:
        """Whether there is any history under which the row is constrained."""
        return bool(self._forbids_words or self._min_tokens or self._processors or self._mask)

    @property
    def _forbids_words(self) -> bool:
        return bool(self._bad_words) or len(self._bad_tokens) > 0

    def active(self, history: History) -> bool:
        """Returns whether the row may be constrained after this history."""
        short = len(history.outputs[self.row]) < self._min_tokens
        constrained = self._forbids_words or (short and self._end_ids)
        return bool(constrained or self._processors or self._mask)

    def apply(
        self, scores: Tensor, paths: Sequence[Sequence[int]], history: History
    ) -> dict[int, RowFault]:
        """Changes the row's scores ``[M, V]`` in place, and returns the faults of its nodes: those
        at which the mask or a processor failed. They are left with nothing but zeros.

        paths: the drafted tokens that lead to each node.
        """
        faults: dict[int, RowFault] = {}
        outside = self._outside(paths, history, faults)
        for banned in (self._forbidden(paths, history), outside):
            if banned is not None:
                scores.masked_fill_(banned, NEG_INF)
        for node in faults:
            scores[node] = 0.0
        if not self._processors:
            return faults
        committed = [*history.prompts[self.row], *history.outputs[self.row]]
        for node, path in enumerate(paths):
            if node in faults:
                continue
            ids = torch.tensor([[*committed, *path]], dtype=torch.long, device=self._device)
            try:
                scores[node] = self._processed(ids, scores[node][None].clone())[0]
                if outside is not None:  # whatever a processor allows
                    scores[node].masked_fill_(outside[node], NEG_INF)
            except ProcessorFault as fault:
                faults[node] = fault
                scores[node] = 0.0
        return faults

    def banned(self, paths: Sequence[Sequence[int]], history: History) -> Tensor:
        """``[M, V]`` bool: what min_tokens, bad_words and the mask forbid. Raises `MaskFault` where
        the mask fails."""
        found = torch.zeros(len(paths), self._vocabulary, dtype=torch.bool, device=self._device)
        for banned in (self._forbidden(paths, history), self._outside(paths, history, None)):
            found = found if banned is None else found | banned
        return found

    def _outside(
        self,
        paths: Sequence[Sequence[int]],
        history: History,
        faults: dict[int, RowFault] | None,
    ) -> Tensor | None:
        """``[M, V]`` bool: what the mask forbids; None without one. faults: takes those of the
        nodes at which it fails; unset: they are raised."""
        if self._mask is None:
            return None
        allowed = self._allowed(self._mask, history.outputs[self.row], paths, faults)
        return ~allowed.to(self._device)

    def _forbidden(self, paths: Sequence[Sequence[int]], history: History) -> Tensor | None:
        """``[M, V]`` bool: what min_tokens and bad_words forbid; None where neither is asked."""
        if not (self._forbids_words or self._min_tokens):
            return None
        prompt, output = history.prompts[self.row], history.outputs[self.row]
        reach = self._reach
        tail = [*prompt[max(0, len(prompt) - reach) :], *output[max(0, len(output) - reach) :]]
        banned = torch.zeros(len(paths), self._vocabulary, dtype=torch.bool)
        if len(self._bad_tokens):
            banned[:, self._bad_tokens] = True
        for node, path in enumerate(paths):
            if len(output) + len(path) < self._min_tokens:
                banned[node, self._end_ids] = True
            past = [*tail, *path]
            near = self._bad_words.get(past[-1], ()) if past else ()
            ended = [last for *start, last in near if past[-len(start) :] == start]
            if ended:
                banned[node, ended] = True
        return banned.to(self._device)

    def _allowed(
        self,
        mask: TokenMask,
        output: Sequence[int],
        paths: Sequence[Sequence[int]],
        faults: dict[int, RowFault] | None,
    ) -> Tensor:
        """What the mask allows. One that fails is asked again node by node, since the text may
        never come to the node at which it does. Nor does it come after that node."""
        try:
            return mask.allowed(output, paths)
        except Exception as error:
            if faults is None:
                raise MaskFault(self.row, error) from error
        found = torch.ones(len(paths), self._vocabulary, dtype=torch.bool)
        failed: dict[tuple[int, ...], RowFault] = {}
        for node, path in enumerate(paths):
            before = (failed.get(tuple(path[:length])) for length in range(len(path)))
            fault = next(filter(None, before), None)
            if fault is None:
                try:
                    found[node] = mask.allowed(output, [path])[0]
                except Exception as error:
                    fault = failed[tuple(path)] = MaskFault(self.row, error)
                    fault.__cause__ = error
            if fault is not None:
                faults[node] = fault
        return found

    def _processed(self, ids: Tensor, scores: Tensor) -> Tensor:
        """Returns the scores ``[1, V]`` after all processors; a `ProcessorFault` if one fails."""
        for processor in self._processors:
            given = scores
            try:
                scores = processor(ids, given)
            except Exception as error:
                raise ProcessorFault.raised(self.row, processor, error) from error
            self._check(processor, scores)
        return scores

    def _check(self, processor: LogitsProcessor, scores: object) -> None:
        wanted = f"return the scores [1, {self._vocabulary}] that it was given, changed"
        if not isinstance(scores, Tensor):
            what = "nothing" if scores is None else f"a {type(scores).__name__}"
            raise ProcessorFault.returned(self.row, processor, what, wanted)
        if scores.shape != (1, self._vocabulary):
            what = f"scores of the shape {list(scores.shape)}"
            raise ProcessorFault.returned(self.row, processor, what, wanted)
        highest = scores.amax()
        if bool(highest.isnan()) or bool(highest.isposinf()):
            wanted = "return finite scores, and -inf for what it forbids"
            what = f"scores that are no numbers: the highest is {float(highest)}"
            raise ProcessorFault.returned(self.row, processor, what, wanted)
