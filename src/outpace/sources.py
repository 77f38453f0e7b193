"""Prompts of encoder-decoders: what the encoder reads, and what the decoder begins with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from outpace.core.values import shown
from outpace.errors import ConfigError, PromptError, PromptTooLong
from outpace.prompts import Prompt, unwrapped
from outpace.targets.base import Source
from outpace.targets.hf.kinds import longest_source
from outpace.targets.hf.loading.loaded import Loaded
from outpace.targets.hf.seq2seq.inputs import AudioReader, reads_audio

_OF_BOTH = {"encoder_prompt", "decoder_prompt"}
_AUDIO = "multi_modal_data"


@dataclass(frozen=True)
class Parts:
    """A prompt for an encoder-decoder, in its parts; None for those that were not given."""

    encoder: Any = None
    decoder: Any = None
    audio: Any = None


def parted(prompt: Prompt, hears: bool) -> Parts:
    """Returns the parts of a prompt, named as in vLLM.

    A prompt that is given alone is for the encoder. An encoder that ``hears`` gets the audio, and a
    prompt beside it is for the decoder.

    >>> parted("a text", hears=False)
    Parts(encoder='a text', decoder=None, audio=None)
    >>> parted({"encoder_prompt": "a text", "decoder_prompt": [2, 250]}, hears=False)
    Parts(encoder='a text', decoder=[2, 250], audio=None)
    """
    given: Any = prompt
    if isinstance(given, Mapping) and _OF_BOTH & set(given):
        return _of_both(given)
    text, audio = _apart(given)
    return Parts(decoder=text, audio=audio) if hears else Parts(encoder=text, audio=audio)


def _of_both(given: Mapping[str, Any]) -> Parts:
    odd = sorted(map(str, set(given) - _OF_BOTH - {_AUDIO}))
    if odd:
        raise PromptError(
            f"a prompt with encoder_prompt and decoder_prompt has no {', '.join(odd)}: give it "
            "inside one of the two."
        )
    encoder, inside = _apart(given.get("encoder_prompt"))
    audio = _audio_of(given.get(_AUDIO))
    if audio is not None and inside is not None:
        raise PromptError("the prompt has audio twice: give it once.")
    return Parts(encoder, given.get("decoder_prompt"), audio if inside is None else inside)


def _apart(given: Any) -> tuple[Any, Any]:
    """The text or the tokens of one part of a prompt, and its audio; None for what is missing."""
    if not isinstance(given, Mapping) or _AUDIO not in given:
        return given, None
    rest = {name: value for name, value in given.items() if name != _AUDIO}
    text = rest if any(value not in (None, "") for value in rest.values()) else None
    return text, _audio_of(given[_AUDIO])


def _audio_of(data: Any) -> Any:
    if data is None:
        return None
    if not isinstance(data, Mapping) or set(data) != {"audio"}:
        raise PromptError(
            "multi_modal_data of an encoder-decoder is a dict with 'audio' alone, not "
            f"{shown(data)}."
        )
    return data["audio"]


class SourceReader:
    """Reads prompts for one encoder-decoder."""

    def __init__(self, loaded: Loaded, token_ids: Callable[[str, bool], list[int]]) -> None:
        """token_ids: tokenizes a text, with special tokens or without."""
        self._loaded = loaded
        self._token_ids = token_ids
        self._audio = AudioReader(loaded) if reads_audio(loaded.model) else None
        self._longest = longest_source(loaded.model)

    def __call__(self, prompt: Prompt) -> tuple[Source, list[int]]:
        """Returns what the encoder reads, and what the decoder begins with; ``PromptError`` for a
        prompt that this model cannot read."""
        parts = parted(prompt, hears=self._audio is not None)
        return self._source(parts), self._beginning(parts.decoder)

    def _source(self, parts: Parts) -> Source:
        if self._audio is not None:
            return self._audio(self._heard(parts))
        if parts.audio is not None:
            raise PromptError(f"{self._loaded.name} reads text, no audio: leave 'audio' out.")
        ids = self._ids(parts.encoder, special=True)
        if not ids:
            raise PromptError("the encoder's prompt is empty: give at least one token.")
        if self._longest is not None and len(ids) > self._longest:
            raise PromptTooLong(
                f"the encoder's prompt has {len(ids)} tokens and the encoder positions for "
                f"{self._longest}: shorten the prompt."
            )
        return Source(token_ids=ids)

    def _heard(self, parts: Parts) -> Any:
        if parts.encoder not in (None, ""):
            raise PromptError(
                f"the encoder of {self._loaded.name} reads audio, no text: give the text as "
                "'decoder_prompt', or leave it out."
            )
        if parts.audio is None:
            raise PromptError(
                f"{self._loaded.name} writes down what it hears: give "
                "{'multi_modal_data': {'audio': ...}}."
            )
        return parts.audio

    def _beginning(self, given: Any) -> list[int]:
        """The decoder's first tokens: as transformers does it, the one that texts of this model
        start with comes first, whether or not it was given."""
        own = [] if given is None or given == "" else self._ids(given, special=False)
        if self._audio is not None and own:
            return own
        start = start_token(self._loaded.model)
        return own if own[:1] == [start] else [start, *own]

    def _ids(self, given: Any, special: bool) -> list[int]:
        if given is None:
            raise PromptError("the prompt has no encoder_prompt: give what the encoder reads.")
        found = unwrapped(given)
        ids = self._token_ids(found, special) if isinstance(found, str) else found
        top = self._loaded.config.vocab_size
        if any(not 0 <= token < top for token in ids):
            raise PromptError(f"prompt token ids must be whole numbers in [0, {top}).")
        return ids


def start_token(model: Any) -> int:
    """Returns the token that the decoder's texts start with; ``ConfigError`` for a model that does
    not say."""
    for config in (model.generation_config, model.config):
        for name in ("decoder_start_token_id", "bos_token_id"):
            found = getattr(config, name, None)
            if isinstance(found, Sequence):
                found = found[0] if len(set(found)) == 1 else None
            if found is not None:
                return int(found)
    raise ConfigError(
        f"{type(model).__name__} does not say which token its texts start with: set "
        "decoder_start_token_id in its generation_config."
    )
