"""The logits processors of a transformers ``generate`` call, for one row at a time.

``generate`` builds its processors for the whole batch and calls them once per token. Here they are
called for each drafted token of each row, with the tokens that stand before it. So a processor has
to depend on nothing but the tokens and scores that it is given.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import CellType, FunctionType
from typing import Any

import torch
from torch import Tensor
from transformers.generation import logits_process as hf

from outpace.core.faults import name_of
from outpace.core.params import SamplingParams
from outpace.errors import ConfigError, ParamsError

Processor = Callable[[Tensor, Tensor], Tensor]

REFUSED: dict[type, str] = {
    hf.UnbatchedClassifierFreeGuidanceLogitsProcessor: "runs the model itself, once per token",
    hf.ClassifierFreeGuidanceLogitsProcessor: "combines pairs of rows",
    hf.SynthIDTextWatermarkLogitsProcessor: "keeps a state of the tokens that it has been shown",
    hf.WhisperNoSpeechDetection: "runs the model itself and keeps what it found",
    hf.AlternatingCodebooksLogitsProcessor: "is for audio models",
    hf.BarkEosPrioritizerLogitsProcessor: "is for audio models",
    hf.DiaClassifierFreeGuidanceLogitsProcessor: "is for audio models",
    hf.DiaEOSChannelFilterLogitsProcessor: "is for audio models",
    hf.DiaEOSDelayPatternLogitsProcessor: "is for audio models",
}
"""Processors of transformers that are no function of one row's tokens and scores, and why."""

WARPERS: tuple[tuple[type, str, str], ...] = (
    (hf.TemperatureLogitsWarper, "temperature", "temperature"),
    (hf.TopKLogitsWarper, "top_k", "top_k"),
    (hf.TopPLogitsWarper, "top_p", "top_p"),
    (hf.MinPLogitsWarper, "min_p", "min_p"),
    (hf.TypicalLogitsWarper, "typical_p", "mass"),
)
"""Class, option of `SamplingParams`, attribute that holds its value; in the order in which
``generate`` appends them, which is the order of `core.logits_pipeline`."""


def check(processors: Sequence[Processor], ids: Tensor, vocabulary: int) -> None:
    """Raises ``ConfigError`` for a processor that is no function of one row's tokens and scores.

    Processors of transformers are known by their class. Others are tried out on a copy.

    ids: ``[B, T]``, the prompts of all rows that the processors are meant for. vocabulary: scores
    of a row.
    """
    for processor in processors:
        reason = REFUSED.get(type(processor))
        if reason is None and not type(processor).__module__.startswith("transformers."):
            reason = _fault(processor, ids, vocabulary)
        if reason is not None:
            raise ConfigError(
                f"logits processor {name_of(processor)} {reason}, so that it cannot judge drafted "
                "tokens one row at a time: leave it out, or make it depend on nothing but the "
                "tokens and scores of the row that it is given."
            )


def _fault(processor: Processor, ids: Tensor, vocabulary: int) -> str | None:
    """Returns what shows that the processor cannot be called for one row alone, or again."""
    trial = apart(processor)
    if trial is None:
        return None
    scores = torch.linspace(-1, 1, vocabulary, device=ids.device)[None]
    if forgets(trial, ids[:1], scores):
        return "gives other scores when it is called again"
    rows = range(len(ids))
    alone = [answer(of_row(trial, row, len(ids)), ids[row : row + 1], scores) for row in rows]
    for made in alone:
        if made is not None and made.shape != scores.shape:
            return f"answers one row with scores of shape {list(made.shape)}"
    batch = answer(trial, ids, scores.expand(len(ids), -1))
    if batch is None or all(same(alone[row], batch[row : row + 1]) for row in rows):
        return None
    return "treats a row of a batch otherwise than the same row alone"


def split(processors: Sequence[Processor]) -> tuple[list[Processor], dict[str, Any]]:
    """Returns the processors that have to be called, and options that replace the others.

    The temperature and the truncations that ``generate`` puts at the end become options of
    `SamplingParams`, which `core.logits_pipeline` applies to all rows and positions at once.

    >>> split([hf.TemperatureLogitsWarper(0.5), hf.TopKLogitsWarper(7)])
    ([], {'top_k': 7, 'temperature': 0.5})
    """
    left = list(processors)
    while left and type(left[-1]) is hf.LogitNormalization:  # changes scores, not the distribution
        left.pop()
    options: dict[str, Any] = {}
    for kind, option, attribute in reversed(WARPERS):
        if left and type(left[-1]) is kind and _ordinary(left[-1]):
            value = getattr(left[-1], attribute)
            if _is_taken(option, value):
                options[option] = value
                left.pop()
    return left, options


def _is_taken(option: str, value: Any) -> bool:
    """Whether `SamplingParams` takes a value: ``generate`` allows a top_p of 0, for one."""
    try:
        SamplingParams(**{option: value})
    except ParamsError:
        return False
    return True


def _ordinary(warper: Any) -> bool:
    """Whether a truncation removes tokens entirely and may leave a single one, as
    `core.logits_pipeline`'s."""
    removes = getattr(warper, "filter_value", float("-inf")) == float("-inf")
    return removes and getattr(warper, "min_tokens_to_keep", 1) == 1


def of_row(processor: Processor, row: int, rows: int) -> Processor:
    """Returns the processor as it acts on one row of the batch that it was built for."""
    if isinstance(processor, hf.RepetitionPenaltyLogitsProcessor):
        ignored = processor.prompt_ignore_length
        if isinstance(ignored, Tensor):
            return _with(processor, prompt_ignore_length=ignored[row : row + 1])
    if isinstance(processor, hf.EncoderRepetitionPenaltyLogitsProcessor):
        ids = processor.encoder_input_ids
        at = row * ids.shape[0] // rows
        return _with(processor, encoder_input_ids=ids[at : at + 1])
    if isinstance(processor, hf.EncoderNoRepeatNGramLogitsProcessor):
        at = row * processor.batch_size // rows
        return _with(
            processor, batch_size=1, generated_ngrams=processor.generated_ngrams[at : at + 1]
        )
    if isinstance(processor, hf.PrefixConstrainedLogitsProcessor):
        allowed = processor._prefix_allowed_tokens_fn
        return _with(processor, _prefix_allowed_tokens_fn=lambda _, ids: allowed(row, ids))
    return processor


def _with(processor: Any, **changes: Any) -> Processor:
    changed: Processor = copy.copy(processor)
    for name, value in changes.items():
        setattr(changed, name, value)
    return changed


@dataclass(frozen=True, eq=False)
class AsGenerate:
    """Shows a row's tokens as ``generate`` would: with their padding, on the device of the call.

    The padding matters: lengths that a processor or criterion was built with (min_length,
    max_length, where the prompt ends) count it.
    """

    padded: Tensor  # [T] the row of input_ids
    skip: int  # prompt tokens without padding

    def __call__(self, ids: Tensor) -> Tensor:
        """Returns ``[1, T + new]``. ids: ``[1, skip + new]``, without padding."""
        return torch.cat([self.padded[None], ids[:, self.skip :].to(self.padded.device)], 1)


@dataclass(frozen=True, eq=False)
class RowProcessors:
    """The processors of one row, one after another, as one."""

    processors: Sequence[Processor]
    view: AsGenerate

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        """Returns scores ``[1, V]``; ``ConfigError`` for an answer of another shape.

        ids: ``[1, T]``, without padding; scores: ``[1, V]``.
        """
        shown = self.view(ids)
        made = scores.to(shown.device)
        for processor in self.processors:
            made = processor(shown, made)
            if not isinstance(made, Tensor) or made.shape != scores.shape:
                raise ConfigError(
                    f"logits processor {name_of(processor)} answered one row with "
                    f"{described(made)} instead of scores of shape {list(scores.shape)}: make it "
                    "return scores for the row that it is given."
                )
        return made.to(scores.device)


# -- trying out a caller's own function or object before a text depends on it ----------------------


def described(made: Any) -> str:
    """Returns an answer's shape in words, or the answer if it is no tensor."""
    return f"a tensor of shape {list(made.shape)}" if isinstance(made, Tensor) else repr(made)


def apart(called: Any) -> Any | None:
    """Returns a copy that can be called without changing the original, or None."""
    try:
        if not isinstance(called, FunctionType):
            return copy.deepcopy(called)
        # deepcopy returns a function as it is, with the variables around it that it may change.
        cells = [CellType(copy.deepcopy(cell.cell_contents)) for cell in called.__closure__ or ()]
        # Its default values may be changed too: a list, say, in which it notes what it has seen.
        defaults, named = copy.deepcopy((called.__defaults__, called.__kwdefaults__))
        made = FunctionType(
            called.__code__, called.__globals__, called.__name__, defaults, tuple(cells)
        )
        made.__kwdefaults__ = named
        return made
    except Exception:  # what cannot be copied cannot be tried without changing it
        return None


def answer(called: Callable[..., Any], ids: Tensor, scores: Tensor | None) -> Tensor | None:
    """Returns what is answered, None instead of an error: the history of a trial may be one that
    is never met."""
    try:
        made: Tensor = torch.as_tensor(called(ids.clone(), None if scores is None else scores + 0))
    except Exception:
        return None
    return made


def same(one: Tensor | None, other: Tensor | None) -> bool:
    """Whether two answers are equal, apart from rounding."""
    if one is None or other is None:
        return one is other
    return one.shape == other.shape and torch.allclose(
        one.double(), other.double(), rtol=1e-4, atol=1e-6, equal_nan=True
    )


def forgets(called: Callable[..., Any], ids: Tensor, scores: Tensor | None) -> bool:
    """Whether the same questions get other answers when they are asked again in another order."""
    longer = [torch.cat([ids, ids[:, -1:].expand(-1, more)], 1) for more in range(3)]
    first = [answer(called, history, scores) for history in longer]
    again = [answer(called, history, scores) for history in reversed(longer)]
    return not all(map(same, first, reversed(again)))
