"""What a user may ask of the text: sampling options and stop conditions."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from numbers import Real
from typing import Any, Literal

from torch import Tensor

from outpace.core.trees.tree_shape import LARGEST
from outpace.core.values import (
    flag,
    is_whole,
    items,
    number,
    plain,
    shown,
    texts,
    token_ids,
    whole,
)
from outpace.errors import ParamsError, UnknownOption, names_checked

LogitsProcessor = Callable[[Tensor, Tensor], Tensor]
"""``processor(ids [R, T], scores [R, V]) -> scores [R, V]``, as in transformers."""


@names_checked(UnknownOption, "sampling option")
@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Options of one request. ``None`` means "as the model's generation_config says".

    The law of each token is made in this order: logit_bias, allowed_token_ids, repetition /
    presence / frequency penalty, bad_words, min_tokens, logits_processors, temperature, top_k,
    top_p, min_p, typical_p. Penalties and min_tokens see the history of each drafted position.

    Numbers of numpy are taken like Python's, and lists are kept as tuples. Raises ``ParamsError``
    (a ``ValueError``) for a value outside its range, and ``UnknownOption``, which is a
    ``TypeError`` too, for an unknown name.

    >>> SamplingParams(temperature=0.8, top_p=0.9, seed=1).top_p
    0.9
    """

    n: int = 1
    """How many texts to make from the prompt, each with a seed of its own derived from ``seed``."""
    temperature: float | None = None
    """0 is greedy. Unset and without ``do_sample`` in the model's config: greedy."""
    top_k: int | None = None
    """Keep the k most probable tokens (and those that tie with the last). 0 or -1 keeps all."""
    top_p: float | None = None
    """Keep the fewest most probable tokens whose mass reaches top_p."""
    min_p: float | None = None
    """Keep the tokens with at least min_p times the mass of the most probable one."""
    typical_p: float | None = None
    """Locally typical sampling (Meister et al. 2022). 1 keeps all."""
    repetition_penalty: float | None = None
    """Divide positive and multiply negative logits of tokens in prompt or output."""
    presence_penalty: float = 0.0
    """Subtract from the logit of each token in the output."""
    frequency_penalty: float = 0.0
    """Subtract from a token's logit once for each time it is in the output."""
    logit_bias: Mapping[int, float] | None = dataclasses.field(default=None, hash=False)
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    """Texts that must not be generated, tokenised with and without a leading space."""
    bad_words_ids: Sequence[Sequence[int]] | None = None
    logits_processors: Sequence[LogitsProcessor] = ()
    """Called for each drafted position with that position's own history."""
    seed: int | None = None
    """Unset: drawn from the operating system; `CompletionOutput.seed` reports it where it gives the
    text again."""
    max_tokens: int | None = None
    """Unset: the model's max_new_tokens, or what its max_length leaves behind the prompt, else 256;
    never past the context."""
    min_tokens: int | None = None
    """No end-of-sequence or stop token before this many tokens. More than max_tokens is refused; a
    minimum of the model's own gives way to max_tokens."""
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] = ()
    """Tokens that end the text. None is taken as none, as for logits_processors."""
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    """Report the log-probability of each token, and of this many most probable ones, under the law
    that it was drawn from. A greedy row reports the law before the argmax (temperature 1)."""
    skip_special_tokens: bool = True
    speculative: Literal["auto", "off"] | int | None = None
    """For this request: "off" decodes plainly; K drafts K tokens in each round, fewer where the
    drafter has no more to say or a length policy ends its chains, and never more than 256. "auto",
    as unset: as the engine was configured."""
    tag: str | None = None
    """What the request is about, such as its task or language, for drafters that go by it (methods
    "tagged" and "task"). It changes no law."""

    def __post_init__(self) -> None:
        for option in dataclasses.fields(self):
            value = getattr(self, option.name)
            if value is not None or option.default is not None:  # else: unset, and may be
                read = _READERS[option.name]
                try:
                    object.__setattr__(self, option.name, read(option.name, value))
                except ParamsError as error:
                    error.about(option.name)
                    raise
        if self.max_tokens is not None and (self.min_tokens or 0) > self.max_tokens:
            raise ParamsError(
                f"min_tokens={shown(self.min_tokens)} is more than max_tokens="
                f"{shown(self.max_tokens)}: lower the first, or raise the second."
            ).about("min_tokens")

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The stop strings, one or several, as a tuple."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is always taken."""
        return self.temperature == 0

    @property
    def seeded(self) -> bool:
        """Whether the text is sampled with a seed of the user's, so that it has to repeat
        itself."""
        return self.seed is not None and not self.greedy

    def resolve(self, defaults: Mapping[str, Any]) -> SamplingParams:
        """Returns the params with each unset option taken from ``defaults``, else switched off.

        defaults: as a generation_config spells them (``do_sample``, ``max_new_tokens``, ...).
        Raises ``ParamsError`` for a default outside its range, and for a min_tokens that the
        default of max_tokens does not allow.
        """
        found = {**_OFF, **{k: v for k, v in defaults.items() if v is not None}}
        if not flag("do_sample", found.get("do_sample", False)):
            found["temperature"] = 0.0
        found.setdefault("temperature", 1.0)
        found["max_tokens"] = found.pop("max_new_tokens")
        found["min_tokens"] = found.pop("min_new_tokens")
        names = {f.name for f in dataclasses.fields(self)}
        unset = {k: v for k, v in found.items() if k in names and getattr(self, k) is None}
        most = whole("max_tokens", unset.get("max_tokens", self.max_tokens), least=1)
        if self.min_tokens is None:
            least = whole("min_tokens", unset["min_tokens"], least=0)
            unset["min_tokens"] = min(least, most)
        elif self.min_tokens > most:
            raise ParamsError(
                f"min_tokens={shown(self.min_tokens)} is more than the {most} tokens that a text "
                "may have here where max_tokens is not given: give max_tokens, too."
            ).about("min_tokens")
        return dataclasses.replace(self, **unset)

    def shortened(self, most: int) -> SamplingParams:
        """Returns the same params for a text that can have ``most`` tokens only, whatever they
        allow: a min_tokens beyond that can forbid no end."""
        longest = min(self.max_tokens or most, most)
        least = None if self.min_tokens is None else min(self.min_tokens, longest)
        return dataclasses.replace(self, max_tokens=longest, min_tokens=least)

    @classmethod
    def from_dict(cls, options: Mapping[str, Any]) -> SamplingParams:
        """Returns the params with these options, as ``SamplingParams(**options)`` does."""
        if not isinstance(options, Mapping):
            raise ParamsError(f"sampling options must be a dict, not {shown(options)}.")
        return cls(**{str(name): value for name, value in options.items()})


_OFF: dict[str, Any] = {
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "typical_p": 1.0,
    "repetition_penalty": 1.0,
    "max_new_tokens": 256,
    "min_new_tokens": 0,
}

_COLDEST = 1e-6  # Below this the scores of an ordinary model, divided by it, leave float32.

_MOST_TEXTS = 1 << 14  # A request per text is made at once; more can only be a slip.


def _temperature(name: str, value: Any) -> float:
    found = number(name, value, 0.0, math.inf, closed=True)
    if 0 < found < _COLDEST:
        raise ParamsError(f"{name} must be 0 (greedy) or at least {_COLDEST:g}, not {found}.")
    return found


def _top_k(name: str, value: Any) -> int:
    found = whole(name, value)
    if found < -1:
        raise ParamsError(f"{name} must be 0 or -1 (off), or positive, not {shown(found)}.")
    return found


def _seed(name: str, value: Any) -> int:
    found = whole(name, value)
    if not -(2**63) <= found < 2**63:
        raise ParamsError(f"{name} must fit a signed 64-bit integer, not {shown(found)}.")
    return found


def _allowed(name: str, value: Any) -> tuple[int, ...]:
    found = token_ids(name, value)
    if not found:
        raise ParamsError(f"{name} is empty: no token could be generated.")
    return found


def _bias(name: str, value: Any) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise ParamsError(f"{name} must be a dict of token id and number, not {shown(value)}.")
    return {
        token: _bias_of(name, token, bias)
        for token, bias in zip(token_ids(name, list(value)), value.values(), strict=True)
    }


def _bias_of(name: str, token: int, value: Any) -> float:
    if isinstance(value, Real) and value == -math.inf:
        return -math.inf
    try:
        return number(name, value, -math.inf, math.inf, closed=True)
    except ParamsError as error:
        raise ParamsError(
            f"{name} of token {token} must be a number or -inf (never), not {shown(value)}."
        ) from error


def _words_ids(name: str, value: Any) -> tuple[tuple[int, ...], ...]:
    words = items(name, value, "lists of token ids")
    if any(not isinstance(plain(word), (list, tuple)) for word in words):
        raise ParamsError(f"{name} must be a list of lists of token ids, not {shown(value)}.")
    found = tuple(token_ids(name, word) for word in words)
    if () in found:
        raise ParamsError(f"{name} holds an empty list, which would forbid every token.")
    return found


def _stop(name: str, value: Any) -> str | tuple[str, ...]:
    try:
        found = texts(name, [value] if isinstance(value, str) else value)
    except ParamsError as error:
        raise ParamsError(
            f"{name} must be a string or a list of strings, none of them empty, not {shown(value)}."
        ) from error
    return found[0] if isinstance(value, str) else found


def _processors(name: str, value: Any) -> tuple[LogitsProcessor, ...]:
    found = items(name, value, "functions of (ids, scores)")
    if not all(callable(processor) for processor in found):
        raise ParamsError(f"{name} must be functions of (ids, scores), not {shown(value)}.")
    return found


def _speculative(name: str, value: Any) -> Literal["auto", "off"] | int:
    if isinstance(value, str) and value in ("auto", "off"):
        return value  # type: ignore[return-value]  # mypy does not narrow a str by its value
    if not is_whole(value) or not 0 <= value <= LARGEST:
        raise ParamsError(
            f"{name} must be 'auto', 'off' or a whole number from 0 to {LARGEST}, not "
            f"{shown(value)}."
        )
    return int(value)


def _tag(name: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ParamsError(f"{name} must be a word, not {shown(value)}.")
    return value


_SHARE = partial(number, low=0.0, high=1.0, closed=False)
_PENALTY = partial(number, low=-2.0, high=2.0, closed=True)
_COUNT = partial(whole, least=0)

_READERS: dict[str, Callable[[str, Any], Any]] = {
    "n": partial(whole, least=1, most=_MOST_TEXTS),
    "temperature": _temperature,
    "top_k": _top_k,
    "top_p": _SHARE,
    "min_p": partial(number, low=0.0, high=1.0, closed=True),
    "typical_p": _SHARE,
    "repetition_penalty": partial(number, low=0.0, high=math.inf, closed=False),
    "presence_penalty": _PENALTY,
    "frequency_penalty": _PENALTY,
    "logit_bias": _bias,
    "allowed_token_ids": _allowed,
    "bad_words": texts,
    "bad_words_ids": _words_ids,
    "logits_processors": _processors,
    "seed": _seed,
    "max_tokens": partial(whole, least=1),
    "min_tokens": _COUNT,
    "stop": _stop,
    "stop_token_ids": token_ids,
    "include_stop_str_in_output": flag,
    "ignore_eos": flag,
    "logprobs": _COUNT,
    "skip_special_tokens": flag,
    "speculative": _speculative,
    "tag": _tag,
}
"""Makes of each option what the engine works with; raises ``ParamsError`` for what is none."""
