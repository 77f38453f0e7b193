"""Options of a model's generation_config that `SamplingParams` lacks: honoured, or refused by name.

They are honoured by transformers' own processors, built as its ``generate`` builds them and in the
same order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.generation import logits_process as hf
from transformers.utils import GENERATION_CONFIG_NAME

from outpace.core.params import LogitsProcessor, SamplingParams
from outpace.core.values import integer, token_ids
from outpace.errors import ConfigError, ModelLoadError, reason_of

REMEDY = (
    "set it aside with LLM(..., generation_config='none'), which ignores the model's own "
    "generation_config, and give what you want of it as SamplingParams."
)

REFUSED: dict[str, tuple[Any, ...]] = {
    # Other searches than drawing one token after another
    "num_beams": (1,),
    "num_beam_groups": (1,),
    "diversity_penalty": (0, 0.0),
    "penalty_alpha": (0, 0.0),
    "dola_layers": (),
    "constraints": (),
    "force_words_ids": (),
    # Further runs of the model, or a state of their own
    "guidance_scale": (1, 1.0),
    "watermarking_config": (),
    "token_healing": (False,),
    # Truncations that ``generate`` applies after or between those of SamplingParams
    "epsilon_cutoff": (0, 0.0, 1, 1.0),
    "eta_cutoff": (0, 0.0, 1, 1.0),
    "top_h": (),
    # Options of the call, not of the text
    "num_return_sequences": (1,),
    "max_time": (),
}
"""Options that cannot be honoured, and the values at which they ask for nothing."""

_ELSEWHERE = {"num_beams": " unless LLM.beam_search asks for it"}
"""By option, where else in outpace it can be had."""


def check_file(folder: str | Path) -> None:
    """Raises ``ModelLoadError`` for a generation_config.json that cannot be read.

    transformers passes over such a file in silence, and texts would come without the options that
    the model was published with. A model without the file is fine, and so is a hub name.
    """
    file = Path(folder) / GENERATION_CONFIG_NAME
    if not file.is_file():
        return
    try:
        GenerationConfig.from_pretrained(folder)
    except Exception as error:  # whatever its constructor stumbles over
        raise ModelLoadError(
            f"cannot read {str(file)!r} ({reason_of(error, named=True)}): correct it, or delete it "
            "to go without."
        ) from error


def check(config: GenerationConfig) -> None:
    """Raises ``ConfigError`` for an option that would otherwise be ignored in silence."""
    for name, harmless in REFUSED.items():
        value = getattr(config, name, None)
        if value is not None and value not in harmless:
            raise ConfigError(
                f"the model's generation_config sets {name}={value!r}, which outpace does not do"
                f"{_ELSEWHERE.get(name, '')}: {REMEDY}"
            )
    try:
        _check_tokens("eos_token_id", config.eos_token_id)
        _check_tokens("forced_eos_token_id", config.forced_eos_token_id)
        for name in ("max_length", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size"):
            integer(name, getattr(config, name) or 0, least=0)
        text = _Text([0], 1, [0], torch.device("cpu"), [0])
        _stop_strings(config)
        _before_penalty(config, text)
        _processors(config, text, SamplingParams())
    except Exception as error:  # the constructors of processors raise all sorts
        raise ConfigError(
            "the model's generation_config cannot be used "
            f"({reason_of(error, named=True)}): {REMEDY}"
        ) from error


def _check_tokens(name: str, value: Any) -> None:
    if value is not None:
        token_ids(name, value if isinstance(value, (list, tuple)) else [value])


def completed(
    config: GenerationConfig,
    asked: SamplingParams,
    resolved: SamplingParams,
    prompt: Sequence[int],
    eos_ids: Sequence[int],
    room: int,
    device: torch.device,
    source: Sequence[int] | None = None,
) -> SamplingParams:
    """Returns the params of one request with all else that the config asks for.

    asked: the params as the user gave them, which win over the config. resolved: the same with
    unset options taken from the config. prompt: its token ids. room: tokens left in the context.
    device: where the scores will be. source: the token ids that an encoder reads.
    """
    longest = min(resolved.max_tokens or room, room)
    # As in ``generate``, lengths of what is new take precedence over lengths with the prompt.
    if asked.max_tokens is None and config.max_new_tokens is None and config.max_length is not None:
        longest = max(1, min(room, config.max_length - len(prompt)))
        # Otherwise the length that texts have where nothing names one would cut them.
        most = max(longest, resolved.max_tokens or longest)
        resolved = dataclasses.replace(resolved, max_tokens=most)
    stop = resolved.stop_strings if asked.stop is not None else _stop_strings(config)
    ends = [] if resolved.ignore_eos else list(eos_ids)
    text = _Text(list(prompt), longest, ends, device, list(prompt if source is None else source))
    before, penalty = _before_penalty(config, text), resolved.repetition_penalty or 1.0
    if before and penalty != 1.0:
        # What the config does to scores comes before the penalty, so the penalty has to become a
        # processor after it.
        before.append(hf.RepetitionPenaltyLogitsProcessor(float(penalty)))
        penalty = 1.0
    after = _processors(config, text, asked)
    return dataclasses.replace(
        resolved.shortened(longest),
        stop=stop or None,
        repetition_penalty=penalty,
        logits_processors=(*before, *after, *resolved.logits_processors),
    )


def _processors(
    config: GenerationConfig, text: _Text, asked: SamplingParams
) -> list[LogitsProcessor]:
    """What follows the repetition penalty, in the order of ``generate``."""
    return [
        *_repeating(config, text),
        *_of_length(config, text, asked),
        *_suppressed(config, text),
    ]


@dataclass(frozen=True)
class _Text:
    """Facts about one request's text from which processors are built."""

    prompt: list[int]
    longest: int
    eos_ids: list[int]
    device: torch.device
    source: list[int]
    """The tokens that options named ``encoder_...`` are about: those that an encoder reads, or the
    prompt where there is no encoder."""

    @property
    def source_ids(self) -> Any:
        return self.ids([self.source])

    def ids(self, tokens: Any) -> Any:
        """Returns token ids on the device of the scores: not all processors move theirs there."""
        return torch.tensor(tokens, device=self.device)


def _listed(tokens: int | list[int]) -> list[int]:
    return [tokens] if isinstance(tokens, int) else list(tokens)


def _stop_strings(config: GenerationConfig) -> tuple[str, ...]:
    found = config.stop_strings
    if found is None:
        return ()
    return (found,) if isinstance(found, str) else tuple(found)


def _before_penalty(config: GenerationConfig, text: _Text) -> list[LogitsProcessor]:
    found: list[LogitsProcessor] = []
    if config.sequence_bias is not None:
        found.append(hf.SequenceBiasLogitsProcessor(config.sequence_bias))
    if (config.encoder_repetition_penalty or 1.0) != 1.0:
        penalty = float(config.encoder_repetition_penalty)
        found.append(hf.EncoderRepetitionPenaltyLogitsProcessor(penalty, text.source_ids))
    return found


def _repeating(config: GenerationConfig, text: _Text) -> list[LogitsProcessor]:
    found: list[LogitsProcessor] = []
    # Longer sequences than there will be tokens cannot repeat, and transformers counts up to them.
    if (size := config.no_repeat_ngram_size or 0) and size <= len(text.prompt) + text.longest:
        found.append(hf.NoRepeatNGramLogitsProcessor(size))
    if (size := config.encoder_no_repeat_ngram_size or 0) and size <= len(text.source):
        found.append(hf.EncoderNoRepeatNGramLogitsProcessor(size, text.source_ids))
    return found


def _of_length(
    config: GenerationConfig, text: _Text, asked: SamplingParams
) -> list[LogitsProcessor]:
    found: list[LogitsProcessor] = []
    least: int = (config.min_length or 0) if config.min_new_tokens is None else 0
    if least > 0 and text.eos_ids and asked.min_tokens is None:
        found.append(hf.MinLengthLogitsProcessor(least, text.ids(text.eos_ids)))
    if config.forced_bos_token_id is not None:
        found.append(hf.ForcedBOSTokenLogitsProcessor(config.forced_bos_token_id))
    if config.forced_eos_token_id is not None:
        end = len(text.prompt) + text.longest
        found.append(
            hf.ForcedEOSTokenLogitsProcessor(end, text.ids(_listed(config.forced_eos_token_id)))
        )
    if config.remove_invalid_values:
        found.append(hf.InfNanRemoveLogitsProcessor())
    if config.exponential_decay_length_penalty is not None and text.eos_ids:
        decay, start = config.exponential_decay_length_penalty, len(text.prompt)
        found.append(hf.ExponentialDecayLengthPenalty(decay, text.ids(text.eos_ids), start))
    return found


def _suppressed(config: GenerationConfig, text: _Text) -> list[LogitsProcessor]:
    found: list[LogitsProcessor] = []
    if config.suppress_tokens:
        found.append(hf.SuppressTokensLogitsProcessor(config.suppress_tokens))
    if config.begin_suppress_tokens:
        forced = len(text.prompt) == 1 and config.forced_bos_token_id is not None
        begin = len(text.prompt) + forced  # a forced first token is not suppressed
        found.append(hf.SuppressTokensAtBeginLogitsProcessor(config.begin_suppress_tokens, begin))
    return found
