"""The logits processors of a transformers ``generate`` call, for one row at a time.

``generate`` builds its processors for the whole batch and calls them once per token. Here each
drafted position of each row is judged with that position's own history, so that a processor has to
be a function of that history alone.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.generation import logits_process as hf

from outpace.errors import ConfigError

Processor = Callable[[Tensor, Tensor], Tensor]

REFUSED: dict[type, str] = {
    hf.UnbatchedClassifierFreeGuidanceLogitsProcessor: "runs the model itself, once per token",
    hf.ClassifierFreeGuidanceLogitsProcessor: "combines pairs of rows",
    hf.SynthIDTextWatermarkLogitsProcessor: "keeps a state of the tokens that it has been shown",
    hf.WhisperTimeStampLogitsProcessor: "is for speech models",
    hf.WhisperNoSpeechDetection: "is for speech models",
    hf.AlternatingCodebooksLogitsProcessor: "is for audio models",
    hf.BarkEosPrioritizerLogitsProcessor: "is for audio models",
    hf.DiaClassifierFreeGuidanceLogitsProcessor: "is for audio models",
    hf.DiaEOSChannelFilterLogitsProcessor: "is for audio models",
    hf.DiaEOSDelayPatternLogitsProcessor: "is for audio models",
}

# In the order in which ``generate`` appends them, which is the order of `core.law`.
WARPERS: tuple[tuple[type, str, str], ...] = (
    (hf.TemperatureLogitsWarper, "temperature", "temperature"),
    (hf.TopKLogitsWarper, "top_k", "top_k"),
    (hf.TopPLogitsWarper, "top_p", "top_p"),
    (hf.MinPLogitsWarper, "min_p", "min_p"),
    (hf.TypicalLogitsWarper, "typical_p", "mass"),
)


def check(processors: Sequence[Processor], ids: Tensor, vocabulary: int) -> None:
    """Raises ``ConfigError`` for a processor that is no function of a row's history.

    ids: ``[1, T]``, some history to try the processors on.
    """
    for processor in processors:
        reason = REFUSED.get(type(processor))
        known = type(processor).__module__.startswith("transformers.")
        if reason is None and not known and _forgets(processor, ids, vocabulary):
            reason = "gives other scores when it is called again"
        if reason is not None:
            raise ConfigError(
                f"logits processor {type(processor).__name__} {reason}, so that it cannot judge "
                "drafted tokens: call generate without custom_generate for it."
            )


def _forgets(processor: Processor, ids: Tensor, vocabulary: int) -> bool:
    """Whether a copy of the processor answers the same question differently the second time."""
    try:
        trial = copy.deepcopy(processor)
    except Exception:  # what cannot be copied cannot be tried without changing it
        return False
    if trial is processor:
        return False
    scores = torch.linspace(-1, 1, vocabulary, device=ids.device)[None]
    try:
        first = trial(ids, scores.clone())
        trial(torch.cat([ids, ids[:, -1:]], 1), scores.clone())
        again = trial(ids, scores.clone())
    except Exception:  # it has its reasons, and will tell them when it is really called
        return False
    return not torch.equal(first, again)


def split(processors: Sequence[Processor]) -> tuple[list[Processor], dict[str, Any]]:
    """Returns the processors that have to be called, and the options that say what the others do.

    The temperature and the truncations that ``generate`` puts at the end are made by `core.law`,
    for all rows and positions at once.

    >>> split([hf.TemperatureLogitsWarper(0.5), hf.TopKLogitsWarper(7)])
    ([], {'top_k': 7, 'temperature': 0.5})
    """
    left = list(processors)
    while left and type(left[-1]) is hf.LogitNormalization:  # changes scores, not the law
        left.pop()
    options: dict[str, Any] = {}
    for kind, option, attribute in reversed(WARPERS):
        if left and type(left[-1]) is kind and _ordinary(left[-1]):
            options[option] = getattr(left.pop(), attribute)
    return left, options


def _ordinary(warper: Any) -> bool:
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
    """Shows a row's history as ``generate`` would: with its padding, on the device of the call.

    Lengths that a processor or criterion was built with (min_length, max_length, where the prompt
    ends) count the padding.
    """

    padded: Tensor  # [T] the row of input_ids
    skip: int  # prompt tokens without padding

    def __call__(self, ids: Tensor) -> Tensor:
        """Returns ``[1, T + new]``. ids: ``[1, skip + new]``, without padding."""
        return torch.cat([self.padded[None], ids[:, self.skip :].to(self.padded.device)], 1)


@dataclass(frozen=True, eq=False)
class RowProcessors:
    """All processors of one row as one."""

    processors: Sequence[Processor]
    view: AsGenerate

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        shown = self.view(ids)
        made = scores.to(shown.device)
        for processor in self.processors:
            made = processor(shown, made)
        return made.to(scores.device)
