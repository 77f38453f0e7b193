"""Prompts as they are given: texts, token ids in any container, or dicts of either; and what an
encoder-decoder reads and begins with."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Protocol

from outpace.core.request import EncoderInputs
from outpace.core.unicode import check_unicode
from outpace.core.values import is_integer, plain, shown
from outpace.errors import ConfigError, PromptError, PromptTooLong
from outpace.targets.hf.kinds import longest_source
from outpace.targets.hf.loading.loaded import LoadedModel
from outpace.targets.hf.seq2seq.inputs import AudioReader, reads_audio


class Array(Protocol):
    """What arrays of numpy, torch and other libraries have in common."""

    @property
    def ndim(self) -> int: ...

    def tolist(self) -> Any: ...


Prompt = str | Sequence[int] | Mapping[str, Any] | Array
"""A text; token ids as a list, an array or a tensor of one row; one of the two as
``{"prompt": ...}`` or ``{"prompt_token_ids": ...}``; what a tokenizer returns for one text; a text
with its images, ``{"prompt": ..., "multi_modal_data": {"image": ...}}`` or ``{"prompt": ...,
"images": [...]}``; or what a processor returns for those."""


class ChatIds(list[int]):
    """The token ids of a conversation. ends: the tokens that end an answer to it; None for those
    of the model's own chat template."""

    def __init__(self, ids: Iterable[int], ends: tuple[int, ...] | None = None) -> None:
        super().__init__(ids)
        self.ends = ends


_NO_PROMPTS = (bytes, bytearray, memoryview, int, float)
"""What could be iterated over, or converted, and is still no list of token ids."""

_NAMES = {"prompt", "prompt_token_ids"}
_TOKENIZED = {"input_ids", "attention_mask", "token_type_ids"}
_WITH_IMAGES = {"multi_modal_data", "images"}


def listed(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Returns the prompts of a call, one or several; ``PromptError`` for none.

    Several are a list of prompts, or what a tokenizer returns for several texts: its
    attention_mask says which tokens are padding, and these are left out.
    """
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, Mapping):
        tokenized = "input_ids" in prompts and not processed(prompts)
        return _tokenized(prompts) if tokenized else [prompts]
    if _is_array(prompts):
        return _rows(prompts)
    if isinstance(plain(prompts), _NO_PROMPTS) or not isinstance(prompts, Iterable):
        raise PromptError(f"prompts must be texts or lists of token ids, not {_shown(prompts)}.")
    if isinstance(prompts, ChatIds):
        return [prompts]
    found: list[Any] = list(prompts)
    if not found:
        raise PromptError("no prompt was given.")
    return [found] if all(_is_token(item) for item in found) else found


def unwrapped(prompt: Prompt) -> str | list[int]:
    """Returns the text or the token ids of one prompt; ``PromptError`` for what is neither."""
    found: Any = prompt
    if isinstance(found, Mapping) and "input_ids" in found:
        found = _only(_tokenized(found))
    elif isinstance(found, Mapping) and set(found) <= _NAMES:
        ids = found.get("prompt_token_ids")
        found = found.get("prompt") if ids is None else ids
    if _is_array(found):
        found = _only(_rows(found))
    if isinstance(found, str):
        return found
    if isinstance(found, Sequence) and not isinstance(found, _NO_PROMPTS):
        if found is prompt and any(isinstance(item, (str, list, tuple)) for item in found):
            raise PromptError(
                "one prompt was expected here, not a list of them: give each by itself."
            )
        return [_token(item) for item in found]
    raise PromptError(
        "a prompt is a text, a list of token ids, or a dict with one of the two as 'prompt' or "
        "'prompt_token_ids', and images as 'multi_modal_data' or 'images', not "
        f"{_shown(prompt)}."
    )


def processed(prompt: Prompt) -> bool:
    """Returns whether this is what a processor makes of a text and images."""
    return isinstance(prompt, Mapping) and "input_ids" in prompt and not set(prompt) <= _TOKENIZED


def split_processed(prompt: Mapping[str, Any]) -> tuple[list[int], dict[str, Any]]:
    """Returns the token ids of what a processor made of one text and its images, and the rest;
    ``PromptError`` where it made it of several texts, or of none."""
    ids = _table(prompt["input_ids"], "input_ids")
    if len(ids) != 1:
        raise PromptError(
            f"a processor's output holds {len(ids)} prompts with images, and nothing says which "
            "images belong to which: give the processor one prompt at a time."
        )
    mask = prompt.get("attention_mask")
    if mask is not None and not all(all(row) for row in _table(mask, "attention_mask")):
        raise PromptError(
            "a prompt with images is padded: give the processor one prompt at a time."
        )
    rest = {name: prompt[name] for name in prompt if name not in ("input_ids", "attention_mask")}
    return [_token(item) for item in ids[0]], rest


def token_ids_of(prompt: Any) -> list[int]:
    """Returns the token ids of what a chat becomes: ids, or what a processor made of it."""
    return split_processed(prompt)[0] if processed(prompt) else prompt


def split_images(prompt: Prompt) -> tuple[Prompt, list[Any]]:
    """Returns a prompt without its images, and these as they were given; ``PromptError`` for media
    of another kind."""
    if not isinstance(prompt, Mapping) or not _WITH_IMAGES & set(prompt):
        return prompt, []
    rest = {name: prompt[name] for name in prompt if name not in _WITH_IMAGES}
    media = prompt.get("multi_modal_data")
    if media is not None and (not isinstance(media, Mapping) or set(media) - {"image"}):
        named = sorted(map(str, media)) if isinstance(media, Mapping) else shown(media)
        raise PromptError(
            f"multi_modal_data is a dict with 'image', an image or a list of them, not {named}: "
            "outpace reads no other media."
        )
    found = [(media or {}).get("image"), prompt.get("images")]
    if all(one is not None for one in found):
        raise PromptError("images are given twice: drop 'images' or 'multi_modal_data'.")
    given = next((one for one in found if one is not None), None)
    return rest, _several(given)


def _several(images: Any) -> list[Any]:
    if images is None:
        return []
    return list(images) if isinstance(images, (list, tuple)) else [images]


def is_text(prompt: Prompt) -> bool:
    """Returns whether a prompt was given as a text, with or without images."""
    if isinstance(prompt, Mapping):
        return prompt.get("prompt_token_ids") is None and isinstance(prompt.get("prompt"), str)
    return isinstance(prompt, str)


def text_of(prompt: Prompt) -> str | None:
    """Returns the text of a prompt that has one; None for one of token ids alone."""
    known = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
    return known if isinstance(known, str) else None


def check_text(text: Any) -> None:
    """Raises ``PromptError`` for what is no text, or is not Unicode."""
    if not isinstance(text, str):
        raise PromptError(f"one text was expected here, not {shown(text)}.")
    check_unicode("the prompt", text)


# -- arrays, tensors, and what tokenizers return ---------------------------------------------------


def _is_array(value: Any) -> bool:
    """Whether this is an array or a tensor, and not a single number of one."""
    return hasattr(value, "tolist") and getattr(value, "ndim", 0) > 0


def _is_token(value: Any) -> bool:
    """Whether this is a number, also one of an array: the item of a list of token ids."""
    return isinstance(plain(value), Integral)


def _token(value: Any) -> int:
    number = plain(value)
    if not is_integer(number):
        raise PromptError(f"prompt token ids must be whole numbers, not {_shown(value)}.")
    return int(number)


def _rows(array: Any) -> list[Prompt]:
    """Returns the one prompt of an array ``[T]`` or ``[1, T]``."""
    if array.ndim > 2:
        raise PromptError(
            f"prompt token ids are one row of numbers, not an array of {array.ndim} dimensions."
        )
    if array.ndim == 2 and len(array) != 1:
        raise PromptError(
            f"an array of {len(array)} rows does not say which of its tokens are padding: give the "
            "tokenizer's whole output, with its attention_mask, or a list of lists of token ids."
        )
    found: list[int] = (array[0] if array.ndim == 2 else array).tolist()
    return [found]


def _tokenized(given: Mapping[str, Any]) -> list[Prompt]:
    """Returns the prompts of a tokenizer's output, without their padding."""
    ids, mask = given["input_ids"], given.get("attention_mask")
    if mask is None:
        return _rows(ids) if _is_array(ids) else listed(ids)
    rows, kept = _table(ids, "input_ids"), _table(mask, "attention_mask")
    if [len(row) for row in rows] != [len(row) for row in kept]:
        raise PromptError("attention_mask must have the shape of input_ids.")
    return [_unpadded(row, keep) for row, keep in zip(rows, kept, strict=True)]


def _table(value: Any, name: str) -> list[list[Any]]:
    """Returns rows of equal or different lengths as lists; a single row is a table of one."""
    rows = value.tolist() if _is_array(value) else value
    if not isinstance(rows, (list, tuple)) or not rows:
        raise PromptError(f"{name} must be token ids of one or several prompts.")
    rows = [row.tolist() if _is_array(row) else row for row in rows]
    if not any(isinstance(row, (list, tuple)) for row in rows):
        return [rows]
    if not all(isinstance(row, (list, tuple)) for row in rows):
        raise PromptError(f"{name} mixes single numbers and rows of them: give one kind.")
    return [list(row) for row in rows]


def _unpadded(row: Sequence[Any], kept: Sequence[Any]) -> list[Any]:
    """Returns a row without the padding at its ends; a gap between its tokens is refused."""
    places = [place for place, keep in enumerate(kept) if keep]
    if places and len(places) != places[-1] - places[0] + 1:
        raise PromptError(
            "attention_mask hides tokens in the middle of a prompt: only padding at either end can "
            "be left out."
        )
    return [row[place] for place in places]


def _only(prompts: Sequence[Prompt]) -> Prompt:
    if len(prompts) != 1:
        raise PromptError(f"one prompt was expected here, and {len(prompts)} were given.")
    return prompts[0]


def _shown(prompt: object) -> str:
    return f"one with {sorted(map(str, prompt))}" if isinstance(prompt, Mapping) else shown(prompt)


# -- encoder-decoders: what the encoder reads, and what the decoder begins with --------------------

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
    prompt next to it is for the decoder.

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
    text = None if all(map(_is_missing, rest.values())) else rest
    return text, _audio_of(given[_AUDIO])


def _is_missing(value: Any) -> bool:
    """Whether nothing is given, or a text without a character."""
    return value is None or (isinstance(value, str) and not value)


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

    def __init__(self, loaded: LoadedModel, token_ids: Callable[[str, bool], list[int]]) -> None:
        """token_ids: tokenizes a text, with special tokens or without."""
        self._loaded = loaded
        self._token_ids = token_ids
        self._audio = AudioReader(loaded) if reads_audio(loaded.model) else None
        self._longest = longest_source(loaded.model)

    def __call__(self, prompt: Prompt) -> tuple[EncoderInputs, list[int]]:
        """Returns what the encoder reads, and what the decoder begins with; ``PromptError`` for a
        prompt that this model cannot read."""
        parts = parted(prompt, hears=self._audio is not None)
        return self._source(parts), self._beginning(parts.decoder)

    def _source(self, parts: Parts) -> EncoderInputs:
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
        return EncoderInputs(token_ids=ids)

    def _heard(self, parts: Parts) -> Any:
        if not _is_missing(parts.encoder):
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
        own = [] if _is_missing(given) else self._ids(given, special=False)
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
