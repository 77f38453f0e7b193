"""The inputs of encoders: audio as features, and those of a ``generate`` call, row by row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoFeatureExtractor

from outpace.core.request import EncoderInputs
from outpace.core.values import shown
from outpace.errors import ConfigError, PromptError
from outpace.targets.hf.loading.loaded import LoadedModel
from outpace.targets.hf.loading.source import locate
from outpace.targets.hf.seq2seq.decoder import DecoderPositions

FEATURES = "input_features"
_FORMS = (
    "samples as an array of one dimension, a tuple of them and their rate in Hz, or the features "
    "of one text as {'input_features': ...}"
)


def reads_audio(model: nn.Module) -> bool:
    """Whether the encoder reads features of audio."""
    return getattr(model, "main_input_name", None) == FEATURES


def audio_feature_shape(config: Any) -> tuple[int, int] | None:
    """Returns the shape ``[M, F]`` of what an encoder like Whisper's hears; None for any other."""
    bins = getattr(config, "num_mel_bins", None)
    length = getattr(config, "max_source_positions", None)
    return None if bins is None or length is None else (int(bins), 2 * int(length))


def _numbers(given: Any) -> Tensor:
    """Returns what a caller gives as audio; ``PromptError`` for what is not made of numbers."""
    try:
        found = torch.as_tensor(given)
    except (TypeError, ValueError, RuntimeError) as error:
        raise PromptError(f"audio is {_FORMS}, not {shown(given)}.") from error
    if found.is_complex():
        raise PromptError(f"audio is {_FORMS}, not complex numbers.")
    if not bool(found.isfinite().all()):
        raise PromptError("the audio holds NaN or infinite numbers: read or record it again.")
    return found.detach()


def _checked_samples(given: Any) -> Tensor:
    """Returns samples of audio ``[n]`` as floating-point numbers; ``PromptError`` for others."""
    found = _numbers(given)
    if found.ndim != 1 or not found.numel():
        raise PromptError(f"audio is {_FORMS}, not {shown(given)}.")
    if not found.is_floating_point() and bool((found.float().abs() > 1).any()):
        raise PromptError(
            "samples of audio are numbers from -1 to 1, and these are whole numbers beyond that: "
            "divide samples of 16 bits by 32768."
        )
    return _floating(found)


def _floating(numbers: Tensor) -> Tensor:
    return numbers if numbers.is_floating_point() else numbers.float()


def _is_rate(given: Any, wanted: int) -> bool:
    """Whether a rate that a caller gives is the one that is wanted."""
    try:
        return float(given) == wanted
    except (TypeError, ValueError, OverflowError):
        return False


class AudioReader:
    """Makes sources of audio for one model.

    The extractor is read from the model's folder when samples come for the first time.
    """

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded = loaded
        self._extractor: Any = None
        shape = audio_feature_shape(loaded.model.config)
        assert shape is not None  # or the model would have been refused
        self._shape = shape

    def __call__(self, audio: Any) -> EncoderInputs:
        """Returns what the encoder reads. audio: see the error message; ``PromptError``."""
        if isinstance(audio, Mapping) and set(audio) == {FEATURES}:
            return self._source(_floating(_numbers(audio[FEATURES])))
        samples, rate = audio if isinstance(audio, tuple) and len(audio) == 2 else (audio, None)
        return self._source(self._extracted(_checked_samples(samples), rate))

    def _source(self, features: Tensor) -> EncoderInputs:
        single = features[0] if features.ndim == 3 and len(features) == 1 else features
        if tuple(single.shape) != self._shape:
            raise PromptError(
                f"the encoder of {self._loaded.name} reads features of shape "
                f"{list(self._shape)}, not {list(features.shape)}."
            )
        return EncoderInputs(features={FEATURES: single})

    def _extracted(self, samples: Tensor, rate: Any) -> Tensor:
        extractor = self._own_extractor()
        wanted = int(extractor.sampling_rate)
        if rate is not None and not _is_rate(rate, wanted):
            raise PromptError(
                f"{self._loaded.name} hears {wanted} samples a second, and the audio has "
                f"{shown(rate)}: resample it, and give its rate in Hz."
            )
        if samples.numel() > extractor.n_samples:
            raise PromptError(
                f"the audio takes {samples.numel() / wanted:.1f} s and {self._loaded.name} hears "
                f"{extractor.n_samples / wanted:.0f} s at once: cut it, or call the model's own "
                "generate with custom_generate=outpace.hf.speculative(...), which goes through "
                "long audio piece by piece."
            )
        found = extractor(samples.cpu().numpy(), sampling_rate=wanted, return_tensors="pt")
        features: Tensor = found[FEATURES]
        return features

    def _own_extractor(self) -> Any:
        if self._extractor is None:
            name, load = self._loaded.name, AutoFeatureExtractor.from_pretrained
            try:
                if self._loaded.cpu_kernels is None:
                    raise FileNotFoundError("a model that was handed over has no folder")
                self._extractor = load(locate(name))  # type: ignore[no-untyped-call]
            except Exception as error:  # files of others, and models that have none
                raise PromptError(
                    f"{name} came without a feature extractor, which samples of audio need: give "
                    "the model's folder instead of the loaded model, or the features of each text "
                    "as {'input_features': ...}."
                ) from error
        return self._extractor


# -- calls of generate -----------------------------------------------------------------------------


_OF_SOURCES = ("encoder_outputs", "attention_mask")
_OF_DECODER = "decoder_"


def of_decoder(model: nn.Module, model_kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments that are about the decoder's tokens, named as in a call of a
    decoder-only model.

    Raises ``ConfigError`` for padding where the model would count it as text.
    """
    own = {
        name.removeprefix(_OF_DECODER): value
        for name, value in model_kwargs.items()
        if name not in _OF_SOURCES
    }
    mask = own.get("attention_mask")
    if mask is not None and not bool(mask.bool().all()) and DecoderPositions(model).counts_padding:
        raise ConfigError(
            f"{type(model).__name__} counts the padding of decoder_input_ids as tokens: give "
            "decoder prompts of one length, or one call for each."
        )
    return own


def sources_of(
    model: nn.Module, rows: int, model_kwargs: Mapping[str, Any], asked: Mapping[str, Any]
) -> list[EncoderInputs]:
    """Returns the source of each row: the states that ``generate`` has had encoded already, and
    what they were made of, for drafters that read it themselves.

    asked: the variables of the ``generate`` call. Raises ``PromptError`` for a source of padding
    only.
    """
    states: Tensor = model_kwargs["encoder_outputs"][0]
    mask = model_kwargs.get("attention_mask")
    if mask is None or mask.shape != states.shape[:2]:  # Whisper's is about samples, and not used
        mask = torch.ones(states.shape[:2], device=states.device)
    keep = mask.bool().to(states.device)
    for row, kept in enumerate(keep.any(1).tolist()):
        if not kept:
            raise PromptError(
                f"row {row} of the sources is empty or all padding: give it at least one token."
            )
    given, name = asked.get("inputs_tensor"), asked.get("model_input_name")
    return [
        EncoderInputs(
            **_raw(given, name, row * len(given) // rows, keep[row]) if given is not None else {},
            states=states[row, keep[row]],
            encoder=model,
        )
        for row in range(rows)
    ]


def _raw(given: Tensor, name: str | None, row: int, keep: Tensor) -> dict[str, Any]:
    """What the encoder has read of one row, as arguments of an `EncoderInputs`."""
    if name == FEATURES:
        return {"features": {FEATURES: given[row]}}
    # Where only states were given, generate lets a stand-in come before them: tokens below 0 for
    # a ModelOutput, one token for a tuple.
    if name != "input_ids" or given[row].shape != keep.shape or int(given[row].min()) < 0:
        return {}
    return {"token_ids": given[row][keep.to(given.device)].tolist()}
