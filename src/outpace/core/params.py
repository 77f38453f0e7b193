"""What a user may ask of the text: sampling options and stop conditions."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Literal

from torch import Tensor

from outpace.errors import ParamsError, did_you_mean

LogitsProcessor = Callable[[Tensor, Tensor], Tensor]
"""``processor(ids [R, T], scores [R, V]) -> scores [R, V]``, as in transformers."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Options of one request. ``None`` means "as the model's generation_config says".

    The law of each token is made in this order: logit_bias, allowed_token_ids, repetition /
    presence / frequency penalty, bad_words, min_tokens, logits_processors, temperature, top_k,
    top_p, min_p, typical_p. Penalties and min_tokens see the history of each drafted position.

    Raises ``ParamsError`` (a ``ValueError``) for a value outside its range.

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
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    """Texts that must not be generated, tokenised with and without a leading space."""
    bad_words_ids: Sequence[Sequence[int]] | None = None
    logits_processors: Sequence[LogitsProcessor] = ()
    """Called for each drafted position with that position's own history."""
    seed: int | None = None
    """Unset: drawn from the operating system and reported in the output."""
    max_tokens: int | None = None
    """Unset: the model's max_new_tokens, else 256; never past the context."""
    min_tokens: int | None = None
    """No end-of-sequence or stop token before this many tokens."""
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    """Report the log-probability of each token, and of this many most probable ones, under the law
    that it was drawn from. A greedy row reports the law before the argmax (temperature 1)."""
    skip_special_tokens: bool = True
    speculative: Literal["auto", "off"] | int | None = None
    """For this request: "off" decodes plainly, K drafts exactly K, "auto" lets the engine choose.
    Unset: as the engine was configured."""

    def __post_init__(self) -> None:
        for name, low, high, closed in _RANGES:
            _check_range(name, getattr(self, name), low, high, closed)
        for name, least, what in _INTEGERS:
            _check_integer(name, getattr(self, name), least, what)
        if self.seed is not None and not -(2**63) <= self.seed < 2**63:
            raise ParamsError(f"seed must fit a signed 64-bit integer, not {self.seed}.")
        if 0 < (self.temperature or 0) < _COLDEST:
            raise ParamsError(
                f"temperature must be 0 (greedy) or at least {_COLDEST:g}, not {self.temperature}."
            )
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise ParamsError("allowed_token_ids is empty: no token could be generated.")
        _check_tokens("allowed_token_ids", self.allowed_token_ids or ())
        _check_tokens("stop_token_ids", self.stop_token_ids)
        _check_bias(self.logit_bias or {})
        if any(not isinstance(text, str) or not text for text in self.stop_strings):
            raise ParamsError("stop must be a string or a list of strings, none of them empty.")
        _check_words(self.bad_words, self.bad_words_ids)
        if not all(callable(processor) for processor in self.logits_processors):
            raise ParamsError("logits_processors must be functions of (ids, scores).")
        _check_speculative(self.speculative)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def resolve(self, defaults: Mapping[str, Any]) -> SamplingParams:
        """Returns the params with each unset option taken from ``defaults``, else switched off.

        defaults: as a generation_config spells them (``do_sample``, ``max_new_tokens``, ...).
        """
        found = {**_OFF, **{k: v for k, v in defaults.items() if v is not None}}
        if not found.get("do_sample", False):
            found["temperature"] = 0.0
        found.setdefault("temperature", 1.0)
        found["max_tokens"] = found.pop("max_new_tokens")
        found["min_tokens"] = found.pop("min_new_tokens")
        names = {f.name for f in dataclasses.fields(self)}
        unset = {k: v for k, v in found.items() if k in names and getattr(self, k) is None}
        return dataclasses.replace(self, **unset)

    @classmethod
    def from_dict(cls, options: Mapping[str, Any]) -> SamplingParams:
        """Returns the params with these options; an unknown name raises ``ParamsError``."""
        names = {f.name for f in dataclasses.fields(cls)}
        for name in options:
            if name not in names:
                raise ParamsError(f"unknown sampling option {name!r}{did_you_mean(name, names)}.")
        return cls(**options)


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

# name, lowest, highest, whether the lowest value itself is allowed
_RANGES = [
    ("temperature", 0.0, math.inf, True),
    ("top_p", 0.0, 1.0, False),
    ("min_p", 0.0, 1.0, True),
    ("typical_p", 0.0, 1.0, False),
    ("repetition_penalty", 0.0, math.inf, False),
    ("presence_penalty", -2.0, 2.0, True),
    ("frequency_penalty", -2.0, 2.0, True),
]

# name, least, how to say so
_INTEGERS = [
    ("n", 1, "at least 1"),
    ("top_k", -1, "0 (off) or positive"),
    ("max_tokens", 1, "at least 1"),
    ("min_tokens", 0, "0 or positive"),
    ("logprobs", 0, "0 or positive"),
    ("seed", -math.inf, "any"),
]


def _is_integer(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _check_range(name: str, value: Any, low: float, high: float, closed: bool) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, Real) or math.isnan(value):
        raise ParamsError(f"{name} must be a number, not {value!r}.")
    number = float(value)
    inside = low <= number <= high if closed else low < number <= high
    if not inside or math.isinf(number):
        bounds = f"{'[' if closed else '('}{low:g}, {high:g}{')' if math.isinf(high) else ']'}"
        raise ParamsError(f"{name} must be in {bounds}, not {value}.")


def _check_integer(name: str, value: Any, least: float, what: str) -> None:
    if value is None and name != "n":
        return
    if not _is_integer(value):
        raise ParamsError(f"{name} must be a whole number, not {value!r}.")
    if value < least:
        raise ParamsError(f"{name} must be {what}, not {value}.")


def _check_tokens(name: str, tokens: Sequence[int]) -> None:
    for token in tokens:
        if not _is_integer(token) or token < 0:
            raise ParamsError(f"{name} must hold token ids (0 or positive), not {token!r}.")


def _check_bias(bias: Mapping[int, float]) -> None:
    _check_tokens("logit_bias", list(bias))
    for token, value in bias.items():
        if not isinstance(value, Real) or math.isnan(value) or value == math.inf:
            raise ParamsError(
                f"logit_bias of token {token} must be a number or -inf (never), not {value!r}."
            )


def _check_words(words: Sequence[str] | None, ids: Sequence[Sequence[int]] | None) -> None:
    if words is not None and (
        isinstance(words, str) or any(not isinstance(word, str) or not word for word in words)
    ):
        raise ParamsError("bad_words must be a list of non-empty strings.")
    for word in ids or ():
        if not isinstance(word, Sequence):
            raise ParamsError("bad_words_ids must be a list of lists of token ids.")
        if len(word) == 0:
            raise ParamsError("bad_words_ids holds an empty list, which would forbid every token.")
        _check_tokens("bad_words_ids", word)


def _check_speculative(value: Any) -> None:
    if value in (None, "auto", "off") or (_is_integer(value) and value >= 0):
        return
    raise ParamsError(f"speculative must be 'auto', 'off' or K >= 0, not {value!r}.")
